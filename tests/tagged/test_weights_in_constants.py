"""Files whose weights are Constant nodes with names, as Paddle's exporter writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import commands
from modelexport.tagged.file import read_tagged


def constant(name: str, *shape: int, kind: type = np.float32) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.ones(shape, kind), name))


def file_of(folder: Path, nodes: list[onnx.NodeProto]) -> Path:
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6), folder / "a.onnx")
    return folder / "a.onnx"


CONVOLUTION = [
    constant("conv2d_417.w_0", 4, 3, 1, 1),
    helper.make_node("Conv", ["x", "conv2d_417.w_0"], ["c"]),
    helper.make_node("Relu", ["c"], ["r"]),
]
NORMALIZATION = [
    *(constant(f"batch_norm_7.{name}", 4) for name in ("w_0", "b_0", "w_1", "w_2")),
    helper.make_node("BatchNormalization", ["r", *(f"batch_norm_7.{n}" for n in ("w_0", "b_0", "w_1", "w_2"))], ["y"]),
]


def test_names_of_constants_name_modules(tmp_path: Path) -> None:
    tagged = read_tagged(file_of(tmp_path, [*CONVOLUTION, *NORMALIZATION]))
    assert [traced.call.address for traced in tagged.calls] == ["", "conv2d_417", "batch_norm_7"]


def test_a_constant_is_a_node_of_its_module(tmp_path: Path) -> None:
    tagged = read_tagged(file_of(tmp_path, [*CONVOLUTION, *NORMALIZATION]))
    rows = tagged.describe_nodes({traced.call for traced in tagged.calls})
    assert [row.call for row in rows if row.outputs == ["conv2d_417.w_0"]] == ["conv2d_417"]


def test_weights_through_nodes_of_their_own_name_modules(tmp_path: Path) -> None:
    nodes = [
        constant("linear_0.w_0", 5, 8),
        helper.make_node("Transpose", ["linear_0.w_0"], ["t"]),
        helper.make_node("MatMul", ["x", "t"], ["c"]),
        constant("linear_1.w_0", 5, 5),
        helper.make_node("MatMul", ["c", "linear_1.w_0"], ["y"]),
    ]
    tagged = read_tagged(file_of(tmp_path, nodes))
    owners = {row.op_type: row.call for row in tagged.describe_nodes({traced.call for traced in tagged.calls})}
    assert owners["Transpose"] == "linear_0"


@pytest.mark.parametrize(
    "constants",
    [
        {"fill_constant_1.tmp_0": ((), np.float32)},
        {"helper.shape_0": ((4,), np.int64)},
        {"p2o.helper.constant.0": ((4,), np.float32)},
        {"mask_0.tmp": ((4,), np.bool_)},
    ],
    ids=["one number", "a shape", "a numbered constant", "a mask"],
)
def test_other_constants_name_no_modules(constants: dict[str, tuple], tmp_path: Path) -> None:
    added = [constant(name, *shape, kind=kind) for name, (shape, kind) in constants.items()]
    tagged = read_tagged(file_of(tmp_path, [*added, *CONVOLUTION, *NORMALIZATION]))
    assert [traced.call.address for traced in tagged.calls] == ["", "conv2d_417", "batch_norm_7"]


def test_the_nodes_of_a_file_without_tags_have_inputs_and_outputs(tmp_path: Path) -> None:
    done = commands.run("nodes", file_of(tmp_path, [*CONVOLUTION, *NORMALIZATION]), "conv2d_417")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Conv ")]
    assert line.split()[2:] == ["conv2d_417", "x,", "conv2d_417.w_0", "c"]


def test_the_nodes_of_a_file_without_modules_have_inputs_and_outputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["r"], name="n"), helper.make_node("Neg", ["r"], ["y"])]
    done = commands.run("nodes", file_of(tmp_path, nodes), ".")
    assert done.stdout.splitlines()[1].split() == ["Relu", "n", ".", "x", "r"]
