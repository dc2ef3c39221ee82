"""``replace`` of modules whose weights nodes of other modules compute: stored in 8 bits, transposed, or scaled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.cut.replacing import replace
from modelexport.tools.cut.substitutes import CustomOperator

RANDOM = np.random.default_rng(0)
CODES = RANDOM.integers(-9, 9, (64, 64)).astype(np.int8)
SCALE, ROWS = np.float32(0.1), RANDOM.standard_normal(64, dtype=np.float32)
CAST = helper.make_node("Cast", ["w_q"], ["w_f"], name="/weights/Cast", to=TensorProto.FLOAT)
SCALED = helper.make_node("Mul", ["w_f", "w_s"], ["w"], name="/weights/Mul")
PRODUCT = helper.make_node("MatMul", ["x", "w"], ["a"], name="/fc/MatMul")
END = helper.make_node("Relu", ["a"], ["y"], name="/act/Relu")
FILES = {
    "cast and scaled": ([CAST, SCALED, PRODUCT, END], {"w_q": CODES, "w_s": SCALE}),
    "scaled by a weight of its own": ([CAST, SCALED, PRODUCT, END], {"w_q": CODES, "w_s": np.tile(ROWS, (64, 1))}),
    "dequantized": (
        [helper.make_node("DequantizeLinear", ["w_q", "w_s"], ["w"], name="/weights/Dequantize"), PRODUCT, END],
        {"w_q": CODES, "w_s": SCALE},
    ),
    "transposed": (
        [helper.make_node("Transpose", ["w_q"], ["w"], name="/weights/Transpose"), PRODUCT, END],
        {"w_q": CODES.astype(np.float32)},
    ),
    "computed from small constants": (
        [helper.make_node("Expand", ["w_s", "size"], ["w"], name="/weights/Expand"), PRODUCT, END],
        {"w_s": SCALE, "size": np.array([64, 64])},
    ),
    "beside a weight of its own": (
        [
            CAST,
            SCALED,
            helper.make_node("Gemm", ["x", "w", "bias"], ["a"], name="/fc/Gemm"),
            END,
        ],
        {"w_q": CODES, "w_s": SCALE, "bias": ROWS},
    ),
    "used by the module itself, too": (
        [
            CAST,
            SCALED,
            helper.make_node("MatMulInteger", ["x_q", "w_q"], ["i"], name="/fc/MatMulInteger"),
            helper.make_node("Cast", ["i"], ["f"], name="/fc/Cast", to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["f", "w"], ["a"], name="/fc/MatMul"),
            END,
        ],
        {"w_q": CODES, "w_s": SCALE},
    ),
    "used by two modules": (
        [
            CAST,
            SCALED,
            helper.make_node("MatMul", ["x", "w"], ["b"], name="/blocks.0/MatMul"),
            helper.make_node("MatMul", ["b", "w"], ["a"], name="/blocks.1/MatMul"),
            END,
        ],
        {"w_q": CODES, "w_s": SCALE},
    ),
}
SELECTED = {"used by two modules": ["blocks.*"]}


def file_of(case: str, folder: Path) -> Path:
    nodes, weights = FILES[case]
    takes = ("x_q", TensorProto.INT8) if case.startswith("used by the module") else ("x", TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*takes, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "a.onnx")
    return folder / "a.onnx"


def result(path: Path) -> np.ndarray:
    session = open_session(path)
    (given,) = session.get_inputs()
    numbers = np.arange(64)[None].astype(np.int8 if given.type == "tensor(int8)" else np.float32)
    return np.asarray(run_session(session, {given.name: numbers})["y"])


@pytest.mark.parametrize("case", FILES)
def test_the_body_of_a_module_with_borrowed_weights_computes_what_it_did(case: str, tmp_path: Path) -> None:
    file, output = file_of(case, tmp_path), tmp_path / "out.onnx"
    replace(file, SELECTED.get(case, ["fc"]), CustomOperator("com.acme", "X", keep_body=True), output)
    np.testing.assert_allclose(result(output), result(file), rtol=1e-5)


def test_a_weight_that_a_replaced_module_computes_is_an_input_of_the_body(tmp_path: Path) -> None:
    file = file_of("cast and scaled", tmp_path)
    replace(file, ["weights"], CustomOperator("com.acme", "W", keep_body=True), tmp_path / "first.onnx")
    replace(tmp_path / "first.onnx", ["fc"], CustomOperator("com.acme", "X", keep_body=True), tmp_path / "out.onnx")
    np.testing.assert_allclose(result(tmp_path / "out.onnx"), result(file), rtol=1e-5)


def test_an_operator_without_a_body_takes_the_borrowed_weights(tmp_path: Path) -> None:
    replace(file_of("cast and scaled", tmp_path), ["fc"], CustomOperator("com.acme", "X"), tmp_path / "out.onnx")
    (node,) = [node for node in onnx.load(tmp_path / "out.onnx").graph.node if node.op_type == "X"]
    assert list(node.input) == ["x", "w_q", "w_s"]
