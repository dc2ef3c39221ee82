"""Bounds that no number of any run reaches: those of the PyTorch model that a file does not have, or has wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, load, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.verify.verdicts import VerifyReport


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Bounded(nn.Module):
    """A bound in a module behind a normalization."""

    def __init__(self, bound: nn.Module) -> None:
        super().__init__()
        self.norm, self.bound, self.out = nn.LayerNorm(8), bound, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.bound(self.norm(x)))
        return result


class OwnBound(Bounded):
    """A bound in the model's own code, between its modules and behind an operation of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(torch.clamp(self.bound(self.norm(x)) * 2, -30.0, 30.0))
        return result


def seeded(model: nn.Module) -> nn.Module:
    """A model with weights none of which are equal, so that none are changed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1.0, 1.0) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model.eval()


def inputs_for(model: nn.Module) -> tuple[torch.Tensor]:
    torch.manual_seed(1)
    return (torch.randn(2, 5, 8, dtype=next(model.parameters()).dtype),)


def verified(model: nn.Module, path: Path, change: Callable[[ir.Graph], None]) -> VerifyReport:
    """Export, see that the sound file agrees, change it, and verify."""
    inputs = inputs_for(model)
    export(model, inputs, path / "sound.onnx")
    assert verify(model, inputs, path / "sound.onnx").agrees
    file = load_onnx(path / "sound.onnx")
    change(file.graph)
    save_model(file, path / "changed.onnx")
    return verify(model, inputs, path / "changed.onnx")


BOUNDS = ("Clip", "Max", "Min")


def without_bounds(graph: ir.Graph) -> None:
    """What took a number that a node bounds takes it as it is."""
    found = [node for node in graph if node.op_type in BOUNDS]
    assert found
    for node in found:
        before = node.inputs[0]
        assert before is not None
        node.outputs[0].replace_all_uses_with(before, replace_graph_outputs=True)
        graph.remove(node)


def without_upper_bound(graph: ir.Graph) -> None:
    """Negative numbers become zero, but large ones stay."""
    (node,) = [node for node in graph if node.op_type == "Clip"]
    node.op_type = "Relu"
    node.resize_inputs(1)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("bound", "change"),
    [
        (nn.Hardtanh(-10.0, 9.0), without_bounds),
        (nn.ReLU6(), without_upper_bound),
        (Function(lambda x: torch.clamp(x, max=7.0)), without_bounds),
        (Function(lambda x: torch.minimum(x, torch.full((8,), 7.0))), without_bounds),
        (Function(lambda x: torch.clamp(x * 3, -50.0, 50.0)), without_bounds),
        (Function(lambda x: torch.clamp(x * 3, -50.0, 50.0) + 1), without_bounds),
        (Function(lambda x: torch.clamp(x.mT, -50.0, 50.0).mT), without_bounds),
    ],
    ids=["both", "the upper one", "a largest number", "numbers", "at the end", "in the middle", "in another order"],
)
def test_a_bound_that_is_missing_is_found_in_its_call(
    bound: nn.Module, change: Callable[[ir.Graph], None], tmp_path: Path
) -> None:
    report = verified(seeded(Bounded(bound)), tmp_path, change)
    assert report.diverging is not None
    assert report.diverging.address == "bound"
    assert "bound" in report.diverging.reason


def test_a_bound_that_is_missing_between_calls_is_found_in_their_caller(tmp_path: Path) -> None:
    report = verified(seeded(OwnBound(nn.Identity())), tmp_path, without_bounds)
    assert report.diverging is not None and report.diverging.address == ""


def test_a_bound_that_is_missing_in_half_precision_is_found(tmp_path: Path) -> None:
    report = verified(seeded(Bounded(nn.Hardtanh(-10.0, 9.0))).half(), tmp_path, without_bounds)
    assert report.diverging is not None and report.diverging.address == "bound"


def relu_first(graph: ir.Graph) -> None:
    """The bound of one activation as two nodes of other types."""
    (node,) = [node for node in graph if node.op_type == "Clip"]
    value, six = node.inputs[0], node.inputs[2]
    first = ir.Node("", "Relu", [value], name="first", metadata_props=dict(node.metadata_props))
    last = ir.Node("", "Min", [first.outputs[0], six], name="last", metadata_props=dict(node.metadata_props))
    for new in (first, last):
        new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = f"{new.name}", value.type, value.shape
    graph.insert_before(node, [first, last])
    node.outputs[0].replace_all_uses_with(last.outputs[0], replace_graph_outputs=True)
    graph.remove(node)


def chosen(graph: ir.Graph) -> None:
    """A bound as a choice between a number and the bound."""
    (node,) = [node for node in graph if node.op_type == "Clip"]
    value, most = node.inputs[0], node.inputs[2]
    larger = ir.Node("", "Greater", [value, most], name="larger", metadata_props=dict(node.metadata_props))
    last = ir.Node("", "Where", [larger.outputs[0], most, value], name="last", metadata_props=dict(node.metadata_props))
    for new, kind in ((larger, ir.TensorType(ir.DataType.BOOL)), (last, value.type)):
        new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = f"{new.name}", kind, value.shape
    graph.insert_before(node, [larger, last])
    node.outputs[0].replace_all_uses_with(last.outputs[0], replace_graph_outputs=True)
    graph.remove(node)


def as_it_is(graph: ir.Graph) -> None:
    """The exporter has merged, moved or left out the bound itself."""


LARGEST = torch.finfo(torch.float32).max
SOUND: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[ir.Graph], None]]] = {
    "a bound that no number is beyond": (lambda x: torch.clamp(x * 2, -LARGEST, LARGEST), as_it_is),
    "a bound that makes no difference": (lambda x: torch.relu(torch.clamp(x, min=-20.0)), as_it_is),
    "a bound below what another one cuts off": (lambda x: torch.clamp(torch.relu(x), min=-1.0), as_it_is),
    "a bound of other operators": (nn.functional.relu6, relu_first),
    "a bound as a choice": (lambda x: torch.clamp(x, max=9.0), chosen),
    "a bound that is left out, beyond all numbers": (lambda x: torch.clamp(x, max=LARGEST), without_bounds),
    "a bound of constants": (lambda x: torch.clamp(torch.arange(8.0) / 8, max=9.0) * x, as_it_is),
}


@pytest.mark.sweep
@pytest.mark.parametrize("which", SOUND)
def test_a_file_that_rightly_has_no_node_for_a_bound_is_not_accused(which: str, tmp_path: Path) -> None:
    function, change = SOUND[which]
    report = verified(seeded(Bounded(Function(function))), tmp_path, change)
    assert [call.reason for call in report.calls if call.status == "differ"] == []
    assert {one.status for one in (*report.outputs, *report.others)} == {"agree"}


@pytest.mark.parametrize(
    ("bound", "right", "wrong"),
    [(nn.ReLU6(), 6.0, 60.0), (nn.Hardtanh(-10.0, 9.0), 9.0, 20.0), (nn.Hardtanh(-10.0, 0.5), -10.0, -30.0)],
    ids=["of numbers that are cut off at zero", "of numbers that nothing cuts off", "the other one"],
)
def test_a_wrong_bound_that_no_number_reaches_is_found(
    bound: nn.Module, right: float, wrong: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs, path = Bounded(bound).eval(), {"x": torch.randn(2, 5, 8)}, tmp_path / "bounded.onnx"
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    file = load(path).model
    (value,) = (
        value
        for value in file.graph.initializers.values()
        if value.const_value is not None and value.const_value.numpy().tolist() == right
    )
    value.const_value = ir.tensor(np.array(wrong, np.float32), name=value.name)
    ir.save(file, path)
    report = verify(model, inputs, path)
    assert report.diverging is not None and report.diverging.address == "bound"
