"""What a quantizer writes is compared with the floating-point weights: a fault is refused, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import modelexport
from modelexport.errors import CheckError, InputsError, UsageError
from modelexport.files.map_types import model_of
from modelexport.files.protobuf_writing import to_proto
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session
from modelexport.tagged.file import read_tagged
from modelexport.tools.quantize import methods, quantize
from modelexport.tools.quantize.methods import apply_method
from modelexport.tools.quantize.search_within_bound import search
from modelexport.tools.quantize.sensitivity import sensitivity

pytestmark = pytest.mark.int8
DRAW = np.random.default_rng(0)
DATA = [{"x": DRAW.standard_normal((4, 64)).astype(np.float32)}]
Change = Callable[[Any], Any]


def gemm(path: Path) -> Path:
    """A tagged file of a product with factors, of a weight [out, in], and a bias."""
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "/dense/Gemm", transB=1, alpha=0.5, beta=2.0)
    tensors = [numpy_helper.from_array(DRAW.standard_normal(s).astype(np.float32), n) for n, s in SIZES.items()]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 64]) for name in "xy"]
    graph = helper.make_graph([node], "g", infos[:1], infos[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path / "float.onnx")
    modelexport.adopt(path / "float.onnx", path / "tagged.onnx")
    return path / "tagged.onnx"


def adopted(path: Path, nodes: list[onnx.NodeProto], dtype: int = TensorProto.FLOAT, **weights: np.ndarray) -> Path:
    """A tagged file of nodes, whose inputs begin with x and whose outputs begin with y."""
    names = {name for node in nodes for name in (*node.input, *node.output)}
    inputs = [helper.make_tensor_value_info(name, dtype, None) for name in sorted(names) if name[0] == "x"]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in sorted(names) if name[0] == "y"]
    arrays = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in weights.items()}
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path / "float.onnx")
    modelexport.adopt(path / "float.onnx", path / "tagged.onnx")
    return path / "tagged.onnx"


SIZES = {"w": (64, 64), "b": (64,)}


def changed(model: onnx.ModelProto, ending: str, change: Change) -> None:
    """Change the initializers whose names have an ending, in place; there are some."""
    found = [tensor for tensor in model.graph.initializer if tensor.name.endswith(ending)]
    assert found
    for tensor in found:
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), tensor.name))


def first(factor: float) -> Change:
    """Multiply the first element."""

    def change(array: Any) -> Any:
        array.reshape(-1)[0] *= factor
        return array

    return change


FAULTS: dict[str, tuple[str, str, Change]] = {
    "the scale of one channel": ("int8-dynamic", "_scale", first(1.1)),
    "the scale of one block": ("int4", "_scales", first(1.4)),
    "a transposed matrix": ("int8-dynamic", "_quantized", np.transpose),
    "a transposed block": ("int4", "_Q4", lambda codes: np.roll(codes, 1, -1)),
    "blocks in another order": ("int8-weights", "_Q8", lambda codes: codes[:, ::-1].copy()),
    "a zero point": ("int8-dynamic", "_zero_point", lambda zero: zero + np.uint8(1)),
    "a zero point beside the step of a result": (
        "int8-static",
        "0.5_zero_point",
        lambda zero: zero + zero.dtype.type(3),
    ),
    "a zero point of blocks": ("int4", "_zero_points", lambda zero: zero + np.uint8(1)),
    "the scale of a bias": ("int8-static", "2.0_quantized_scale", lambda scale: scale * 2),
    "a lost factor": ("int8-dynamic", "_scale", lambda scale: scale * 2),
    "a lost factor of the bias": ("int8-dynamic", "plain2.0", lambda bias: bias / 2),
    "the scale of the activations": ("int8-static", "x_scale", lambda scale: scale / 2),
    "the zero point of the activations": ("int8-static", "x_zero_point", lambda zero: zero + np.uint8(20)),
}


def spoil(monkeypatch: pytest.MonkeyPatch, ending: str, change: Change) -> None:
    """Let quantizers write something wrong."""

    def spoiled(*arguments: Any) -> ir.Model:
        made = to_proto(apply_method(*arguments), {})
        changed(made, ending, change)
        return model_of(made)

    monkeypatch.setattr(quantize, "apply_method", spoiled)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_quantizer_writes_wrong_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to, ending, change = FAULTS[fault]
    file = gemm(tmp_path)
    spoil(monkeypatch, ending, change)
    with pytest.raises(CheckError, match=r"^dense: what ONNX Runtime wrote for \S+ .*: keep the module with --keep"):
        modelexport.quantize(file, tmp_path / "q.onnx", to=to, data=DATA)
    assert not (tmp_path / "q.onnx").exists()


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        ("int4:algorithm=k_quant", np.full((64, 64), 0.3)),
        ("int4:algorithm=hqq", DRAW.standard_normal((64, 64)) * 1e-20),
    ],
)
def test_zeros_for_weights_that_are_not_zero_are_refused(method: str, weight: np.ndarray, tmp_path: Path) -> None:
    file = adopted(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"], "/dense/MatMul")], w=weight)
    with pytest.raises(CheckError, match=r"^dense: .* is off by \S+ times what rounding explains"):
        modelexport.quantize(file, tmp_path / "q.onnx", to=method)


def test_a_scale_of_another_activation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("MatMul", [f"x{i}", "w"], [f"y{i}"], f"/dense{i}/MatMul") for i in range(2)]
    file = adopted(tmp_path, nodes, w=DRAW.standard_normal((64, 64)))

    def spoiled(*arguments: Any) -> ir.Model:
        made = to_proto(apply_method(*arguments), {})
        factors = [node for node in made.graph.node if node.name.endswith("_quant_scales_mul")]
        factors[0].input[0] = factors[1].input[0]
        return model_of(made)

    monkeypatch.setattr(quantize, "apply_method", spoiled)
    with pytest.raises(CheckError, match=r"^dense0: "):
        modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic")


def test_a_product_may_take_the_rows_of_the_table_that_it_is_tied_to(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["w", "x"], ["rows"], "/table/Gather"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], "/dense/MatMul"),
    ]
    file = adopted(tmp_path, nodes, TensorProto.INT64, w=DRAW.standard_normal((64, 64)))
    assert modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic").methods == {"int8-dynamic": 2}


def test_a_table_of_matrices_is_quantized(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["w", "x"], ["y"], "/table/Gather")
    file = adopted(tmp_path, [node], TensorProto.INT64, w=DRAW.standard_normal((8, 16, 32)))
    assert not modelexport.quantize(file, tmp_path / "q.onnx", to="int4:embeddings=true").left


def test_channels_of_unlike_size_of_a_convolution_with_one_scale_are_quantized(tmp_path: Path) -> None:
    layer = nn.Conv2d(3, 16, 3)
    layer.weight.data *= torch.logspace(-3, 1, 16).reshape(-1, 1, 1, 1)
    modelexport.export(layer, torch.randn(1, 3, 8, 8), tmp_path / "x.onnx", check=False)
    written = modelexport.quantize(tmp_path / "x.onnx", tmp_path / "q.onnx", to="int8-dynamic")
    assert written.methods == {"int8-dynamic": 1}


def test_a_convolution_of_an_input_without_a_declared_rank_is_quantized(tmp_path: Path) -> None:
    """ONNX Runtime's ``ConvInteger`` ends the process if its input has one axis or none, so that none is made up."""
    file = adopted(tmp_path, [helper.make_node("Conv", ["x", "w"], ["y"])], w=DRAW.standard_normal((8, 4, 3, 3)))
    assert modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic").methods == {"int8-dynamic": 1}


def test_random_inputs_are_not_made_of_an_unknown_rank(tmp_path: Path) -> None:
    file = adopted(tmp_path, [helper.make_node("Relu", ["x"], ["y"])])
    with pytest.raises(InputsError, match=r"for x, whose number of axes the file does not declare; give inputs with"):
        make_random_inputs(read_tagged(file).model, open_session(file))


@pytest.mark.parametrize("groups", [2, 4])
def test_a_transposed_convolution_with_groups_and_a_bias_is_quantized(tmp_path: Path, groups: int) -> None:
    """ONNX Runtime's quantizer gives the bias a scale for each channel of one group."""
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], group=groups)
    weights = {"w": DRAW.standard_normal((4, 3, 3, 3)), "b": DRAW.standard_normal(3 * groups)}
    data = [{"x": DRAW.standard_normal((2, 4, 6, 6)).astype(np.float32)}]
    file = adopted(tmp_path, [node], **weights)
    assert modelexport.quantize(file, tmp_path / "q.onnx", to="int8-static", data=data).methods == {"int8-static": 1}


def test_rows_that_a_constant_chooses_are_quantized(tmp_path: Path) -> None:
    """As the type of a token in BERT, if the caller gives none."""
    nodes = [
        helper.make_node("Gather", ["w", "types"], ["rows"], "/table/Gather"),
        helper.make_node("Add", ["x", "rows"], ["y"], "/Add"),
    ]
    file = adopted(tmp_path, nodes, w=DRAW.standard_normal((2, 64)), types=np.array([0, 0, 1]))
    assert modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic").methods == {"int8-dynamic": 1}


def test_a_product_that_the_library_leaves_alone_is_not_counted(tmp_path: Path) -> None:
    node = helper.make_node("Gemm", ["x", "w", "x"], ["y"], "/dense/Gemm", alpha=0.5, beta=2.0)
    file = adopted(tmp_path, [node], w=DRAW.standard_normal((64, 64)))
    assert not modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic").methods


def normal(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype(np.float32)


ROWS = np.array([0, 3, 5])
TIED = [
    helper.make_node("Gather", ["w", "x"], ["rows"], "/table/Gather"),
    helper.make_node("Gemm", ["rows", "w"], ["y"], "/head/Gemm", transB=1),
]


def one(operator: str, *inputs: str, **attributes: Any) -> list[onnx.NodeProto]:
    return [helper.make_node(operator, inputs, ["y"], f"/layer/{operator}", **attributes)]


Case = tuple[str, list[onnx.NodeProto], dict[str, np.ndarray], dict[str, np.ndarray]]
LSTM = one("LSTM", "x", "w", "r", hidden_size=16)
ATTENTION = one("Attention", "x", "w", "b", domain="com.microsoft", num_heads=2)
NORM = [
    helper.make_node("MatMul", ["x", "w"], ["made"], "/first/MatMul"),
    *one("LayerNormalization", "made", "g", "b"),
]
OF_LSTM = {"w": normal(1, 64, 16), "r": normal(1, 64, 16)}
OF_ATTENTION = {"w": normal(64, 192) * np.float32(0.1), "b": normal(192)}
OF_NORM = {"w": normal(64, 64), "g": normal(64), "b": normal(64)}
RIGHT: dict[str, Case] = {
    "stacked matrices": (
        "int8-dynamic",
        one("MatMul", "x", "w"),
        {"w": normal(4, 64, 16)},
        {"x": normal(4, 8, 64)},
    ),
    "a stack of one matrix, and data of its rank": (
        "int8-weights",
        [helper.make_node("Reshape", ["x", "sizes"], ["data"], "/Reshape"), *one("MatMul", "data", "w")],
        {"w": normal(1, 64, 16), "sizes": np.array([1, 4, 64])},
        DATA[0],
    ),
    "a stack of stacks of one matrix": ("int4", one("MatMul", "x", "w"), {"w": normal(1, 1, 64, 16)}, DATA[0]),
    "stacked matrices with ranges": (
        "int8-static",
        one("MatMul", "x", "w"),
        {"w": normal(4, 64, 16)},
        {"x": normal(4, 8, 64)},
    ),
    "a weight as the first factor": (
        "int8-static",
        one("MatMul", "w", "x"),
        {"w": normal(64, 64)},
        {"x": normal(64, 8)},
    ),
    "groups of a transposed convolution": (
        "int8-static",
        one("ConvTranspose", "x", "w", "b", group=2),
        {"w": normal(4, 4, 3, 3), "b": normal(8)},
        {"x": normal(2, 4, 5, 5)},
    ),
    "a table of which the data take few rows": (
        "int8-static",
        one("Gather", "w", "x"),
        {"w": normal(50, 32)},
        {"x": ROWS},
    ),
    "a bias that is an input": (
        "int8-dynamic",
        one("Conv", "x", "w", "x_bias"),
        {"w": normal(16, 3, 3, 3)},
        {"x": normal(2, 3, 9, 9), "x_bias": normal(16)},
    ),
    "a bias of one number": (
        "int8-static",
        one("Gemm", "x", "w", "b"),
        {"w": normal(64, 64), "b": normal(1)[0]},
        DATA[0],
    ),
    "a bias for each row": (
        "int8-dynamic",
        one("Gemm", "x", "w", "b"),
        {"w": normal(64, 64), "b": normal(4, 1)},
        DATA[0],
    ),
    "a bias for each row with ranges": (
        "int8-static",
        one("Gemm", "x", "w", "b"),
        {"w": normal(64, 64), "b": normal(4, 1)},
        DATA[0],
    ),
    "a bias for each element with ranges": (
        "int8-static",
        one("Gemm", "x", "w", "b"),
        {"w": normal(64, 64), "b": normal(4, 64)},
        DATA[0],
    ),
    "a weight that is both factors": (
        "int4:algorithm=k_quant",
        [
            helper.make_node("MatMul", ["w", "w"], ["square"], "/square/MatMul"),
            helper.make_node("MatMul", ["x", "square"], ["y"], "/layer/MatMul"),
        ],
        {"w": normal(64, 64)},
        DATA[0],
    ),
    "a bias that is beyond the range of int32": (
        "int8-static",
        one("Gemm", "x", "w", "b"),
        {"w": normal(64, 64) * np.where(np.arange(64) == 5, np.float32(1e-9), np.float32(1)), "b": normal(64)},
        DATA[0],
    ),
    "weights of one size and both signs": (
        "int4:block=16,symmetric=true",
        one("MatMul", "x", "w"),
        {"w": np.sign(normal(64, 64)) * (np.abs(normal(64, 64)) > 0.7)},
        DATA[0],
    ),
    "a head with the weight of a table": ("int8-dynamic", TIED, {"w": normal(50, 32)}, {"x": ROWS}),
    "a head and a table of less columns than a block": (
        "int4:block=128,embeddings=true",
        TIED,
        {"w": normal(50, 32)},
        {"x": ROWS},
    ),
    "a product of two weights": (
        "int8-dynamic",
        [*one("MatMul", "a", "b"), helper.make_node("Add", ["x", "y"], ["y_sum"], "/Add")],
        {"a": normal(4, 4), "b": normal(4, 64)},
        DATA[0],
    ),
    "data that are always zero": (
        "int8-static:reduce_range=true",
        one("Gemm", "x", "w", "b"),
        {"w": normal(64, 64), "b": normal(64)},
        {"x": np.zeros((4, 64), np.float32)},
    ),
    "a value elsewhere that is not a number": (
        "int8-static",
        [
            helper.make_node("Log", ["x"], ["y"], "/log/Log"),
            helper.make_node("MatMul", ["x", "w"], ["y_product"], "/layer/MatMul"),
        ],
        {"w": normal(64, 64)},
        DATA[0],
    ),
    "an LSTM": ("int8-dynamic", LSTM, OF_LSTM, {"x": normal(3, 2, 16)}),
    "an attention with one scale": ("int8-dynamic:per_channel=false", ATTENTION, OF_ATTENTION, {"x": normal(2, 4, 64)}),
    "a normalization with ranges": ("int8-static:operators=all", NORM, OF_NORM, DATA[0]),
    "a mask of infinities": (
        "int8-static:operators=all",
        [
            helper.make_node("MatMul", ["x", "w"], ["made"], "/layer/MatMul"),
            helper.make_node("Add", ["made", "mask"], ["masked"], "/mask/Add"),
            helper.make_node("Softmax", ["masked"], ["y"], "/softmax/Softmax"),
        ],
        {"w": normal(64, 64) / 8, "mask": np.where(np.arange(64) > 50, -np.inf, 0)},
        DATA[0],
    ),
    "a clip to numbers without the zero": (
        "int8-static:operators=all",
        [
            helper.make_node("MatMul", ["x", "w"], ["made"], "/layer/MatMul"),
            helper.make_node("Clip", ["made", "low"], ["y"], "/clip/Clip"),
        ],
        {"w": normal(64, 64), "low": np.float32(5)},
        DATA[0],
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_written(case: str, tmp_path: Path) -> None:
    to, nodes, weights, feeds = RIGHT[case]
    dtype = helper.np_dtype_to_tensor_dtype(feeds["x"].dtype)
    file = adopted(tmp_path, nodes, dtype, **weights)
    assert modelexport.quantize(file, tmp_path / "q.onnx", to=to, data=[feeds]).methods
    right, found = (open_session(path).run(None, feeds)[-1] for path in (file, tmp_path / "q.onnx"))
    is_near = np.linalg.norm(found - right) < (0.2 if to.startswith("int4") else 0.05) * np.linalg.norm(right)
    assert (found.shape, is_near) == (right.shape, True)


NOT_FINITE = (
    "a weight of /layer/MatMul has no numbers, or some are not finite or beyond half of the range of their type"
)
ODD = "a weight of /layer/MatMul has an odd number of blocks, 3, which k_quant cannot write (algorithm=rtn can)"
BFLOAT16 = "a weight of /layer/MatMul is in bfloat16, which the library cannot read for {} (algorithm=rtn can)"
LEFT: dict[str, tuple[str, np.ndarray, str]] = {
    "infinities": ("int8-dynamic", np.full((64, 64), np.inf), NOT_FINITE),
    "no numbers": ("int8-dynamic", np.full((64, 64), np.nan), NOT_FINITE),
    "the largest numbers": ("int4", np.full((64, 64), 3e38), NOT_FINITE),
    "an empty axis": ("int8-dynamic", np.zeros((64, 0)), NOT_FINITE),
    "an odd number of blocks": ("int4:algorithm=k_quant", normal(70, 32), ODD),
    "bfloat16 and k_quant": (
        "int8-weights:algorithm=k_quant",
        normal(64, 32).astype(bfloat16),
        BFLOAT16.format("k_quant"),
    ),
    "bfloat16 and hqq": ("int4:algorithm=hqq", normal(64, 32).astype(bfloat16), BFLOAT16.format("hqq")),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_a_library_cannot_store_stays_as_it_is(case: str, tmp_path: Path) -> None:
    method, weight, why = LEFT[case]
    dtype = TensorProto.BFLOAT16 if weight.dtype == bfloat16 else TensorProto.FLOAT
    nodes = [
        helper.make_node("Cast", ["x"], ["data"], "/Cast", to=dtype),
        helper.make_node("MatMul", ["data", "w"], ["product"], "/layer/MatMul"),
        helper.make_node("Cast", ["product"], ["y"], "/Cast_1", to=TensorProto.FLOAT),
    ]
    file = adopted(tmp_path, nodes, w=weight)
    written = modelexport.quantize(file, tmp_path / "q.onnx", to=method)
    assert (written.methods, written.joined) == ({}, [f"layer: {why}: it stays as it is"])


TABLE = "table: a weight of /table/Gather is a table that no product has in whole blocks"


@pytest.mark.parametrize(
    ("to", "head", "columns"),
    [
        ("int4:algorithm=k_quant,embeddings=true", "v", 64),
        ("int4:algorithm=k_quant,embeddings=true", "w", 48),
        ("int8-weights:embeddings=true", "v", 64),
    ],
)
def test_a_table_of_which_no_product_has_the_codes_stays_as_it_is(
    to: str, head: str, columns: int, tmp_path: Path
) -> None:
    """It is tied to no product, or has incomplete blocks."""
    nodes = [TIED[0], helper.make_node("Gemm", ["rows", head], ["y"], "/head/Gemm", transB=1)]
    file = adopted(tmp_path, nodes, TensorProto.INT64, w=normal(50, columns), v=normal(50, columns))
    written = modelexport.quantize(file, tmp_path / "q.onnx", to=to)
    why = "which only int4:algorithm=rtn can write, from opset 21 (the file has 21)"
    assert written.joined == [f"{TABLE}, {why}: it stays as it is"]


ELSEWHERE: dict[str, tuple[str, list[onnx.NodeProto], dict[str, np.ndarray], tuple[int, ...], str, Change]] = {
    "a scale of an LSTM": ("int8-dynamic", LSTM, OF_LSTM, (3, 2, 16), "w_scale", first(1.1)),
    "a scale of its states": ("int8-dynamic", LSTM, OF_LSTM, (3, 2, 16), "r_scale", first(1.1)),
    "a scale of an attention": ("int8-dynamic", ATTENTION, OF_ATTENTION, (2, 4, 64), "w_scale", first(1.1)),
    "the bias of an attention": ("int8-dynamic", ATTENTION, OF_ATTENTION, (2, 4, 64), "b", first(1.1)),
    "a normalization": ("int8-static", NORM, OF_NORM, (4, 64), "g", first(1.1)),
    "a scale of a normalization": ("int8-static:operators=all", NORM, OF_NORM, (4, 64), "g_scale", lambda g: g * 1.1),
}


@pytest.mark.parametrize("fault", ELSEWHERE)
def test_numbers_whose_fault_few_results_show_are_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, nodes, weights, shape, ending, change = ELSEWHERE[fault]
    file, data = adopted(tmp_path, nodes, **weights), [{"x": normal(*shape)}]
    spoil(monkeypatch, ending, change)
    with pytest.raises(CheckError, match=r"^layer: .* has other numbers than the floating-point model; nothing was"):
        modelexport.quantize(file, tmp_path / "q.onnx", to=to, data=data)


@pytest.mark.filterwarnings("error")
def test_results_beyond_the_range_of_float32_are_refused_in_words(tmp_path: Path) -> None:
    file = adopted(tmp_path, ATTENTION, w=np.full((64, 192), 1e38), b=normal(192))
    with pytest.raises(CheckError, match=r"^layer: .* \(weights or data are so large that results are not finite\);"):
        modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic")


@pytest.fixture(params=["infinities", "an odd number of blocks"])
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """A file with a product before one whose weight a method cannot store, the method, and the line about that."""
    method, weight, why = LEFT[request.param]
    nodes = [helper.make_node("MatMul", ["x", "v"], ["y_first"], "/first/MatMul"), *one("MatMul", "y_first", "w")]
    return adopted(tmp_path, nodes, v=normal(64, len(weight)), w=weight), method, f"layer: {why}: it stays as it is"


def test_sensitivity_says_what_a_library_cannot_store(behind: tuple[Path, str, str]) -> None:
    file, method, line = behind
    report = sensitivity(file, to=method, data=DATA, output_name="y_first")
    assert ([unit.calls for unit in report.units], report.table.notes[1]) == ([("first",)], line)


def test_a_search_says_what_a_library_cannot_store(behind: tuple[Path, str, str]) -> None:
    file, method, line = behind
    made = search(file, to=[method], data=DATA * 2, within="error<=1", output_name="y_first").made
    assert (made.outcome.methods, made.outcome.joined) == ({method: 1}, [line])


def test_sensitivity_says_why_it_has_no_module(tmp_path: Path) -> None:
    file = adopted(tmp_path, one("MatMul", "x", "w"), w=np.full((64, 64), np.inf))
    with pytest.raises(UsageError, match=f"has no module that int8-dynamic can quantize: layer: {NOT_FINITE}"):
        sensitivity(file, to="int8-dynamic", data=DATA)


def test_a_product_with_a_name_that_the_library_gives_is_refused_in_words(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["w_Q4"], "/layer/MatMul"), *one("MatMul", "w_Q4", "v")]
    file = adopted(tmp_path, nodes, w=normal(64, 64), v=normal(64, 64))
    with pytest.raises(UsageError, match=r"^layer: ONNX Runtime cannot quantize it to int4: keep .*: Graph contains a"):
        modelexport.quantize(file, tmp_path / "q.onnx", to="int4")


def test_a_library_that_fails_is_told_with_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: object) -> None:
        raise ValueError("scale issue")

    monkeypatch.setattr(methods, "model_written_by", fails)
    with pytest.raises(UsageError, match=r"^dense: .* int8-dynamic: keep the module with --keep NAME, .*: scale issue"):
        modelexport.quantize(gemm(tmp_path), tmp_path / "q.onnx", to="int8-dynamic")


class Split(nn.Module):
    """Returns a product after a ReLU, and what another module makes of the product itself."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.relu, self.kept = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Tanh()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.product(x)
        return self.relu(made), self.kept(made)


def test_a_value_before_a_relu_keeps_its_negative_numbers_for_a_module_that_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    modelexport.export(Split(), (x,), tmp_path / "x.onnx")
    modelexport.quantize(
        tmp_path / "x.onnx", tmp_path / "q.onnx", to="int8-static:operators=all", keep=["kept"], data=[{"x": x.numpy()}]
    )
    _, right = open_session(tmp_path / "x.onnx").run(None, {"x": x.numpy()})
    _, found = open_session(tmp_path / "q.onnx").run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, right, atol=0.1)


def test_a_bias_of_weights_that_are_all_zero_may_be_off_by_a_step_of_the_result(tmp_path: Path) -> None:
    product, x = nn.Linear(32, 8), torch.randn(4, 32)
    nn.init.zeros_(product.weight[:3])
    nn.init.constant_(product.bias, 0.1)
    model = nn.Sequential(product, nn.ReLU(), nn.Linear(8, 2))
    path = modelexport.export(model, x, tmp_path / "x.onnx", check=False).path
    data = [{"input": x.numpy()}]
    assert modelexport.quantize(path, tmp_path / "q.onnx", to="int8-static", data=data).methods
