"""Models that draw random numbers: what depends on them is not compared, and everything else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from modelexport.pytorch.model_run import ModelRun
from modelexport.runtime.fingerprints import fingerprint_of
from torch import nn

from modelexport import export, verify
from modelexport.core.calls import ROOT, ModuleCall
from modelexport.format.keys import CALL

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


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Middle(nn.Module):
    """Computes with random numbers and a layer, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RANDOM[self.kind](x, self.layer)


class Surrounded(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.middle, self.after, self.beside = Inner(), Middle(kind), Inner(), Inner()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.after(self.middle(self.before(x))), self.beside(x)


Layer = Callable[[torch.Tensor], torch.Tensor]


def ordered_by_chance(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    order = torch.argsort(torch.rand(x.shape[0]))
    return layer(x[order])[torch.argsort(order)]


def columns_ordered_by_chance(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    order = torch.argsort(torch.rand(x.shape[1]))
    return layer(x[:, order][:, torch.argsort(order)])


def rotated(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    rotation, _ = torch.linalg.qr(torch.randn(12, 12))
    return layer((x @ rotation) @ rotation.T)


def mirrored(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    direction = nn.functional.normalize(torch.randn(12), dim=0)
    once = x - 2 * (x @ direction)[:, None] * direction
    return layer(once - 2 * (once @ direction)[:, None] * direction)


def with_signs(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    signs = torch.where(torch.rand(12) < 0.5, -1.0, 1.0)
    return layer((x * signs) * signs)


def written_in_place(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    known = layer(x).clone()
    known[:2].mul_(1 + 1e-6 * torch.rand(2, 12))
    return torch.tanh(known)


RANDOM: dict[str, Callable[[torch.Tensor, Layer], torch.Tensor]] = {
    "a little noise": lambda x, layer: layer(x + 3e-6 * torch.randn_like(x)),
    "less noise than rounding": lambda x, layer: layer(x + 1e-7 * torch.randn_like(x)),
    "factors near one": lambda x, layer: torch.tanh(layer(x) * (1 + 1e-6 * torch.randn(4, 1))),
    "noise behind a layer": lambda x, layer: layer(x) + (torch.randn(12) - torch.randn(12)) * 1e-6,
    "added and taken away": lambda x, layer: layer(x + (noise := torch.randn_like(x))) - layer(noise),
    "order of rows": ordered_by_chance,
    "order of columns": columns_ordered_by_chance,
    "rotation": rotated,
    "reflection": mirrored,
    "signs": with_signs,
    "dropout": lambda x, layer: layer(nn.functional.dropout(x, 0.02, training=True)),
    "stochastic depth": lambda x, layer: x + layer(x) * torch.floor(torch.rand(4, 1) + 0.9) / 0.9,
    "choice of equals": lambda x, layer: torch.where(torch.rand(()) < 0.5, layer(x), layer(x) + 0),
    "gumbel": lambda x, layer: layer(nn.functional.gumbel_softmax(x, hard=True)),
    "words": lambda x, layer: layer(x)[torch.multinomial(torch.ones(4), 4, replacement=True)],
    "times zero": lambda x, layer: torch.tanh(layer(x) + torch.rand_like(x) * 0),
    "in place": written_in_place,
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", RANDOM)
def test_random_numbers_of_any_effect_are_no_faults(kind: str, tmp_path: Path) -> None:
    model = Surrounded(kind).eval()
    export(model, (X,), tmp_path / "m.onnx", check=False)
    report = verify(model, (X,), tmp_path / "m.onnx")
    assert not [(call.address, call.reason) for call in report.calls if call.status == "differ"]
    assert report.agrees
    calls = {call.address: call.status for call in report.calls}
    assert calls["before"] == calls["beside"] == calls["before.linear"] == "agree"


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["order of rows", "signs", "times zero"])
@pytest.mark.parametrize("where", ["before.linear", "middle.layer", "after.linear"])
def test_a_fault_is_found_where_random_numbers_are_undone(kind: str, where: str, tmp_path: Path) -> None:
    right = Surrounded(kind).eval()
    export(right, (X,), tmp_path / "m.onnx", check=False)
    multiply_last(tmp_path / "m.onnx", where, 1.001)
    report = verify(right, (X,), tmp_path / "m.onnx")
    differing = {call.address.partition(".")[0] for call in report.calls if call.status == "differ"}
    assert differing == {where.partition(".")[0]}


@pytest.mark.parametrize(
    ("kind", "node", "call"), [("dropout", "Dropout", "beside"), ("order of rows", "TopK", "before")]
)
def test_what_is_random_belongs_to_calls_that_compute_from_random_numbers(
    kind: str, node: str, call: str, tmp_path: Path
) -> None:
    model = Surrounded(kind).eval()
    export(model, (X,), tmp_path / "m.onnx", check=False)
    graph = ir.load(tmp_path / "m.onnx")
    given_to_call = next(one for one in graph.graph if one.metadata_props[CALL] == call)
    random = next(one for one in graph.graph if one.op_type == node)
    random.metadata_props.update(given_to_call.metadata_props)
    save_alone(graph, tmp_path / "m.onnx")
    report = verify(model, (X,), tmp_path / "m.onnx")
    assert call in {one.address for one in report.calls if one.status == "differ"}


def multiply_last(path: Path, call: str, factor: float) -> None:
    """Multiply what the last node of a call gives."""
    model = ir.load(path)
    node = [one for one in model.graph if one.metadata_props.get(CALL) == call][-1]
    constant = ir.Node("", "Constant", [], [ir.AttrFloat32("value_float", factor)], name="factor")
    result = node.outputs[0]
    users = list(result.uses())
    product = ir.Node("", "Mul", [result, constant.outputs[0]], name="product")
    for one in (constant, product):
        one.metadata_props.update(node.metadata_props)
    product.outputs[0].type, product.outputs[0].shape = result.type, result.shape
    constant.outputs[0].name, product.outputs[0].name = "factor", "product"
    model.graph.insert_after(node, [constant, product])
    for user, place in users:
        user.replace_input_with(place, product.outputs[0])
    save_alone(model, path)


def save_alone(model: ir.Model, path: Path) -> None:
    """Save a model without its documents, which a planted fault would contradict."""
    ir.save(model, path)
    for document in path.parent.glob("m.*.json"):
        document.unlink()


class Sizes(nn.Module):
    """Attention, which may draw random numbers and does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(1, 2, 4, 6)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def test_what_may_draw_and_does_not_is_not_random() -> None:
    run = ModelRun(Sizes(), (X,))
    assert run.random.calls == frozenset()
    assert not any(tensor.random for tensor in run.tensors)


class Leaving(nn.Module):
    """What follows a number that has left PyTorch may depend on it; what was before does not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.before(x)
        return self.after(known * float(torch.rand(()).item()))


def test_numbers_are_followed_out_of_pytorch() -> None:
    run = ModelRun(Leaving(), (X,))
    random = {(tensor.call.path, tensor.side): tensor.random for tensor in run.tensors}
    assert random == {
        ("", "inputs"): False,
        ("before", "inputs"): False,
        ("before", "outputs"): False,
        ("after", "inputs"): True,
        ("after", "outputs"): True,
        ("", "outputs"): True,
    }
    assert run.random.calls == {ROOT, ModuleCall("after", 0)}


class ThroughView(nn.Module):
    """Writes random numbers to memory through a view, and reads it through another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.zeros(4, 12)
        view = memory[1:]
        memory[:2].uniform_()
        freed = torch.rand(4, 12)
        del freed
        return self.inner(view), self.inner(x * 2)


def test_random_numbers_are_followed_through_memory_and_not_into_memory_used_again() -> None:
    run = ModelRun(ThroughView(), (X,))
    random = [tensor.random for tensor in run.tensors if tensor.call.path == "inner"]
    assert random == [True, True, False, False]
