"""Nodes that a careless translation gets wrong: attributes that are rarely used, types, and what would become code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from graph_texts import written
from modelexport import export, to_torch, update_weights
from modelexport.errors import ModelExportError, ModelExportWarning
from modelexport.tools.to_torch.to_torch import torch_source

X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
IMAGE = np.random.default_rng(3).standard_normal((1, 2, 5, 6)).astype(np.float32)
CUBE = np.random.default_rng(4).standard_normal((2, 3, 4)).astype(np.float32)
FLOAT, INT64, UINT8, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL
ELEMENT = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64, np.dtype(np.uint8): UINT8}
node = helper.make_node


def file_of(
    path: Path, nodes: Sequence[Any], x: Any, output: int, constants: dict[str, Any] | None = None, opset: int = 20,
    sizes: Any = None,
) -> Path:  # fmt: skip
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    inputs = [helper.make_tensor_value_info("x", ELEMENT[x.dtype], sizes or x.shape)]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("output", output, None)], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


LINEAR = {"w": np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)}
BIAS = np.arange(4, dtype=np.float32)
GRU = {name: np.random.default_rng(2).standard_normal(shape).astype(np.float32)
       for name, shape in (("g", (2, 12, 3)), ("h", (2, 12, 4)), ("b", (2, 24)))}  # fmt: skip
info = helper.make_tensor_value_info
LOOP = helper.make_graph(
    [node("Add", ["v", "one"], ["w"]), node("ReduceSum", ["w"], ["t"], keepdims=0), node("Less", ["t", "most"], ["d"])],
    "loop", [info("i", INT64, []), info("c", BOOL, []), info("v", FLOAT, [2, 3])],
    [info("d", BOOL, []), info("w", FLOAT, [2, 3]), info("w", FLOAT, [2, 3])])  # fmt: skip
SCAN = helper.make_graph(
    [node("Add", ["v", "e"], ["w"]), node("Mul", ["w", "e"], ["o"])], "scan",
    [info("v", FLOAT, [3]), info("e", FLOAT, [3])], [info("w", FLOAT, [3]), info("o", FLOAT, [3])])  # fmt: skip
REPEATED = {"nine": np.int64(9), "yes": np.bool_(True), "one": np.float32(1), "most": np.float32(20), "row": X[0]}
RIGHT: dict[str, tuple[Any, ...]] = {
    **{
        f"{operator} without axes": ([node(operator, ["x"], ["output"], noop_with_empty_axes=1)], np.abs(X), FLOAT)
        for operator in ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceSum", "ReduceLogSum")
    },
    "no infinity asked for": (
        [node("IsInf", ["x"], ["output"], detect_positive=0, detect_negative=0)],
        np.array([np.inf, -np.inf, np.nan], np.float32), BOOL),
    "a root of whole numbers": (
        [node("Pow", ["x", "half_"], ["output"])], np.array([1, 4, 10]), INT64, {"half_": np.float32(0.5)}),
    "a quotient of values without a type": (
        [node("Abs", ["x"], ["a"]), node("Div", ["a", "two"], ["output"])], np.array([3, -7]), INT64,
        {"two": np.int64(2)}),
    "no axes are all axes": (
        [node("Squeeze", ["x", "none"], ["output"])], X[:1, :, None], FLOAT, {"none": np.array([], np.int64)}),
    "a GRU, both ways": (
        [node("GRU", [*"xghb"], ["output"], linear_before_reset=1, direction="bidirectional", hidden_size=4)],
        np.stack([X, -X, X]), FLOAT, GRU),
    "a softmax of two axes": (
        [node("MatMul", ["x", "w"], ["a"]), node("Softmax", ["a"], ["b"]), node("MatMul", ["b", "x"], ["output"])],
        np.stack([np.pad(X, ((0, 1), (0, 1)))] * 2), FLOAT, LINEAR, 11),
    "a remainder with the sign of the dividend": (
        [node("Shape", ["x"], ["s"]), node("Neg", ["s"], ["n"]), node("Mod", ["n", "five"], ["output"], fmod=1)], X,
        INT64, {"five": np.array([5, 5])}),
    **{
        f"{rounding} of a size times {factor}": (
            [node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["f"], to=FLOAT), node("Mul", ["f", "factor"], ["m"]),
             node(rounding, ["m"], ["r"]), node("Cast", ["r"], ["n"], to=INT64),
             node("Expand", ["one", "n"], ["output"])],
            np.zeros(10, np.float32), FLOAT, {"factor": np.float32(factor), "one": np.ones(1, np.float32)}, 20, ["n"])
        for rounding, factor in (("Ceil", 0.1), ("Ceil", 1.1), ("Floor", 0.7), ("Floor", 2))
    },
    **{
        f"a table of sizes: {moved.op_type} {how}": (
            [node("Shape", ["x"], ["s"]), node("Concat", ["s", "five"], ["c"], axis=0),
             node("Reshape", ["c", "two"], ["r"]), moved], X, INT64,
            {"two": np.array([2, -1]), "five": np.array([5, 7]), "first": np.array([0]), "at": np.int64(1)}, 20,
            ["n", "m"])
        for how, moved in (
            ("columns", node("Concat", ["r", "r"], ["output"], axis=1)),
            ("of a column", node("Gather", ["r", "at"], ["output"], axis=1)),
            ("of columns", node("ReduceProd", ["r", "first"], ["output"])),
            ("in front", node("Unsqueeze", ["r", "first"], ["output"])),
            ("of nothing", node("ReduceProd", ["s"], ["output"], noop_with_empty_axes=1)),
        )
    },
    "one axis of two is left": (
        [node("Shape", ["x"], ["s"]), node("Gather", ["s", "at"], ["n"]), node("Unsqueeze", ["n", "both"], ["u"]),
         node("Squeeze", ["u", "first"], ["output"])], X, INT64,
        {"both": np.array([0, 1]), "first": np.array([0]), "at": np.int64(1)}, 20, ["n", "m"]),
    **{
        f"sizes of which {kind} has few digits": (
            [node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["f"], to=wide), node("Mul", ["f", "factor"], ["p"]),
             node("Cast", ["p"], ["q"], to=narrow), node("Ceil", ["q"], ["c"]),
             node("Cast", ["c"], ["output"], to=INT64)], X, INT64, {"factor": factor}, 20, ["n", "m"])
        for kind, wide, narrow, factor in (
            ("float16", TensorProto.FLOAT16, TensorProto.FLOAT16, np.float16(1000.3)),
            ("float32", TensorProto.DOUBLE, FLOAT, np.float64(1 / 3 + 1e-12)))
    },
    "a quotient of sizes that may be negative": (
        [node("Shape", ["x"], ["s"]), node("Sub", ["s", "nine"], ["d"]), node("Div", ["d", "two"], ["output"])], X,
        INT64, {"nine": np.int64(9), "two": np.int64(2)}, 20, ["n", "m"]),
    "a size minus a number under a root and as a divisor": (
        [node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["f"], to=FLOAT), node("Sub", ["f", "three"], ["z"]),
         node("Sqrt", ["z"], ["r"]), node("Div", ["r", "z"], ["q"]), node("Mul", ["x", "q"], ["output"])],
        X[:, :2], FLOAT, {"three": np.float32(3)}, 20, ["n", "m"]),
    "a mean beside padding of dynamic sizes": (
        [node("AveragePool", ["x"], ["output"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER")],
        IMAGE, FLOAT, None, 20, ["b", 2, "h", "w"]),
    "a mean with its padding of dynamic sizes": (
        [node("AveragePool", ["x"], ["output"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER",
              count_include_pad=1)], IMAGE, FLOAT, None, 20, ["b", 2, "h", "w"]),
    "a normalization of more axes than its scale has": (
        [node("RMSNormalization", ["x", "scale"], ["output"], axis=1)], CUBE, FLOAT,
        {"scale": np.arange(4, dtype=np.float32)}, 23, ["n", 3, 4]),
    "a normalization of axes that are as long as its scale": (
        [node("RMSNormalization", ["x", "scale"], ["output"], axis=1)], CUBE[:, :, :3], FLOAT,
        {"scale": np.arange(3, dtype=np.float32)}, 23),
    "a normalization with one number as its scale": (
        [node("RMSNormalization", ["x", "scale"], ["output"])], CUBE, FLOAT,
        {"scale": np.full(1, 2, np.float32)}, 23),
    "a normalization of its scale's axes": (
        [node("RMSNormalization", ["x", "scale"], ["output"])], CUBE, FLOAT,
        {"scale": np.arange(4, dtype=np.float32)}, 23, ["n", 3, "m"]),
    "a slice backwards of nothing": (
        [node("Slice", ["x", "zero", "three", "zero", "back"], ["output"])], X, FLOAT,
        {"zero": np.array([0]), "three": np.array([3]), "back": np.array([-1])}),
    "a loop that ends": ([node("Loop", ["nine", "yes", "x"], ["y", "output"], body=LOOP)], X, FLOAT, REPEATED),
    "a scan": ([node("Scan", ["row", "x"], ["y", "output"], body=SCAN, num_scan_inputs=1)], X, FLOAT, REPEATED),
    "a byte that wraps around": (
        [node("Shape", ["x"], ["s"]), node("Neg", ["s"], ["n"]), node("Cast", ["n"], ["output"], to=UINT8)], X, UINT8),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_it_computes_what_the_runtime_does(name: str, tmp_path: Path) -> None:
    nodes, x, *rest = RIGHT[name]
    path = file_of(tmp_path / "x.onnx", nodes, x, *rest)
    (right,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    found = torch_source(path).model()(torch.tensor(x)).detach().numpy()
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


CODE = helper.make_graph([], "print('run') or 1", [], [])
REFUSED: dict[str, tuple[list[Any], str, dict[str, Any]]] = {
    "pixels that torch chooses otherwise": (
        [node("Reshape", ["x", "image"], ["i"]), node("Resize", ["i", "", "scales"], ["output"], mode="nearest")],
        "F.interpolate does not compute it",
        {"image": np.array([1, 1, 2, 3]), "scales": np.array([1, 1, 1, 0.29], np.float32)},
    ),
    "beside the diagonal": ([node("EyeLike", ["x"], ["output"], k=1)], "beside the diagonal", {}),
    "windows that begin in the padding": (
        [
            node("Reshape", ["x", "image"], ["i"]),
            node("MaxPool", ["i"], ["output"], kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1], ceil_mode=1),
        ],
        "its padding",
        {"image": np.array([1, 1, 2, 3])},
    ),
    "gates that are coupled": (
        [node("LSTM", ["three", "w", "r"], ["output"], hidden_size=1, input_forget=1)],
        "or gates are not the usual ones",
        {"three": X[None], "w": np.ones((1, 4, 3), np.float32), "r": np.ones((1, 4, 1), np.float32)},
    ),
    "a mean of integers": (
        [
            node("Cast", ["x"], ["i"], to=INT64),
            node("ReduceMean", ["i"], ["m"]),
            node("Cast", ["m"], ["output"], to=FLOAT),
        ],
        "a mean of integers",
        {},
    ),
    "an unknown type": ([node("Cast", ["x"], ["output"], to=99)], "no such type", {}),
    "a graph in the place of a number": (
        [node("Concat", ["x", "x"], ["output"], axis=CODE)],
        "is of the type GRAPH",
        {},
    ),
    "fractions as an axis": ([node("Concat", ["x", "x"], ["output"], axis=[1.5])], "is of the type FLOATS", {}),
    "no operand": ([node("Relu", [], ["output"])], "fewer than it needs", {}),
    "a name of nn.Module": ([node("Mul", ["x", "half"], ["output"])], "'half' has the name", {"half": X}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    nodes, reason, constants = REFUSED[name]
    path = file_of(tmp_path / "x.onnx", nodes, X, FLOAT, constants)
    with pytest.raises(ModelExportError, match=reason) as raised:
        to_torch(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "names", [("a..w", "a..b", "/a..c/m"), (".w", "b.", "n"), ("a", "a.b", "/a//c/m"), ("..", "...", "n")]
)
def test_names_with_empty_parts_become_names_of_modules(names: tuple[str, str, str], tmp_path: Path) -> None:
    weight, bias, name = names
    nodes = [node("MatMul", ["x", weight], ["m"], name=name), node("Add", ["m", bias], ["output"])]
    model = to_torch(file_of(tmp_path / "x.onnx", nodes, X, FLOAT, {weight: LINEAR["w"].T, bias: BIAS}))
    entries = [tensor.detach().numpy() for tensor in model.state_dict().values()]
    assert sorted(tensor.shape for tensor in entries) == [(3, 4), (4,)]
    np.testing.assert_allclose(model(torch.tensor(X)).detach(), X @ LINEAR["w"].T + BIAS, rtol=1e-5)


@pytest.mark.parametrize(("pad", "steps"), [("SAME_UPPER", 2), ("SAME_LOWER", 2), ("SAME_UPPER", 1)])
@pytest.mark.parametrize("operator", ["Conv", "MaxPool"])
def test_padding_is_computed_from_dynamic_sizes(operator: str, pad: str, steps: int, tmp_path: Path) -> None:
    """Of values whose number of axes is known from the weight alone."""
    how = {"strides": [steps], "auto_pad": pad, **({"kernel_shape": [3]} if operator == "MaxPool" else {})}
    layer = node(operator, ["i", "w"] if operator == "Conv" else ["i"], ["output"], **how)
    nodes = [node("Shape", ["x"], ["s"]), node("Concat", ["one", "s"], ["t"]), node("Expand", ["x", "t"], ["i"]), layer]
    nodes[1].attribute.append(helper.make_attribute("axis", 0))
    constants = {"one": np.array([1]), "w": np.random.default_rng(3).standard_normal((4, 2, 3)).astype(np.float32)}
    path = file_of(tmp_path / "x.onnx", nodes, np.ones((2, 7), np.float32), FLOAT, constants)
    document = onnx.load(path)
    document.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "length"
    onnx.save(document, path)
    model, session = to_torch(path), onnxruntime.InferenceSession(path)
    for length in (7, 8):
        x = np.random.default_rng(length).standard_normal((2, length)).astype(np.float32)
        found = model(torch.tensor(x)).detach().numpy()
        np.testing.assert_allclose(found, session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_sizes_that_are_padded_to_a_multiple_are_numbers(tmp_path: Path) -> None:
    """As in window attention: onnxscript writes the attribute of ``Mod`` with its default."""
    nodes = [
        node("Shape", ["x"], ["s"]), node("Neg", ["s"], ["n"]), node("Mod", ["n", "four"], ["m"], fmod=0),
        node("Add", ["s", "m"], ["a"]), node("Div", ["a", "four"], ["d"]), node("Expand", ["one", "d"], ["output"]),
    ]  # fmt: skip
    constants = {"four": np.array([4]), "one": np.ones((1, 1), np.float32)}
    path = file_of(tmp_path / "x.onnx", nodes, X, FLOAT, constants, sizes=["h", "w"])
    assert torch_source(path).text.count("% 4) // 4") == 2
    assert to_torch(path)(torch.ones(5, 8)).shape == (2, 2)


def test_a_size_is_not_compared_with_a_negative_number(tmp_path: Path) -> None:
    """As TorchScript writes ``expand``, where -1 is a size that stays."""
    nodes = [
        node("Shape", ["x"], ["s"]), node("Equal", ["s", "stays"], ["e"]), node("Where", ["e", "one", "s"], ["n"]),
        node("Expand", ["w", "n"], ["output"]),
    ]  # fmt: skip
    constants = {"stays": np.array([-1]), "one": np.array([1]), "w": np.ones((1, 1), np.float32)}
    path = file_of(tmp_path / "x.onnx", nodes, X, FLOAT, constants, sizes=["h", "w"])
    assert "-1" not in torch_source(path).text


def test_padding_that_was_turned_around_is_numbers(tmp_path: Path) -> None:
    """As TorchScript writes ``F.pad``: the pads of the last axis come first, so zeros are added and rows reversed."""
    nodes = [
        node("Shape", ["x"], ["s"]), node("Gather", ["s", "one"], ["n"]), node("Concat", ["two", "n"], ["p"], axis=0),
        node("ConstantOfShape", ["two"], ["z"], value=numpy_helper.from_array(np.array([0]))),
        node("Concat", ["p", "z"], ["c"], axis=0), node("Reshape", ["c", "pairs"], ["r"]),
        node("Slice", ["r", "last", "least", "zero", "last"], ["t"]), node("Transpose", ["t"], ["u"], perm=[1, 0]),
        node("Reshape", ["u", "last"], ["q"]), node("Pad", ["x", "q"], ["output"]),
    ]  # fmt: skip
    constants = {"one": [1], "two": [2], "zero": [0], "last": [-1], "least": [-99], "pairs": [-1, 2]}
    path = file_of(tmp_path / "x.onnx", nodes, X, FLOAT, {name: np.array(each) for name, each in constants.items()})
    assert "F.pad(x, (2, 3))" in torch_source(path).text
    np.testing.assert_array_equal(to_torch(path)(torch.tensor(X)), np.pad(X, ((0, 0), (2, 3))))


def test_a_dropout_that_is_on_in_evaluation_stays_on(tmp_path: Path) -> None:
    nodes = [node("Dropout", ["x", "half", "yes"], ["output"])]
    ones = np.ones((10, 100), np.float32)
    path = file_of(tmp_path / "x.onnx", nodes, ones, FLOAT, {"half": np.float32(0.5), "yes": np.bool_(True)})
    with pytest.warns(ModelExportWarning, match="was not compared with .*: it draws random numbers"):
        model = to_torch(path)
    assert set(model(torch.tensor(ones)).unique().tolist()) == {0.0, 2.0}


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2) * self.temperature).softmax(-1) @ x


def test_a_learned_factor_of_attention_stays_learned(tmp_path: Path) -> None:
    given = torch.tensor(np.stack([X, X]))
    model = to_torch(export(Tempered(), (given,), tmp_path / "x.onnx", check=False).path)
    before = model(given)
    with torch.no_grad():
        model.get_parameter("temperature").fill_(3.0)
    assert (model(given) - before).abs().max() > 0.01


def test_weights_that_are_inputs_as_well_are_entries_and_not_arguments(tmp_path: Path) -> None:
    """Files of the first versions of the format list all initializers as inputs."""
    path = file_of(tmp_path / "m.onnx", [node("Gemm", ["x", "w"], ["output"], transB=1)], X, FLOAT, LINEAR)
    model = onnx.load(path)
    model.graph.input.append(info("w", FLOAT, [4, 3]))
    onnx.save(model, path)
    module = to_torch(path)
    assert np.allclose(module(torch.from_numpy(X)).detach(), X @ LINEAR["w"].T, atol=1e-6)
    assert [tuple(entry.shape) for entry in module.state_dict().values()] == [(4, 3)]


def test_branches_may_have_equal_names_of_weights(tmp_path: Path) -> None:
    text = """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = t () => (float[2] p) <float[2] w = {1.0, 2.0}> { p = Add (x, w) },
                   else_branch = e () => (float[2] p) <float[2] w = {3.0, 5.0}> { p = Add (x, w) }> }"""
    module = to_torch(path := written(tmp_path / "m.onnx", text))
    found = [module(torch.tensor(chosen), torch.zeros(2))["y"].tolist() for chosen in (True, False)]
    assert found == [[1, 2], [3, 5]]
    assert [*module.state_dict()] == ["y.then_branch.w", "y.else_branch.w"]
    update_weights(path, {"y.else_branch.w": np.array([7, 8], np.float32)}, tmp_path / "new.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "new.onnx")
    feeds = {"x": np.zeros(2, np.float32)}
    assert [session.run(None, {**feeds, "c": np.array(chosen)})[0].tolist() for chosen in (True, False)] == [
        [1, 2],
        [7, 8],
    ]
