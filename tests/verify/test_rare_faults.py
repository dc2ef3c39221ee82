"""Faults beyond what the example shows, and faults that what follows them hides: found, and in the right call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.verify.model import verify as run_verify
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys
from modelexport.pytorch.values import as_array
from modelexport.tagged.documents.reading import load_hierarchy
from modelexport.verify.verdicts import VerifyReport

Inputs = Mapping[str, torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def verified(
    model: nn.Module, inputs: Inputs, path: Path, plant: Callable[[ir.Graph], None], *, dynamic: bool = False
) -> VerifyReport:
    """Export, see that the sound file agrees, plant a fault, and verify."""
    sound = path / "sound.onnx"
    export(model, inputs, sound, dynamic=dynamic)
    assert verify(model, inputs, sound).agrees
    file = load_onnx(sound)
    plant(file.graph)
    faulty = path / "faulty.onnx"
    save_model(file, faulty)
    report = verify(model, inputs, faulty)
    assert report.verdict == "differ"
    return report


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def node_of(graph: ir.Graph, op_type: str, position: int = 0) -> ir.Node:
    return [node for node in graph if node.op_type == op_type][position]


def insert_before(node: ir.Node, index: int, op_type: str, *arrays: np.ndarray, **attributes: list[int]) -> None:
    """Put an operation before an input of a node, which the node's call owns."""
    value, graph = node.inputs[index], node.graph
    assert value is not None and isinstance(graph, ir.Graph)
    constants = []
    for place, array in enumerate(arrays):
        constant = ir.Value(name=f"planted{place}", const_value=ir.tensor(array, name=f"planted{place}"))
        constant.type, constant.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        graph.initializers.add(constant)
        constants.append(constant)
    kept = [ir.AttrInt64s(key, sizes) for key, sizes in attributes.items()]
    new = ir.Node("", op_type, [value, *constants], kept, name="planted", metadata_props=dict(node.metadata_props))
    new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = "planted", value.type, value.shape
    graph.insert_before(node, new)
    node.replace_input_with(index, new.outputs[0])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


def test_numbers_that_are_cut_off_where_the_example_ends(tmp_path: Path) -> None:
    model, inputs = seeded(Stack), {"x": numbers(3, 16)}
    assert isinstance(model, Stack)
    with torch.no_grad():
        largest = model.first(inputs["x"]).max().numpy()

    def plant(graph: ir.Graph) -> None:
        insert_before(node_of(graph, "Relu"), 0, "Min", largest)

    report = verified(model, inputs, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "act"


class Behind(nn.Module):
    """No input makes the numbers of a layer larger: there are only ids, and the norm takes their size away."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.stack = nn.Embedding(12, 16), nn.LayerNorm(16), Stack()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.stack(self.norm(self.words(ids)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_that_are_cut_off_where_no_input_reaches(dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = seeded(Behind).to(dtype), torch.arange(12)[None]
    assert isinstance(model, Behind)
    with torch.no_grad():
        largest = as_array(model.stack.first(model.norm(model.words(ids))).max())

    def plant(graph: ir.Graph) -> None:
        insert_before(node_of(graph, "Relu"), 0, "Min", largest)

    report = verified(model, {"ids": ids[:, 3:9]}, tmp_path, plant)
    assert report.diverging is not None
    assert (report.diverging.address, report.diverging.first_node) == ("stack.act", "planted")


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(5)[None] < lengths[:, None]
        return self.linear(x) * inside[..., None]


def test_a_comparison_that_takes_what_is_equal(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        less = next(node for node in graph if node.op_type in ("Less", "Greater"))
        less.op_type += "OrEqual"

    inputs = {"x": numbers(2, 5, 8), "lengths": torch.tensor([5, 5])}
    assert verified(seeded(Lengths), inputs, tmp_path, plant).diverging is not None


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.linear = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.words(ids))


@pytest.mark.parametrize(("op_type", "bound"), [("Max", 1), ("Min", 38)])
def test_the_first_and_the_last_row_of_a_table(op_type: str, bound: int, tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        insert_before(node_of(graph, "Gather"), 1, op_type, np.array(bound, np.int64))

    report = verified(seeded(Words), {"ids": torch.tensor([[7, 9, 11, 30]])}, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "words"


class Picture(nn.Module):
    """Operations that give the axes of a square in the order in which they get them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.pool = nn.Conv2d(2, 3, 1), nn.Sigmoid(), nn.MaxPool2d(2)
        self.head = nn.Linear(27, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.act(self.conv(x))).flatten(1))


def test_another_order_of_axes_is_of_the_call_that_made_it(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        insert_before(node_of(graph, "Sigmoid"), 0, "Transpose", perm=[0, 1, 3, 2])

    report = verified(seeded(Picture), {"x": numbers(2, 2, 6, 6)}, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "act"


class Added(nn.Module):
    """A value that is pooled, and added to itself: one of the two keeps the axes in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(2, 3, 1), nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.head = nn.Linear(108, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.head((self.up(self.pool(y)) + y).flatten(1))


def test_a_value_in_another_layout_acquits_nothing(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        conv = node_of(graph, "Conv")
        insert_before(conv, 0, "Transpose", perm=[0, 1, 3, 2])

    report = verified(seeded(Added), {"x": numbers(2, 2, 6, 6)}, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "conv"


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken, self.kept = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.taken(x) + self.kept(state))


class Masked(nn.Module):
    """A recurrence that keeps its state where a row has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for index in range(3):
            state = torch.where((index < lengths)[:, None], self.step(x[:, index], state), state)
        return state


def test_what_a_mask_leaves_nothing_of_acquits_nothing(tmp_path: Path) -> None:
    """The state stays zero: the second step then computes what the first one did, and the mask hides it."""

    def plant(graph: ir.Graph) -> None:
        choice = node_of(graph, "Where")
        _, one, other = choice.inputs
        choice.replace_input_with(1, other)
        choice.replace_input_with(2, one)

    report = verified(seeded(Masked), {"x": numbers(2, 3, 6), "lengths": torch.tensor([3, 2])}, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == ""
    assert "where" in report.diverging.reason


class Residual(nn.Module):
    """Normalizes twice with one module: before a branch, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.branch = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.branch(self.norm(x))
        return x + self.head(self.norm(x))


def test_a_branch_that_is_zero_does_not_make_the_sum_right(tmp_path: Path) -> None:
    """The sum is the input then, and the second normalization computes what the first one did."""

    def plant(graph: ir.Graph) -> None:
        norm = node_of(graph, "LayerNormalization")
        ((user, index),) = norm.outputs[0].uses()
        insert_before(user, index, "Mul", np.array(0, np.float32))
        graph.node("planted").metadata_props.update(norm.metadata_props)

    report = verified(seeded(Residual), {"x": numbers(3, 8)}, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "norm"


class Scaled(nn.Module):
    """Normalizes without a mean, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x).softmax(-1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = Gate(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 8)
        return self.inner(x) * self.gate(x)


class GatedResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.gated, self.after = Scaled(), Gated(), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x + self.gated(self.before(x)).reshape(x.shape))


def test_what_repeats_another_call_because_of_a_fault_is_given_to_no_other_call(tmp_path: Path) -> None:
    """A gate of zeros adds nothing: what follows computes what the normalization before it computed."""

    def plant(graph: ir.Graph) -> None:
        gate = node_of(graph, "Softmax")
        ((user, index),) = gate.outputs[0].uses()
        insert_before(user, index, "Mul", np.array(0, np.float32))
        graph.node("planted").metadata_props.update(gate.metadata_props)

    report = verified(seeded(GatedResidual), {"x": numbers(2, 3, 8)}, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "gated.gate"
    assert not any("tags" in call.reason for call in report.calls)


def test_a_tensor_for_which_the_sidecar_names_a_weight(tmp_path: Path) -> None:
    model, inputs, path = seeded(Stack), {"x": numbers(3, 16)}, tmp_path / "m.onnx"
    export(model, inputs, path)
    sidecar = load_hierarchy(path.with_suffix(".hierarchy.json"))
    call = next(call for call in sidecar.calls if call.address == "first")
    wrong = msgspec.structs.replace(call.outputs[0], value="first.weight")
    calls = [msgspec.structs.replace(one, outputs=[wrong]) if one is call else one for one in sidecar.calls]
    report = run_verify(model, inputs, path, sidecar=msgspec.structs.replace(sidecar, calls=calls))
    assert [(one.where.partition(",")[0], one.claimed) for one in report.claims] == [("first", "first.weight")]


class Kept(nn.Module):
    """Rows that a mask leaves out entirely are zero, as in attention; the example has none."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.linear, self.least = nn.Linear(8, 8), least

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mixed = torch.softmax(x @ x.transpose(1, 2), -1) @ self.linear(x)
        return torch.where(mask.to(x.dtype).sum(-1)[:, None, None] < self.least, torch.zeros_like(mixed), mixed)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Kept(least) for least in (1.0, 0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


def test_what_changes_nothing_that_is_wrong_is_not_to_blame(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        insert_before(node_of(graph, "Where", 1), 2, "Mul", np.array(-1, np.float32))

    inputs = {"x": numbers(2, 5, 8), "mask": torch.ones(2, 40, dtype=torch.long)}
    report = verified(seeded(Layers), inputs, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "layers.1"


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return state + self.out(torch.tanh(self.value(x + state)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(2))

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            state = layer(state, x)
        return state


class FromZero(nn.Module):
    """A decoder that begins with a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.zeros_like(x), x)


def test_what_a_fault_makes_zero_is_not_a_state_of_zeros_elsewhere(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        tanh = node_of(graph, "Tanh", 1)
        insert_before(tanh, 0, "Mul", np.array(0, np.float32))
        node = next(node for node in graph if node.name == "planted")
        node.metadata_props.update(tanh.inputs[0].producer().inputs[0].producer().metadata_props)

    report = verified(seeded(FromZero), {"x": numbers(2, 5, 8)}, tmp_path, plant)
    assert report.diverging is not None
    assert report.diverging.address == "decoder.layers.1.value"


class TwoTexts(nn.Module):
    """Each with a mask of its own, both of ones in the example."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(16, 4)

    def forward(self, one: torch.Tensor, other: torch.Tensor, of_one: torch.Tensor, of_other: torch.Tensor) -> Any:
        texts = [self.words(ids) * mask[..., None] for ids, mask in ((one, of_one), (other, of_other))]
        return self.head(torch.cat([text.sum(1) for text in texts], -1))


def test_inputs_that_are_equal_in_the_example_are_told_apart(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        first, second = (value for value in graph.inputs if value.name in ("of_one", "of_other"))
        uses = list(first.uses()), list(second.uses())
        for those, value in zip(uses, (second, first), strict=True):
            for user, index in those:
                user.replace_input_with(index, value)

    ids = torch.arange(24).reshape(3, 8)
    ones = torch.ones(3, 8, dtype=torch.int64)
    inputs = {"one": ids, "other": ids.flip(0), "of_one": ones, "of_other": ones.clone()}
    verified(seeded(TwoTexts), inputs, tmp_path, plant)


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.each(x).amax(1))


def test_a_maximum_of_as_many_as_the_example_has(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        numbers = (np.array([one], np.int64) for one in (0, 12, 1))
        insert_before(node_of(graph, "ReduceMax"), 0, "Slice", *numbers)

    verified(seeded(Points), {"x": numbers(2, 12, 3)}, tmp_path, plant, dynamic=True)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def test_numbers_of_one_sign_get_the_other_where_the_model_takes_it(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        insert_before(node_of(graph, "Conv"), 0, "Clip", np.array(0, np.float32), np.array(1, np.float32))

    report = verified(seeded(Pixels), {"x": numbers(2, 3, 8, 8).abs() % 1}, tmp_path, plant)
    assert [one.what for one in report.others if one.status == "differ"] == ["numbers of both signs"]


class Roots(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def test_what_has_no_finite_numbers_of_the_other_sign_is_left_out(tmp_path: Path) -> None:
    export(Roots(), {"x": numbers(2, 3).abs()}, tmp_path / "roots.onnx")
    report = verify(Roots(), {"x": numbers(2, 3).abs()}, tmp_path / "roots.onnx")
    assert report.agrees
    assert "numbers of both signs" not in [one.what for one in report.others]


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.sin(0.01 * time[:, None])


def test_integers_that_are_cut_off_where_the_example_ends(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        ((user, index),) = next(value for value in graph.inputs if value.name == "time").uses()
        insert_before(user, index, "Min", np.array(40, np.int64))

    report = verified(seeded(Times), {"x": numbers(3, 8), "time": torch.tensor([1, 20, 40])}, tmp_path, plant)
    assert "larger integers" in [one.what for one in report.others if one.status == "differ"]


class PaddedWords(nn.Module):
    """Counts the words that are none of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, 8), nn.Embedding(20, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(ids.ne(1).long().cumsum(1))


def test_another_id_of_padding(tmp_path: Path) -> None:
    def plant(graph: ir.Graph) -> None:
        node = next(node for node in graph if node.op_type == "Equal")
        index = next(i for i, value in enumerate(node.inputs) if value is not None and value.is_initializer())
        array = np.array(2, np.int64)
        other = ir.Value(name="two", const_value=ir.tensor(array, name="two"))
        other.type, other.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        graph.initializers.add(other)
        node.replace_input_with(index, other)

    ids = torch.randint(10, 1000, (2, 12), generator=torch.Generator().manual_seed(0))
    report = verified(seeded(PaddedWords), {"ids": ids}, tmp_path, plant)
    assert [one.what for one in report.others if one.status == "differ"] == ["ids that are compared with"]


class Waves(nn.Module):
    """A tensor of constants, which a file has for each call."""

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return torch.sin(t * torch.exp(torch.arange(8) / 4))


class Twice(nn.Module):
    """One module is called twice with the same numbers, and computes the same."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(Waves(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = self.first(x * self.time(t)).relu()
        return self.second(x * self.time(t))


def test_an_error_where_a_module_computes_the_same_again_is_of_the_call_that_makes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Twice().eval(), {"x": torch.randn(2, 8), "t": torch.randn(2, 8)}
    export(model, inputs, tmp_path / "twice.onnx")
    file = load_onnx(tmp_path / "twice.onnx")
    product = next(node for node in file.graph if node.metadata_props[keys.CALL] == "time.1@1")
    product.attributes["alpha"] = ir.AttrFloat32("alpha", 1.001)
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    assert report.diverging is not None
    assert report.diverging.address == "time.1@1"
