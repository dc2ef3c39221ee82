"""What is an integer, or half of one, but for its last bits is taken for it in each run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from modelexport.format.documents import TransformStep
from modelexport.pytorch.runs.exact_rounding import quantized, written_out
from modelexport.traces.exact_transforms import exact_step
from modelexport.traces.file_run import FileRun
from modelexport.weights.recorded_transforms import apply_transform

NEAR_HALF = np.array([2.5, 2.5 * (1 - 2**-50), 2.5 * (1 + 2**-50), 3.5 * (1 - 2**-50), -127.5 * (1 + 2**-50)])
EVEN = [2, 2, 2, 4, -128]


def test_in_pytorch() -> None:
    round_in_float64 = written_out(torch.ops.aten.round.default)
    assert round_in_float64 is not None
    assert round_in_float64(torch.from_numpy(NEAR_HALF)).tolist() == EVEN


ALMOST_TWO = torch.tensor([2 - 3e-8], dtype=torch.float64)


@pytest.mark.parametrize(
    ("operator", "how", "found"),
    [
        (torch.ops.aten.frac.default, {}, -3e-8),
        (torch.ops.aten.round.decimals, {"decimals": 1}, 2.0),
        (torch.ops.aten.round.decimals, {"decimals": -1}, 0.0),
    ],
)
def test_pytorch_makes_integers_on_the_way_as_a_file_does(operator: Any, how: dict[str, Any], found: float) -> None:
    function = written_out(operator)
    assert function is not None
    assert function(ALMOST_TWO, **how).item() == pytest.approx(found)


def test_pytorch_makes_the_same_integers_where_it_copies_into_them() -> None:
    function = written_out(torch.ops.aten.copy_.default)
    assert function is not None
    assert function(torch.zeros(1, dtype=torch.int64), ALMOST_TWO).tolist() == [2]


@pytest.mark.parametrize("off", [-3e-8, 3e-8])
@pytest.mark.parametrize("operator", ["ceil", "floor", "trunc", "_to_copy"])
def test_pytorch_makes_the_integer_of_float32(operator: str, off: float) -> None:
    function = written_out(getattr(torch.ops.aten, operator).default)
    assert function is not None
    how = {"dtype": torch.int64} if operator == "_to_copy" else {}
    assert function(torch.tensor([2 + off], dtype=torch.float64), **how).tolist() == [2]


@pytest.mark.parametrize("off", [-3e-8, 3e-8])
@pytest.mark.parametrize("operator", ["Ceil", "Floor", "Cast"])
def test_a_file_makes_the_integer_of_float32(operator: str, off: float) -> None:
    x = ir.val("x", ir.DataType.FLOAT, [1])
    node = ir.node(operator, [x], {"to": ir.DataType.INT64} if operator == "Cast" else {})
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 20})
    run = FileRun(ir.Model(graph, ir_version=10), in_float64_for="float32")
    assert run.run({"x": np.array([2 + off])})["y"].tolist() == [2]


def test_in_a_quantizer_of_pytorch() -> None:
    assert quantized(torch.from_numpy(NEAR_HALF), 1.0, 0, -128, 127).tolist() == EVEN


@pytest.mark.parametrize("operator", ["Round", "QuantizeLinear"])
def test_in_a_file(operator: str) -> None:
    x = ir.val("x", ir.DataType.DOUBLE, [5])
    given = {"scale": np.float64(1), "zero": np.int8(0)} if operator == "QuantizeLinear" else {}
    constants = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in given.items()]
    node = ir.node(operator, [x, *constants])
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=constants, opset_imports={"": 20})
    run = FileRun(ir.Model(graph, ir_version=10), in_float64_for="float64")
    assert run.run({"x": NEAR_HALF})["y"].tolist() == EVEN


def test_a_quantizer_along_an_axis_has_a_scale_for_each_place() -> None:
    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    x = torch.full((2, 3), 4.0, dtype=torch.float64)
    assert quantized(x, scales, torch.tensor([0, 1]), -128, 127, 0).tolist() == [[8] * 3, [3] * 3]


def test_the_integers_of_a_weight_are_made_as_those_of_a_node() -> None:
    steps = [
        TransformStep("Constant", attributes={"value": {"dtype": "float32", "value": 1.0}}),
        TransformStep("Constant", attributes={"value": {"dtype": "int8", "value": 0}}),
        TransformStep("QuantizeLinear", ["w", "%0", "%1"], {}, 21),
    ]
    assert apply_transform(steps, {"w": NEAR_HALF}, exact_step).tolist() == EVEN


@pytest.mark.parametrize("operator", ["Ceil", "Floor", "Round"])
def test_a_weight_that_is_almost_whole_is_rounded_as_in_a_node(operator: str) -> None:
    steps = [TransformStep(operator, ["w"], {}, 13 if operator != "Round" else 11)]
    assert apply_transform(steps, {"w": np.array([2 - 3e-8, 2 + 3e-8])}, exact_step).tolist() == [2, 2]
