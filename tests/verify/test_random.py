"""Models that draw random numbers: what depends on them is not compared, and everything else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.pytorch.model_run import ModelRun
from modelexport.runtime.fingerprints import fingerprint_of

X = torch.linspace(-1, 1, 48).reshape(4, 12)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Noisy(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.clean, self.noise, self.after = nn.Linear(12, 12), Noise(), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.clean(x) * self.scale
        return torch.tanh(known), self.after(self.noise(known))


def test_only_what_depends_on_random_numbers_is_not_compared(tmp_path: Path) -> None:
    model = Noisy()
    export(model, (X,), tmp_path / "m.onnx")
    report = verify(model, (X,), tmp_path / "m.onnx")
    assert [(one.status, one.reason) for one in report.outputs] == [
        ("agree", ""),
        ("not compared", "it depends on random numbers"),
    ]
    calls = {call.address: call for call in report.calls}
    assert calls["clean"].status == "agree"
    for address in ("noise", "after"):
        assert (calls[address].status, calls[address].reason) == (
            "not compared",
            "what it computes depends on random numbers",
        )
    assert report.agrees


def test_a_fault_beside_the_random_numbers_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wrong = Noisy(1.1)
    right = Noisy()
    right.load_state_dict(wrong.state_dict())
    export(wrong, (X,), tmp_path / "m.onnx")
    report = verify(right, (X,), tmp_path / "m.onnx")
    assert report.outputs[0].status == "differ"
    assert report.verdict == "differ"


def test_where_all_is_random_nothing_was_compared(tmp_path: Path) -> None:
    export(Noise(), (X,), tmp_path / "m.onnx")
    report = verify(Noise(), (X,), tmp_path / "m.onnx")
    assert report.verdict == "not compared"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_state_of_the_random_numbers_is_left_alone(seed: int, tmp_path: Path) -> None:
    model = Noisy()
    export(model, (X,), tmp_path / "m.onnx", check=False)
    torch.manual_seed(seed)
    expected = torch.rand(3)
    torch.manual_seed(seed)
    verify(model, (X,), tmp_path / "m.onnx")
    assert torch.equal(torch.rand(3), expected)


class SizedByValues(nn.Module):
    """A speech model in small: how long the output is, is what an exponential gives."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, 12)
        for layer in (self.one, self.other):
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.ceil(torch.exp(self.one(x).mean(-1))).long()
        return self.other(torch.repeat_interleave(x, counts, dim=0))


def test_weights_are_not_changed_where_the_sizes_of_outputs_depend_on_them(tmp_path: Path) -> None:
    model = SizedByValues()
    export(model, (X,), tmp_path / "m.onnx")
    report = verify(model, (X,), tmp_path / "m.onnx")
    assert report.agrees
    assert not report.perturbed
    assert any("the sizes of the model's outputs depend on what it computes" in note for note in report.notes)


class Reused(nn.Module):
    """Takes memory without writing to it, where a value has just been."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x * 3
        del before
        memory = torch.empty_like(x)
        return memory.copy_(x).mul(2)


def test_what_happens_to_be_in_new_memory_is_not_computed_there() -> None:
    prints = [one.fingerprint for one in ModelRun(Reused(), (X,)).computed]
    computed = [fingerprint_of((X * factor).numpy()) for factor in (3, 1, 2)]
    assert len(prints) == len(computed)
    assert all(one.same(right) for one, right in zip(prints, computed, strict=True))


class Drawn(nn.Module):
    """Draws the words that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.words = nn.Linear(12, 9), nn.Embedding(9, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(torch.multinomial(self.scores(x).softmax(-1), 1))


class DrawnBeyond(nn.Module):
    """Draws numbers only for what is larger than anything in the example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.where(x > 2, torch.randn_like(x), x))


class WithoutEffect(nn.Module):
    """Adds random numbers times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("strength", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.linear(x)
        return torch.tanh(known + self.strength * torch.randn_like(known))


@pytest.mark.parametrize("kind", [Drawn, DrawnBeyond, WithoutEffect])
def test_random_numbers_on_other_inputs_or_without_effect_are_no_faults(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind()
    export(model, (X,), tmp_path / "m.onnx")
    assert verify(model, (X,), tmp_path / "m.onnx").agrees
