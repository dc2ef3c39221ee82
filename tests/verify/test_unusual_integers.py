"""Integers that models take and examples seldom have: above a thousand, and negative ones that stand for nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.pytorch.integers import integers_above, negative_integers
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.verify.verdicts import VerifyReport

Inputs = Mapping[str, torch.Tensor]
BELOW, ABOVE = "negative integers in", "integers above a thousand"


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def verified(model: nn.Module, inputs: Inputs, path: Path, plant: Callable[[ir.Graph], None]) -> VerifyReport:
    """Export, see that the sound file agrees, plant a fault, and verify."""
    export(model, inputs, path / "sound.onnx")
    assert verify(model, inputs, path / "sound.onnx").agrees
    file = load_onnx(path / "sound.onnx")
    plant(file.graph)
    save_model(file, path / "faulty.onnx")
    return verify(model, inputs, path / "faulty.onnx")


def differing(report: VerifyReport) -> list[str]:
    return [one.what for one in report.others if one.status == "differ"]


def cut_off(name: str) -> Callable[[ir.Graph], None]:
    """Cuts an input off at a thousand."""

    def plant(graph: ir.Graph) -> None:
        given = next(value for value in graph.inputs if value.name == name)
        users = list(given.uses())
        most = ir.Value(name="most", const_value=ir.tensor(np.array(1000), name="most"))
        most.type, most.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        graph.initializers.add(most)
        new = ir.Node("", "Min", [given, most], name="cut", metadata_props=dict(users[0][0].metadata_props))
        new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = "cut", given.type, given.shape
        graph.insert_before(users[0][0], new)
        for user, index in users:
            user.replace_input_with(index, new.outputs[0])

    return plant


def other_constant(before: int, after: int) -> Callable[[ir.Graph], None]:
    """Another number in the place of one that integers are compared with."""

    def plant(graph: ir.Graph) -> None:
        found = [
            value
            for node in graph
            if node.op_type in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
            for value in node.inputs
            if value is not None and value.const_value is not None and value.const_value.numpy().tolist() == before
        ]
        assert found
        for value in found:
            value.const_value = ir.tensor(np.array(after), name=value.name)

    return plant


def other_label(graph: ir.Graph) -> None:
    """Leaves out another label from a loss."""
    (node,) = (node for node in graph if "ignore_index" in node.attributes)
    node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", 3 - 100)


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.sin(0.01 * time[..., None])


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["a list", "a table"])
def test_integers_that_are_cut_off_at_a_thousand(shape: tuple[int, ...], tmp_path: Path) -> None:
    inputs = {"x": numbers(*shape, 8), "time": torch.tensor([7, 20, 40]).expand(shape).contiguous()}
    report = verified(seeded(Times), inputs, tmp_path, cut_off("time"))
    assert differing(report) == [ABOVE]
    assert report.diverging is not None and report.diverging.first_node == "cut"


class Angles(nn.Module):
    """Angles so large that float32 numbers are coarse: how they are computed decides on the result."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(torch.arange(8.0) * -0.3) * 3.3
        return x + torch.sin(time[:, None] * frequencies)


def test_what_rounding_makes_of_large_integers_is_no_difference(tmp_path: Path) -> None:
    """A file with frequencies that are one unit of roundoff off, as another processor computes them."""

    def plant(graph: ir.Graph) -> None:
        found = [
            value
            for value in graph.initializers.values()
            if value.const_value is not None and value.const_value.size == 8 and value.dtype is ir.DataType.FLOAT
        ]
        assert found
        for value in found:
            assert value.const_value is not None
            array = value.const_value.numpy()
            value.const_value = ir.tensor(np.nextafter(array, np.float32(100)), name=value.name)

    inputs = {"x": numbers(3, 8), "time": torch.tensor([7, 20, 40])}
    report = verified(seeded(Angles), inputs, tmp_path, plant)
    assert [one.status for one in report.others if one.what == ABOVE] == ["agree"]


class Loss(nn.Module):
    """A loss that leaves out what has no label."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x).flatten(0, -2), labels.flatten(), ignore_index=-100)


class Known(nn.Module):
    """Negative ids stand for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        known = ids >= 0
        return self.linear(self.words(torch.where(known, ids, 0)) * known[..., None])


class Marked(Known):
    """One negative id stands for nothing, and any other one is refused."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        known = ids != -1
        return self.linear(self.words(torch.where(known, ids, 0)) * known[..., None])


LABELS = {"x": numbers(2, 6, 8), "labels": torch.arange(12).reshape(2, 6) % 5}
IDS = {"ids": torch.arange(3, 15).reshape(2, 6)}
NEGATIVE: dict[str, tuple[Callable[[], nn.Module], Inputs, Callable[[ir.Graph], None]]] = {
    "labels": (Loss, LABELS, other_label),
    "ids": (Known, IDS, other_constant(0, -1000)),
    "one id": (Marked, IDS, other_constant(-1, -2)),
}


@pytest.mark.parametrize("which", NEGATIVE)
def test_negative_integers_that_the_model_takes(which: str, tmp_path: Path) -> None:
    kind, inputs, plant = NEGATIVE[which]
    report = verified(seeded(kind), inputs, tmp_path, plant)
    assert differing(report) == [f"{BELOW} {'ids' if 'ids' in inputs else 'labels'}"]
    assert report.diverging is not None


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.words(ids) * mask[..., None]


def test_what_a_model_refuses_is_neither_compared_nor_run_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, given = {**IDS, "mask": torch.ones(2, 6, dtype=torch.int64)}, list[Any]()
    model = seeded(Words)
    export(model, inputs, tmp_path / "words.onnx")
    from modelexport.verify import others

    plain = others.feeds
    monkeypatch.setattr(others, "feeds", lambda *args: given.append(plain(*args)) or given[-1])
    report = verify(model, inputs, tmp_path / "words.onnx")
    assert report.agrees
    assert not [one for one in report.others if one.what.startswith((BELOW, ABOVE))]
    assert given and all((array >= 0).all() and (array < 50).all() for one in given for array in one.values())


SIZED = """
<ir_version: 10, opset_import: ["" : 20]>
sized (int64[1,5] time, int64[1] count) => (float[n] made) {
    one = Constant <value_float = 1.0> ()
    more = Constant <value_ints = [1]> ()
    size = Add (count, more)
    ones = Expand (one, size)
    sum = ReduceSum (time)
    real = Cast <to = 1> (sum)
    made = Mul (ones, real)
}
"""


def test_integers_that_sizes_are_computed_from_stay_as_they_are() -> None:
    model = ir.from_onnx_text(SIZED)
    inputs = {"time": torch.arange(5)[None], "count": torch.tensor([3])}
    others = [
        other for make in (integers_above, negative_integers) for ways in make(inputs, model) for _, other in ways
    ]
    assert len(others) == 4
    assert all(torch.equal(other["count"], inputs["count"]) for other in others)
    assert not any(torch.equal(other["time"], inputs["time"]) for other in others)


class Lengths(nn.Module):
    """What of a row is not there decides a length, or a number that no integer of the type is below."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        there = torch.arange(x.shape[1]) < lengths[:, None]
        there = there & (ids > torch.iinfo(ids.dtype).min)
        x = self.inner(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=there[:, None, :])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_not_emptied_and_types_not_left(dtype: torch.dtype, tmp_path: Path) -> None:
    model = seeded(Lengths)
    ids = torch.arange(12, dtype=dtype).reshape(2, 6)
    inputs = {"x": numbers(2, 6, 8), "lengths": torch.tensor([4, 6]), "ids": ids}
    export(model, inputs, tmp_path / "lengths.onnx")
    assert verify(model, inputs, tmp_path / "lengths.onnx").agrees
