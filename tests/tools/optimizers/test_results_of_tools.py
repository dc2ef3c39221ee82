"""``optimize`` compares what a tool wrote with the file that the tool read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import commands
from graph_texts import written
from modelexport.errors import NotWrittenError
from modelexport.runtime.sessions import open_session
from modelexport.tools.optimizers.optimize_tools import TOOLS, optimize_file
from modelexport.traces.outputs_of_two_files import Rounding, compare_sessions

CHANGED_BY_THE_VERSION_CONVERTER = {
    "Hardmax of several axes": (11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax<axis=1>(x) }"),
    "linear Resize": (
        10,
        "g (float[1,1,4,4] x) => (float[1,1,6,6] y) <float[4] s = {1.0,1.0,1.5,1.5}> "
        '{ y = Resize<mode="linear">(x, s) }',
    ),
    "linear Upsample": (
        9,
        "g (float[1,1,4,4] x) => (float[1,1,6,6] y) <float[4] s = {1.0,1.0,1.5,1.5}> "
        '{ y = Upsample<mode="linear">(x, s) }',
    ),
}
KEPT_BY_IT = {
    "Softmax of several axes": (11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis=1>(x) }"),
    "Resize with a mode of coordinates": (
        11,
        "g (float[1,1,4,4] x) => (float[1,1,6,6] y) <float[0] r = {}, float[4] s = {1.0,1.0,1.5,1.5}> "
        '{ y = Resize<mode="cubic", coordinate_transformation_mode="pytorch_half_pixel">(x, r, s) }',
    ),
    "Dropout": (9, "g (float[4,4] x) => (float[4,4] y) { y = Dropout<ratio=0.5>(x) }"),
    "integers": (13, "g (int64[2,4] x) => (int64[2,4] y) <int64[1] k = {3}> { y = Mul(x, k) }"),
    "numbers that are not all finite": (13, "g (float[2,4] x) => (float[2,4] y) { y = Log(x) }"),
    "float16 inside": (
        13,
        "g (float[2,64] x) => (float[2,64] y) { a = Cast<to=10>(x) b = Exp(a) c = Mul(b, a) y = Cast<to=1>(c) }",
    ),
}


@pytest.mark.parametrize("case", CHANGED_BY_THE_VERSION_CONVERTER)
def test_a_result_that_computes_something_else_is_not_written(case: str, tmp_path: Path) -> None:
    opset, text = CHANGED_BY_THE_VERSION_CONVERTER[case]
    file = written(tmp_path / "a.onnx", text, opset)
    with pytest.raises(NotWrittenError, match=r"version-converter changes what .* computes \(y: "):
        optimize_file(file, "version-converter", tmp_path / "out.onnx")


@pytest.mark.parametrize("case", KEPT_BY_IT)
def test_a_result_that_computes_the_same_is_written_with_the_difference(case: str, tmp_path: Path) -> None:
    opset, text = KEPT_BY_IT[case]
    file = written(tmp_path / "a.onnx", text, opset)
    report = optimize_file(file, "version-converter", tmp_path / "out.onnx")
    assert [(output.name, output.status) for output in report.outputs or ()] == [("y", "agree")]


def test_a_refused_result_leaves_nothing(tmp_path: Path) -> None:
    opset, text = CHANGED_BY_THE_VERSION_CONVERTER["linear Resize"]
    file = written(tmp_path / "a.onnx", text, opset)
    done = commands.run("optimize", file, "--with", "version-converter", "-o", tmp_path / "out.onnx")
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (4, ["a.onnx"])


def test_what_the_optimizer_of_onnx_runtime_breaks_is_named_as_the_runtimes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {
        "scale": np.array(0.05, np.float32),
        "w": random.standard_normal((8, 8), dtype=np.float32),
    }
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("DequantizeLinear", ["t", "scale"], ["d"]),
        helper.make_node("Transpose", ["d"], ["u"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["u", "w"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, dtype, ["b", 4, 8])
        for name, dtype in (("x", onnx.TensorProto.INT8), ("y", onnx.TensorProto.FLOAT))
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), tmp_path / "a.onnx")
    with pytest.raises(NotWrittenError, match="ONNX Runtime's optimizer does the same when it opens that file"):
        optimize_file(tmp_path / "a.onnx", "ort-basic", tmp_path / "out.onnx")


def test_a_choice_that_rounding_decides_is_not_a_difference(tmp_path: Path) -> None:
    """Sixty-four scores are one number or the next; a tool that computes them with another rounding chooses others."""
    rounded = f"float[1,64] a = {{{','.join(str(3e-7 * (i % 3)) for i in range(64))}}}"
    choice = "y = TopK<axis=1>"
    files = {
        "a": f"g (float[1,64] x) => (float[1,9] v, int64[1,9] y) <int64[1] k = {{9}}> {{ v, {choice}(x, k) }}",
        "b": f"g (float[1,64] x) => (float[1,9] v, int64[1,9] y) <int64[1] k = {{9}}, {rounded}> "
        f"{{ b = Add(x, a) v, {choice}(b, k) }}",
    }
    first, second = (open_session(written(tmp_path / f"{name}.onnx", text)) for name, text in files.items())
    scores = np.where(np.arange(64) % 2, np.float32(1), np.nextafter(np.float32(1), np.float32(2)))[None]
    runs = [("scores", {"x": scores})]
    statuses = [
        {output.name: output.status for output in compare_sessions(first, second, runs, rounding)[0]}["y"]
        for rounding in (None, Rounding("float32"))
    ]
    assert statuses == ["differ", "not compared"]


def test_quantization_is_told_and_not_refused(tmp_path: Path) -> None:
    weight = ",".join(str((i * 37 % 101) / 101 - 0.5) for i in range(512))
    text = f"g (float[n,64] x) => (float[n,8] y) <float[64,8] w = {{{weight}}}> {{ y = MatMul(x, w) }}"
    done = commands.run(
        "optimize", written(tmp_path / "a.onnx", text), "--with", "quantize-4bit", "-o", tmp_path / "out.onnx"
    )
    assert "outputs compared with 4 inputs: y is off by" in done.stdout


@pytest.mark.parametrize("tool", ["quantize-dynamic", "quantize-4bit", "float16"])
def test_only_tools_that_make_numbers_narrower_may_change_outputs(tool: str) -> None:
    assert TOOLS[tool].computes_in != ""
