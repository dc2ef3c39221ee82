"""What excuses a difference (rounding, rows without anything, choices, random numbers), and what it does not excuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.verify.verdicts import VerifyReport

Inputs = tuple[torch.Tensor, ...]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def changed(model: nn.Module, inputs: Inputs, path: Path, right: float, wrong: float) -> VerifyReport:
    """Export, see that the sound file agrees, put another number for a constant, and verify."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    export(model, inputs, path / "sound.onnx")
    assert verify(model, inputs, path / "sound.onnx").agrees
    file = load_onnx(path / "sound.onnx")
    found = 0
    for value in file.graph.initializers.values():
        array = value.const_value.numpy() if value.const_value is not None else np.zeros(0)
        if array.size == 1 and array.dtype == np.float32 and np.isclose(float(array.reshape(-1)[0]), right):
            value.const_value = ir.tensor(np.full_like(array, wrong), name=value.name)
            found += 1
    assert found
    save_model(file, path / "faulty.onnx")
    return verify(model, inputs, path / "faulty.onnx")


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


class Around(nn.Module):
    """A function between a normalization and a layer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(8), Function(function), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.inner(self.norm(x), *others))
        return result


class BesideNoise(Around):
    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x + torch.randn_like(x)


def logarithm(x: torch.Tensor) -> torch.Tensor:
    """In float64 the smallest number is another one."""
    return torch.log(x.clamp(min=0) + torch.finfo(x.dtype).eps)


def relu6(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0.0, max=6.0)


def beside_rounded(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.clamp(max=6.0), torch.round(x)], -1)[..., :8]


def times(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What is negative has no logarithm, and stands for nothing."""
    angles = torch.log(positions.float())[..., None] * torch.linspace(0.5, 1.5, 8)
    return x + torch.where((positions < 0)[..., None], 0.25, torch.sin(angles))


POSITIONS = torch.arange(1, 13).reshape(2, 6)


@pytest.mark.parametrize(
    ("model", "inputs", "right", "wrong"),
    [
        pytest.param(Around(logarithm), (numbers(2, 5, 8),), 1.1920929e-07, 1e-5, id="noise that only float64 has"),
        pytest.param(Around(times), (numbers(2, 6, 8), POSITIONS), 0.25, 1000.0, id="angles that are no numbers"),
        pytest.param(BesideNoise(relu6), (numbers(2, 5, 8),), 6.0, 60.0, id="random numbers beside it"),
        pytest.param(Around(beside_rounded), (numbers(2, 5, 8),), 6.0, 60.0, id="rounded numbers beside it"),
    ],
)
def test_a_wrong_constant_is_not_excused(
    model: nn.Module, inputs: Inputs, right: float, wrong: float, tmp_path: Path
) -> None:
    report = changed(model.eval(), inputs, tmp_path, right, wrong)
    assert [call.address for call in report.calls if call.status == "differ"] == ["inner"]


class Causal(nn.Module):
    """Attention that hides what is padded with the smallest number, so that a row without anything has a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores, self.values, self.head = (
            nn.Embedding(12, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 12),
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        places = torch.arange(ids.shape[1])
        kept = (places[None] <= places[:, None])[None] & (mask[:, None] > 0)
        for _ in range(2):  # the second makes of one number that is none many
            scores = (self.scores(x) @ x.transpose(1, 2)).masked_fill(~kept, torch.finfo(x.dtype).min)
            x = x + torch.softmax(scores, -1) @ self.values(x)
        result: torch.Tensor = self.head(x)
        return result


def test_a_file_that_gives_no_numbers_where_the_model_does_is_not_excused(tmp_path: Path) -> None:
    inputs = torch.randint(0, 12, (2, 6), generator=torch.Generator().manual_seed(1)), torch.ones(2, 6).long()
    report = changed(Causal().eval(), inputs, tmp_path, float(np.finfo(np.float32).min), -np.inf)
    assert [one.what for one in report.others if one.status == "differ"] == ["padded masks"]


class Pooled(nn.Module):
    """Two masks, one of conditions or integers and one of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * mask[..., None].to(x.dtype)
        return self.second(x) * weights[..., None]


def test_a_mask_that_is_ignored_beside_another_one_is_found_in_its_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Pooled().eval(), (numbers(3, 6, 8), torch.ones(3, 6).long(), torch.ones(3, 6))
    export(model, inputs, tmp_path / "sound.onnx")
    assert verify(model, inputs, tmp_path / "sound.onnx").agrees
    file = load_onnx(tmp_path / "sound.onnx")
    mask = file.graph.inputs[1]
    ones = ir.Value(name="ones", type=mask.type, shape=mask.shape)
    ones.const_value = ir.tensor(np.ones((3, 6), np.int64), name="ones")
    file.graph.initializers.add(ones)
    mask.replace_all_uses_with(ones)
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    assert [call.address for call in report.calls if call.status == "differ"] == [""]


@pytest.mark.parametrize("fill", [0.0, float("-inf"), torch.finfo(torch.float32).min])
def test_random_numbers_under_a_mask_are_not_compared(fill: float, tmp_path: Path) -> None:
    def noisy(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x + torch.randn_like(x)).masked_fill(mask == 0, fill)

    mask = torch.ones(4, 8).long()
    mask[:, 6:] = 0
    model, inputs = nn.ModuleDict({"inner": Function(noisy)})["inner"].eval(), (numbers(4, 8), mask)
    export(model, inputs, tmp_path / "sound.onnx")
    report = verify(model, inputs, tmp_path / "sound.onnx")
    assert [one.status for one in report.outputs] == ["not compared"]
    assert report.verdict != "differ"


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_a_mask_of_what_is_left_out_keeps_something_in_each_row(frontend: str, tmp_path: Path) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x, x, x, key_padding_mask=left_out, need_weights=False)[0]
            return result

    torch.manual_seed(0)
    model, inputs = Attending().eval(), (numbers(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool))
    export(model, inputs, tmp_path / "sound.onnx", frontend=frontend)
    report = verify(model, inputs, tmp_path / "sound.onnx")
    assert report.agrees
    assert any("padded masks" in one.what for one in report.others if one.status == "agree")


class Waves(nn.Module):
    """Rounding turns angles of some hundreds: the file is right, and no output is what float64 gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.second, self.second):
            x = torch.sin(30 * layer(x))
        result: torch.Tensor = self.out(x)
        return result


def test_a_file_of_a_model_in_which_rounding_grows_is_written_and_agrees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Waves().eval(), (numbers(4, 8),)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -4.0, 4.0)
    export(model, inputs, tmp_path / "sound.onnx")
    assert verify(model, inputs, tmp_path / "sound.onnx").agrees


class Population(nn.Module):
    """The logistic map, of which rounding decides the hundredth value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = 3.9 * x * (1 - x)
        return x


class Chaotic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.population = nn.Linear(8, 8), Population()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.population(torch.sigmoid(self.layer(x)))
        return result


def test_what_rounding_alone_decides_is_not_compared(tmp_path: Path) -> None:
    report = changed(Chaotic(), (numbers(4, 8),), tmp_path, 3.9, 3.8)
    verdicts = {call.address: call for call in report.calls}
    assert verdicts["layer"].status == "agree"
    assert verdicts["population"].status == report.outputs[0].status == "not compared"
    assert "rounding alone changes it by" in verdicts["population"].reason
