"""Integer products that saturate on processors without VNNI: found from weights, avoided, and never taken for right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import modelexport
from commands import run
from modelexport.errors import UsageError
from modelexport.graph.nodes import nodes_of
from modelexport.runtime.saturating_products import make_unsigned, saturates_here, saturating, saturating_modules
from modelexport.tools.quantize.search_within_bound import search
from modelexport.traces.file_run import FileRun

pytestmark = pytest.mark.int8

ROWS, SIZE, COLUMNS = 3, 16, 8
ONE, BIG = np.float32(1), np.float32(4000)
DQ = [
    helper.make_node("QuantizeLinear", ["x", "one", "z"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "one", "z"], ["d"]),
    helper.make_node("DequantizeLinear", ["w", "one", "zw"], ["e"]),
]
Q = [
    helper.make_node("QuantizeLinear", ["p", "big", "middle"], ["r"]),
    helper.make_node("DequantizeLinear", ["r", "big", "middle"], ["y"]),
]


def node(op_type: str, *inputs: str, output: str = "y", domain: str = "com.microsoft", **more: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [output], domain=domain, **more)


QUANTIZED = [helper.make_node("QuantizeLinear", ["x", "one", "z"], ["q"])]
LSTM = ("x", "w", "w2", "b", "", "", "", "", "small", "zw1", "small", "zw1")
FORMS: dict[str, list[onnx.NodeProto]] = {
    "MatMulInteger": [*QUANTIZED, node("MatMulInteger", "q", "w", "z", "zw", domain="")],
    "MatMulInteger, no zero point": [*QUANTIZED, node("MatMulInteger", "q", "w", domain="")],
    "MatMulIntegerToFloat": [*QUANTIZED, node("MatMulIntegerToFloat", "q", "w", "one", "one", "z", "zw")],
    "DynamicQuantizeMatMul": [node("DynamicQuantizeMatMul", "x", "w", "one", "zw")],
    "QLinearMatMul": [
        *QUANTIZED,
        node("QLinearMatMul", "q", "one", "z", "w", "one", "zw", "big", "middle", domain=""),
    ],
    "QGemm": [*QUANTIZED, node("QGemm", "q", "one", "z", "w", "one", "zw", "", "big", "middle")],
    "QGemm, transposed": [*QUANTIZED, node("QGemm", "q", "one", "z", "wT", "one", "zw", "", "big", "middle", transB=1)],
    "DynamicQuantizeLSTM": [
        helper.make_node("Reshape", ["x", "sequence"], ["s"]),
        node("DynamicQuantizeLSTM", "s", *LSTM[1:], hidden_size=2),
    ],
    "QLinearConv": [
        helper.make_node("Reshape", ["x", "image"], ["i"]),
        helper.make_node("QuantizeLinear", ["i", "one", "z"], ["q"]),
        node("QLinearConv", "q", "one", "z", "kernel", "one", "zw", "big", "middle", domain=""),
    ],
    "QDQ MatMul": [*DQ, node("MatMul", "d", "e", domain="")],
    "QDQ MatMul, quantized again": [*DQ, node("MatMul", "d", "e", domain="", output="p"), *Q],
    "QDQ MatMul, transposed": [
        *DQ[:2],
        helper.make_node("DequantizeLinear", ["wT", "one", "zw"], ["t"]),
        helper.make_node("Transpose", ["t"], ["e"]),
        node("MatMul", "d", "e", domain=""),
    ],
    "QDQ MatMul, scales of two shapes": [
        *DQ[:2],
        helper.make_node("Expand", ["one", "columns"], ["s"]),
        *(helper.make_node("DequantizeLinear", ["w", scale], [f"w_{scale}"], axis=1) for scale in ("s", "one")),
        *(helper.make_node("MatMul", ["d", f"w_{scale}"], [f"y_{scale}"]) for scale in ("s", "one")),
        helper.make_node("Add", ["y_s", "y_one"], ["y"]),
    ],
    "QDQ Gemm": [*DQ, node("Gemm", "d", "e", domain="")],
    "QDQ Conv": [
        helper.make_node("Reshape", ["x", "image"], ["i"]),
        helper.make_node("QuantizeLinear", ["i", "one", "z"], ["q"]),
        DQ[1],
        helper.make_node("DequantizeLinear", ["kernel", "one", "zw"], ["e"]),
        node("Conv", "d", "e", domain="", output="p"),
        *Q,
    ],
}
RIGHT_EVERYWHERE: dict[str, list[onnx.NodeProto]] = {
    "ConvInteger": [
        helper.make_node("Reshape", ["x", "image"], ["i"]),
        helper.make_node("QuantizeLinear", ["i", "one", "z"], ["q"]),
        node("ConvInteger", "q", "kernel", "z", "zw", domain=""),
    ],
    "weights first": [
        *QUANTIZED,
        helper.make_node("Transpose", ["q"], ["t"]),
        node("MatMulInteger", "wT", "t", "zw", "z", domain=""),
    ],
    "QDQ Conv, not quantized again": [*FORMS["QDQ Conv"][:4], node("Conv", "d", "e", domain="")],
    "weights alone": [DQ[2], node("MatMul", "x", "e", domain="")],
}


def model_with(nodes: list[onnx.NodeProto], weight: np.ndarray) -> onnx.ModelProto:
    """A model that multiplies ``x`` with a weight."""
    arrays = {
        "w": weight, "wT": weight.T, "w2": np.zeros((1, 2, COLUMNS), weight.dtype),
        "kernel": weight.T[:, :, None, None],
        "one": ONE, "big": BIG, "small": np.array([1e-5], np.float32), "b": np.zeros((1, 2 * COLUMNS), np.float32),
        "z": np.uint8(0), "middle": np.uint8(128), "zw": weight.dtype.type(0), "zw1": np.zeros(1, weight.dtype),
        "columns": np.array([COLUMNS]), "image": np.array([1, SIZE, 1, ROWS]), "sequence": np.array([1, ROWS, SIZE]),
    }  # fmt: skip
    if any(each.op_type == "DynamicQuantizeLSTM" for each in nodes):
        arrays["w"] = weight[None]
    used = {name for each in nodes for name in each.input}
    tensors = [
        numpy_helper.from_array(np.array(array, order="C"), name) for name, array in arrays.items() if name in used
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, SIZE])],
        [onnx.ValueInfoProto(name="y")],
        tensors,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def pair(first: int, second: int, place: int = 0) -> np.ndarray:
    """A weight with one pair of neighbours that are not zero."""
    weight = np.zeros((SIZE, COLUMNS), np.int8)
    weight[place], weight[place + 1] = first, second
    return weight


def computed(model: onnx.ModelProto) -> Any:
    """What this processor computes from the largest activations, and the smallest."""
    x = np.full((ROWS, SIZE), 255, np.float32)
    x[0, :2] = 0  # dynamic ranges reach from 0 to 255
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


def exact(model: onnx.ModelProto) -> Any:
    """The same with weights that no processor saturates."""
    changed = ir.serde.deserialize_model(model)
    make_unsigned(changed)
    assert not saturating(nodes_of(changed.graph))
    return computed(ir.serde.serialize_model(changed))


def said(model: onnx.ModelProto) -> bool:
    return bool(saturating(nodes_of(ir.serde.deserialize_model(model).graph)))


@pytest.mark.parametrize("form", FORMS)
def test_products_that_saturate_are_found_from_the_weights(form: str) -> None:
    for weight in (pair(127, 127), pair(-128, -128), pair(100, 100, place=2)):
        model = model_with(FORMS[form], weight)
        assert said(model)
        assert (not np.array_equal(computed(model), exact(model))) == saturates_here()


@pytest.mark.parametrize("form", {**FORMS, **RIGHT_EVERYWHERE})
def test_products_that_are_not_found_are_right(form: str) -> None:
    nodes = {**FORMS, **RIGHT_EVERYWHERE}[form]
    harmless = [pair(64, 64), pair(-64, -64), pair(127, -128), pair(127, 127, place=1)]
    for weight in harmless if form in FORMS else [*harmless, pair(127, 127)]:
        model = model_with(nodes, weight)
        assert not said(model)
        unsigned = model_with(nodes, weight)
        assert np.array_equal(computed(model), exact(unsigned))


@pytest.mark.parametrize(("first", "second", "saturates"), [(64, 64, False), (64, 65, True), (-64, -65, True)])
def test_the_bound_is_exact(first: int, second: int, saturates: bool) -> None:
    model = model_with(FORMS["MatMulInteger"], pair(first, second))
    assert said(model) == saturates
    assert computed(model).flat[-1] == 255 * (first + second) or (saturates and saturates_here())


@pytest.mark.parametrize("form", ["MatMulInteger", "MatMulInteger, no zero point", "QLinearMatMul", "QLinearConv"])
def test_what_is_right_is_computed_with_exact_integers(form: str) -> None:
    model = model_with(FORMS[form], pair(127, 127))
    x = np.full((ROWS, SIZE), 255, np.float32)
    right = FileRun(ir.serde.deserialize_model(model), in_float64_for="float32").run({"x": x})["y"]
    scale = 1 if "Integer" in form else 4000
    assert set(np.unique(right)) == {round(2 * 127 * 255 / scale) + (128 if scale > 1 else 0)}


BEFORE_PRODUCT = {
    "Concat": "Concat<axis=1>(d, d)", "Dropout": "Dropout(d)", "Expand": "Expand(d, twice)",
    "Flatten": "Flatten<axis=3>(d)", "Gather": "Gather<axis=1>(d, first)", "Identity": "Identity(d)",
    "MaxPool": "MaxPool<kernel_shape=[1, 1]>(d)", "Relu": "Relu(d)", "Reshape": "Reshape(d, shape)",
    "ReverseSequence": "ReverseSequence<batch_axis=0, time_axis=1>(d, first)", "Slice": "Slice(d, first, last, last)",
    "Squeeze": "Squeeze(d, first)", "Tile": "Tile(d, twice)", "Transpose": "Transpose<perm=[0, 1, 3, 2]>(d)",
    "Unsqueeze": "Unsqueeze(d, first)",
}  # fmt: skip


@pytest.mark.parametrize("operator", BEFORE_PRODUCT)
def test_a_product_is_found_behind_each_operator_with_which_onnxruntime_fuses_it(operator: str, tmp_path: Path) -> None:
    constants = """float one = {1}, uint8 z = {0}, int8 zw = {0}, int64[1] first = {0}, int64[1] last = {1},
        int64[4] twice = {2, 1, 1, 1}, int64[2] shape = {32, 16}"""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        example (float[1, 2, 16, 16] x) => (float[] y) <{constants}> {{
            q = QuantizeLinear(x, one, z)  d = DequantizeLinear(q, one, z)  before = {BEFORE_PRODUCT[operator]}
            e = DequantizeLinear(w, one, zw)  y = MatMul(before, e)
        }}""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.append(numpy_helper.from_array(pair(127, 127), "w"))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert said(model) is ("MatMulIntegerToFloat" in optimized)


def test_a_convolution_by_channel_does_not_saturate() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "z"], ["q"]),
        node("QLinearConv", "q", "one", "z", "k", "one", "zw", "big", "middle", domain="", group=4),
    ]
    arrays = {"one": ONE, "z": np.uint8(0), "zw": np.int8(0), "big": BIG, "middle": np.uint8(128)}
    for multiple in (1, 2):
        arrays["k"] = np.full((4 * multiple, 1, 3, 3), 127, np.int8)
        graph = helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 5, 5])],
            [onnx.ValueInfoProto(name="y")],
            [numpy_helper.from_array(np.array(array), name) for name, array in arrays.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        feeds = {"x": np.full((1, 4, 5, 5), 255, np.float32)}
        found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
        wrong = bool((found != round(9 * 127 * 255 / 4000) + 128).any())
        assert said(model) == (multiple == 2)
        assert wrong == (multiple == 2 and saturates_here())


class Net(torch.nn.Module):
    """Two linear layers with weights over their whole range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.2, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, and what `quantize` made of it with int8 weights."""
    folder = tmp_path_factory.mktemp("saturating")
    torch.manual_seed(0)
    modelexport.export(Net().eval(), (torch.randn(4, 64),), folder / "m.onnx", check=False)
    modelexport.quantize(folder / "m.onnx", folder / "q.onnx", to="int8-dynamic:weights=int8")
    np.savez(folder / "x.npz", x=np.random.default_rng(0).standard_normal((8, 4, 64)).astype(np.float32))
    return folder


def test_the_modules_that_saturate_are_named_with_what_avoids_it(folder: Path) -> None:
    file = folder / "q.onnx"
    share = f"{100 * max(saturating_modules(modelexport.load(file).nodes).values()):.3g}"
    line = (
        f"{file}: on x86-64 processors without VNNI the int8 products of these 2 modules saturate (up to {share} % of "
        f"their pairs of weights): first, second; `modelexport quantize {file} -o OUT.onnx --to uint8` avoids it"
    )
    words = ["--to", "int8-dynamic:weights=int8", "-o", file]
    for arguments in (
        ["quantize", folder / "m.onnx", *words],
        ["verify", folder / "m.onnx", "--against", file],
        ["verify", file, "--device", "cpu", "--fresh"],
        ["compare", folder / "m.onnx", file],
    ):
        assert line in [each.strip() for each in run(*arguments).stdout.splitlines()]


def test_what_is_written_by_default_is_named_by_no_line(folder: Path, tmp_path: Path) -> None:
    result = modelexport.quantize(folder / "m.onnx", tmp_path / "d.onnx", to="int8-dynamic")
    assert not result.saturating
    assert "VNNI" not in run("compare", folder / "m.onnx", tmp_path / "d.onnx").stdout


def test_a_file_of_others_is_stored_as_uint8(folder: Path, tmp_path: Path) -> None:
    result = modelexport.quantize(folder / "q.onnx", tmp_path / "u.onnx", to="uint8")
    assert not result.saturating
    assert result.bytes_after == result.bytes_before
    report = modelexport.verify_against(folder / "m.onnx", tmp_path / "u.onnx")
    assert report.outputs[0].norm < 0.02
    with pytest.raises(UsageError, match=r"'uint8' .* changes nothing in"):
        modelexport.quantize(tmp_path / "u.onnx", tmp_path / "again.onnx", to="uint8")


def test_the_loss_of_a_file_is_the_worse_of_this_processor_and_exact_integers(folder: Path) -> None:
    report = modelexport.verify_against(folder / "m.onnx", folder / "q.onnx")
    assert (report.outputs[0].norm > 0.05) == saturates_here()
    assert report.notes[1].endswith(" with exact integers")


def saturates_in_another_process() -> bool:
    """Whether products saturate where a device runs: the processes that an emulated one starts are not emulated."""
    code = "from modelexport.runtime.saturating_products import saturates_here; print(saturates_here())"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"True\n"


@pytest.mark.slow
def test_a_device_that_saturates_is_wrong_in_its_modules(folder: Path, tmp_path: Path) -> None:
    report = modelexport.verify_on_device(folder / "q.onnx", device="cpu", keep=False)
    saturates = saturates_in_another_process()
    assert report.agrees != saturates
    if saturates:
        fixed = modelexport.verify_on_device(folder / "q.onnx", device="cpu", keep=False, fix=tmp_path / "fixed.onnx")
        assert fixed.agrees
        assert {step.change for step in fixed.fix.steps} == {"uint8"}


def test_a_bound_holds_for_this_processor_and_for_exact_integers(folder: Path) -> None:
    figures = [
        search(
            folder / "m.onnx", to=[f"int8-dynamic:weights={kind}"], data=folder / "x.npz", within="error<=1"
        ).found.judged
        for kind in ("uint8", "int8")
    ]
    assert figures[0] < 0.02
    assert (figures[1] > 0.05) == saturates_here()
