"""Kernels: each computes what ONNX Runtime computes, whatever its attributes are."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from modelexport.runtime.single_nodes import run_node
from modelexport.traces.array_differences import relative_error
from modelexport.traces.file_run import FileRun
from modelexport.traces.numpy_kernels import KERNELS


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


X, X1, X3 = numbers(2, 4, 9, 8), numbers(2, 4, 11), numbers(1, 2, 5, 6, 7)
VECTORS = (numbers(4), numbers(4, seed=1), numbers(4, seed=2), np.abs(numbers(4, seed=3)))
REDUCTIONS = ("add", "mul", "max", "min")
ROWS = np.array([[0, 1], [2, 3], [0, 1]])
LABELS = np.arange(22).reshape(2, 11) % 4
ALONG = np.array([[3, 0, 1], [1, 2, 0], [3, 3, 0]])


def recurrent(directions: int, gates: int, *lengths: Any) -> tuple[Any, ...]:
    """The inputs of a recurrent layer of four numbers."""
    shapes = (5, 2, 3), (directions, 4 * gates, 3), (directions, 4 * gates, 4), (directions, 8 * gates)
    return (*(numbers(*shape) for shape in shapes), *lengths)


# fmt: off
CASES: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("Conv", (X, numbers(6, 4, 3, 3), numbers(6)), {}),
    ("Conv", (X[:0], numbers(6, 4, 3, 3), numbers(6)), {}),
    ("Conv", (X, numbers(6, 2, 3, 2)), {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1]}),
    ("Conv", (X, numbers(4, 1, 3, 3)), {"group": 4, "dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    ("Conv", (X, numbers(5, 4, 4, 3)), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ("Conv", (X, numbers(5, 4, 4, 3)), {"auto_pad": "SAME_LOWER", "strides": [3, 2]}),
    ("Conv", (X, numbers(5, 4, 2, 2)), {"auto_pad": "VALID"}),
    ("Conv", (X1, numbers(3, 4, 5)), {"pads": [4, 0]}),
    ("Conv", (X3, numbers(3, 2, 2, 3, 1)), {"strides": [1, 2, 3]}),
    ("ConvTranspose", (X, numbers(4, 3, 3, 2), numbers(3)), {}),
    ("ConvTranspose", (X, numbers(4, 3, 3, 2)), {"group": 2, "strides": [2, 3], "pads": [1, 0, 0, 1],
                                               "output_padding": [1, 2]}),
    ("ConvTranspose", (X, numbers(4, 3, 3, 2)), {"dilations": [2, 3]}),
    ("ConvTranspose", (X, numbers(4, 3, 3, 3)), {"strides": [2, 2], "output_shape": [18, 16]}),
    ("ConvTranspose", (X, numbers(4, 3, 3, 3)), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", (X, numbers(4, 3, 3, 3)), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("CumSum", (X, np.array([2])), {}), ("CumSum", (X, np.array(-1)), {"exclusive": 1, "reverse": 1}),
    ("MaxPool", (X,), {"kernel_shape": [3, 2]}),
    ("MaxPool", (X,), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ("MaxPool", (X,), {"kernel_shape": [2, 2], "dilations": [3, 2], "strides": [2, 1]}),
    ("MaxPool", (X,), {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    ("MaxPool+indices", (X,), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool+indices", (X,), {"kernel_shape": [2, 3], "storage_order": 1}),
    ("AveragePool", (X,), {"kernel_shape": [3, 2], "strides": [2, 2]}),
    ("AveragePool", (X,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("AveragePool", (X,), {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", (X,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 3], "ceil_mode": 1,
                             "count_include_pad": 1}),
    ("AveragePool", (X,), {"kernel_shape": [4, 3], "auto_pad": "SAME_UPPER"}),
    ("LpPool", (X,), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}),
    ("LpPool", (X,), {"kernel_shape": [2, 2], "p": 3}),
    ("GlobalLpPool", (X,), {"p": 3}), ("GlobalMaxPool", (X1,), {}), ("GlobalMaxPool", (X,), {}),
    ("Resize", (X, numbers(0), np.array([1, 1, 7 / 9, 1.4], np.float32)), {"mode": "linear"}),
    ("Resize", (X, numbers(0), np.array([11 / 9, 2.3], np.float32)), {"axes": [2, 3], "mode": "linear"}),
    ("Resize", (X, numbers(0), np.array([1, 1, 1.7, 1.4], np.float32)),
     {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("Resize", (X1, numbers(0), np.array([1, 1, 1.1], np.float32)),
     {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}),
    ("GridSample", (X[:1, :1], numbers(1, 3, 2, 2)), {"padding_mode": "border"}),
    ("RNN", recurrent(1, 1), {"hidden_size": 4}), ("GRU", recurrent(1, 3), {"hidden_size": 4}),
    ("LSTM", recurrent(1, 4), {"hidden_size": 4}),
    ("GatherND", (X, ROWS[:, :1] % 2), {}),
    ("GatherND", (X, np.array([[[1], [2]], [[3], [0]]])), {"batch_dims": 1}),
    ("GatherND", (X, np.array([[0, -1], [-2, 3]])), {}),
    *(("ScatterND", (numbers(3, 4, 5), ROWS, numbers(3, 5)), {"reduction": one}) for one in REDUCTIONS),
    ("ScatterND", (numbers(3, 4, 5), ROWS[:2], numbers(2, 5)), {}),
    ("GatherElements", (numbers(3, 4), ALONG), {"axis": 1}),
    ("GatherElements", (numbers(3, 4), ALONG - 2), {"axis": -1}),
    *(("ScatterElements", (numbers(3, 4), ALONG, numbers(3, 3)), {"axis": 1, "reduction": one})
      for one in REDUCTIONS),
    ("ScatterElements", (numbers(3, 4), ALONG[:2], numbers(2, 3)), {"axis": 1}),
    ("Erf", (X,), {}), ("Gelu", (X,), {}), ("Gelu", (X,), {"approximate": "tanh"}), ("HardSwish", (4 * X,), {}),
    ("Mish", (X,), {}), ("Softplus", (X,), {}),
    ("ReduceLogSumExp", (400 * X, np.array([1, 3])), {"keepdims": 0}), ("ReduceLogSumExp", (X,), {}),
    ("LogSoftmax", (X,), {}), ("LogSoftmax", (4e4 * X,), {"axis": 1}),
    ("SoftmaxCrossEntropyLoss", (4e3 * X1, LABELS), {}),
    ("SoftmaxCrossEntropyLoss", (X1, LABELS, numbers(4)), {"reduction": "sum"}),
    ("SoftmaxCrossEntropyLoss", (X1, LABELS, numbers(4)), {"ignore_index": 0}),
    ("SoftmaxCrossEntropyLoss", (X1, LABELS), {"reduction": "none"}),
    ("GroupNormalization", (X, numbers(4), numbers(4)), {"num_groups": 2, "epsilon": 1e-3}),
    ("Softmax", (X,), {}), ("Softmax", (X,), {"axis": 1}),
    ("BatchNormalization", (X, *VECTORS), {"momentum": 0.5, "epsilon": 1e-3}),
    ("LRN", (X,), {"size": 3}), ("LRN", (X,), {"size": 5, "alpha": 1.0, "beta": 0.5, "bias": 2.0}),
    ("Split", (X, np.array([9])), {"axis": -2}), ("Split", (X,), {"num_outputs": 1}),
    ("MeanVarianceNormalization", (X,), {}), ("MeanVarianceNormalization", (X,), {"axes": [0, 2]}),
)
# fmt: on


def one_node(op_type: str, inputs: tuple[Any, ...], attributes: dict[str, Any], opset: int = 21) -> onnx.ModelProto:
    name, _, more = op_type.partition("+")
    given = [f"x{i}" for i in range(len(inputs))]
    made = ["y", "indices"] if more else ["y"]
    types = {np.dtype(numpy): onnx for numpy, onnx in (("float32", 1), ("int32", 6), ("int64", 7))}
    graph = helper.make_graph(
        [helper.make_node(name, given, made, **attributes)],
        "g",
        [helper.make_tensor_value_info(n, types[a.dtype], a.shape) for n, a in zip(given, inputs, strict=True)],
        [
            helper.make_tensor_value_info(n, TensorProto.INT64 if n == "indices" else TensorProto.FLOAT, None)
            for n in made
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.mark.parametrize(("op_type", "inputs", "attributes"), CASES)
def test_a_kernel_computes_what_onnx_runtime_computes(
    op_type: str, inputs: tuple[Any, ...], attributes: dict[str, Any]
) -> None:
    proto = one_node(op_type, inputs, attributes)
    feeds = {f"x{i}": array for i, array in enumerate(inputs)}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    for wide in (None, "float32"):
        run = FileRun(ir.serde.deserialize_model(proto), in_float64_for=wide)
        found = run.run(feeds)
        assert not run.nodes.by_runtime
        for right, (name, array) in zip(expected, found.items(), strict=True):
            assert array.shape == right.shape
            assert array.dtype == (np.int64 if name == "indices" else np.float64 if wide else np.float32)
            assert relative_error(right, array.astype(right.dtype)) < 1e-6


@pytest.mark.parametrize(
    ("op_type", "opset", "inputs", "attributes"),
    [
        ("Softmax", 11, (X,), {}),
        ("LogSoftmax", 11, (X,), {"axis": 2}),
        ("Hardmax", 11, (X,), {"axis": -2}),
        ("BatchNormalization", 9, (X, *VECTORS), {"momentum": 0.5}),
        ("LSTM", 14, recurrent(2, 4, np.array([3, 5], np.int32)), {"hidden_size": 4, "direction": "bidirectional"}),
        ("GRU", 7, recurrent(1, 3, np.array([1, 4], np.int32)), {"hidden_size": 4, "direction": "reverse"}),
    ],
)  # fmt: skip
def test_what_onnx_computes_wrongly_is_computed_by_the_standard(
    op_type: str, opset: int, inputs: tuple[Any, ...], attributes: dict[str, Any]
) -> None:
    """A softmax over all axes from one on, a batch normalization of no training, lengths of sequences."""
    proto = one_node(op_type, inputs, attributes, opset)
    feeds = {f"x{i}": array for i, array in enumerate(inputs)}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = FileRun(ir.serde.deserialize_model(proto), in_float64_for=None).run(feeds)
    np.testing.assert_allclose(found["y"], session.run(None, feeds)[0], rtol=1e-4, atol=1e-6)


def test_a_grid_is_sampled_in_float64() -> None:
    """onnx rounds the places to float32, whatever the type of the grid is; this fails if its function is renamed."""
    image, grid = torch.randn(1, 2, 5, 6, dtype=torch.float64), torch.rand(1, 3, 4, 2, dtype=torch.float64) * 2 - 1
    proto = one_node("GridSample", (image.float().numpy(), grid.float().numpy()), {})
    run = FileRun(ir.serde.deserialize_model(proto), in_float64_for="float32")
    expected = torch.nn.functional.grid_sample(image, grid, align_corners=False)
    np.testing.assert_allclose(run.run({"x0": image.numpy(), "x1": grid.numpy()})["y"], expected, rtol=1e-12)


def test_every_kernel_is_tested() -> None:
    of_integers = {"QuantizeLinear"}  # in test_ties.py
    assert {op_type.partition("+")[0] for op_type, _, _ in CASES} | of_integers == set(KERNELS)


def test_parts_that_do_not_add_up_are_an_error_as_in_onnx_runtime() -> None:
    inputs = (X, np.array([5]))
    run = FileRun(ir.serde.deserialize_model(one_node("Split", inputs, {"axis": 1})), in_float64_for=None)
    with pytest.raises(Exception, match="Split"):
        run.run(dict(zip(("x0", "x1"), inputs, strict=True)))


def test_a_pool_of_nan_is_nan() -> None:
    array = np.array([[[1, np.nan, 2, 3]]], np.float32)
    run = FileRun(ir.serde.deserialize_model(one_node("MaxPool", (array,), {"kernel_shape": [2]})), in_float64_for=None)
    np.testing.assert_array_equal(run.run({"x0": array})["y"], [[[np.nan, np.nan, 3]]])


def test_a_mean_of_nothing_is_nan_without_a_warning() -> None:
    inputs = (np.zeros((0, 2), np.float32), np.array([0]))
    run = FileRun(ir.serde.deserialize_model(one_node("ReduceMean", inputs, {})), in_float64_for=None)
    assert np.isnan(run.run({"x0": inputs[0], "x1": inputs[1]})["y"]).all()


def test_attributes_are_numbers_of_float64() -> None:
    """The weights of a cubic interpolation, which are made of an attribute and of places, add up to one."""
    array, sizes = np.full((1, 1, 240), 0.3), np.array([1, 1, 224])
    attributes = {"mode": "cubic", "cubic_coeff_a": -0.7, "coordinate_transformation_mode": "half_pixel"}
    proto = one_node("Resize", (array.astype(np.float32), sizes), attributes)
    proto.graph.node[0].input[:] = ["x0", "", "", "x1"]
    (found,) = (
        FileRun(ir.serde.deserialize_model(proto), in_float64_for="float32").run({"x0": array, "x1": sizes}).values()
    )
    np.testing.assert_allclose(found, np.full((1, 1, 224), 0.3), rtol=1e-14)


@pytest.mark.parametrize(("alpha", "is_rounded"), [(0.35355335, True), (0.125, False)])
def test_numbers_in_attributes_of_the_runtimes_operators_are_rounded_otherwise_in_a_nudged_run(
    alpha: float, is_rounded: bool
) -> None:
    text = f"""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        product (float[2, 3] a, float[3, 4] b) => (float[2, 4] y) {{
            y = com.microsoft.FusedMatMul <alpha = {alpha}> (a, b)
        }}
    """
    run = FileRun(ir.serde.deserialize_model(onnx.parser.parse_model(text)), in_float64_for="float32")
    inputs = {"a": numbers(2, 3), "b": numbers(3, 4)}
    error = relative_error(run.run(inputs)["y"], run.nudged().run(inputs)["y"])
    assert (1e-8 < error < 1e-5) if is_rounded else error == 0


def test_what_is_a_function_of_others_in_the_runtime_has_noise_since_it_has_rounded_numbers_inside() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        product (float[2, 3] x) => (float[2, 3] y) { y = com.microsoft.FastGelu (x) }
    """
    run, x = (
        FileRun(ir.serde.deserialize_model(onnx.parser.parse_model(text)), in_float64_for="float32"),
        {"x": numbers(2, 3)},
    )
    assert 1e-8 < relative_error(run.run(x)["y"], run.nudged().run(x)["y"]) < 1e-5


def test_inputs_with_which_the_runtime_fails_at_a_node_are_an_error_of_python() -> None:
    pool = helper.make_node("GlobalAveragePool", ["x"], ["y"])
    with pytest.raises(RuntimeError, match="GlobalAveragePool"):
        run_node(pool, {"": 17}, [np.zeros((1, 2, 0, 3), np.float32)])
