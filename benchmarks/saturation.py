"""What quantized operators are off by, with exact integers and on this processor, and how long they take.

    OMP_NUM_THREADS=1 python benchmarks/saturation.py              half a minute
    qemu-x86_64 -cpu Haswell python benchmarks/saturation.py       errors without VNNI, on any x86-64 machine; no times

One operator in a file of its own, with uniform weights as PyTorch draws them (*normal*: with normal ones), quantized by
`modelexport quantize`. *exact* is the error against float32 with exact integers, which a processor with VNNI computes;
*here* what this processor computes. *time* is the processor time of a run divided by that of float32, *int8* divided by
that of the same method with int8 weights (`weights=int8`), which was the default before; the least of runs in turns.

*int8 activations* are in the form of operators (`QLinearMatMul`, `QLinearConv`), which `quantize` does not write: their
int8 weights do not saturate, and have no fast kernels.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import modelexport
from modelexport.files.onnx_models import load_onnx
from modelexport.runtime.saturating_products import saturates_here, unsigned_copy
from modelexport.runtime.sessions import open_session
from outcomes import least_seconds

SIZE = 512
TURNS = 15
RANDOM = np.random.default_rng(0)
INT8 = ("", "reduce_range=true", "weights=int8")
METHODS = {"int8-dynamic": INT8, "int8-static": INT8, "int8-weights": ("",), "int4": ("", "accuracy_level=0")}


def drawn(*shape: int, inputs: int, normal: bool = False) -> Any:
    array = RANDOM.standard_normal(shape) / 3 if normal else RANDOM.uniform(-1, 1, shape)
    return (array / np.sqrt(inputs)).astype(np.float32)


def cases() -> Iterator[tuple[str, onnx.NodeProto, dict[str, Any], Any]]:
    """Operators with their weights and an input."""
    n, half = SIZE, SIZE // 2
    rows, image = RANDOM.standard_normal((64, n)), RANDOM.standard_normal((1, 64, 28, 28))
    weight, bias = drawn(n, n, inputs=n), drawn(n, inputs=n)
    yield "MatMul", helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": weight}, rows
    normal = {"w": drawn(n, n, inputs=n, normal=True)}
    yield "MatMul, normal", helper.make_node("MatMul", ["x", "w"], ["y"]), normal, rows
    yield "Gemm", helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1), {"w": weight, "b": bias}, rows
    for name, groups in (("Conv", 1), ("Conv, 4 groups", 4), ("Conv, by channel", 64)):
        kernel = drawn(64, 64 // groups, 3, 3, inputs=9 * 64 // groups)
        node = helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[1] * 4, group=groups)
        yield name, node, {"w": kernel, "b": drawn(64, inputs=576)}, image
    gates = {key: drawn(1, 4 * half, half, inputs=half) for key in "wr"} | {"b": drawn(1, 8 * half, inputs=half)}
    lstm = helper.make_node("LSTM", ["x", *gates], ["y"], hidden_size=half)
    yield "LSTM", lstm, gates, RANDOM.standard_normal((20, 4, half))
    joined = {"w": drawn(n, 3 * n, inputs=n), "b": drawn(3 * n, inputs=n)}
    attention = helper.make_node("Attention", ["x", "w", "b"], ["y"], domain="com.microsoft", num_heads=4)
    yield "Attention", attention, joined, RANDOM.standard_normal((2, 32, n))
    yield "Gather", helper.make_node("Gather", ["w", "x"], ["y"]), {"w": drawn(1000, n, inputs=n)}, np.arange(64)


def written(path: Path, node: onnx.NodeProto, weights: Mapping[str, Any], x: Any) -> None:
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    kind = TensorProto.FLOAT if x.dtype == np.float32 else TensorProto.INT64
    source = helper.make_tensor_value_info("x", kind, x.shape)
    graph = helper.make_graph([node], "graph", [source], [helper.make_tensor_value_info("y", 1, None)], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def with_int8_activations(file: Path, output: Path, feeds: dict[str, Any]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Once(CalibrationDataReader):
        left = [feeds]  # noqa: RUF012

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    how = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(onnx.load(file), output, Once(), quant_format=QuantFormat.QOperator, **how)


def seconds(files: Mapping[str, Path], feeds: Any) -> dict[str, float]:
    """The least processor time of a run of each file, in turns."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    sessions = {name: onnxruntime.InferenceSession(file, options) for name, file in files.items()}
    works = [partial(session.run, None, feeds) for session in sessions.values()]
    return dict(zip(sessions, least_seconds(*works, runs=TURNS), strict=True))


def rows(folder: Path) -> Iterator[str]:
    for name, node, weights, array in cases():
        x = array if array.dtype == np.int64 else array.astype(np.float32)
        files, feeds = {"float32": folder / "float.onnx"}, {"x": x}
        written(files["float32"], node, weights, x)
        (right,) = onnxruntime.InferenceSession(files["float32"]).run(None, feeds)
        for text in [f"{kind}{':' * bool(how)}{how}" for kind, options in METHODS.items() for how in options]:
            output = folder / f"{len(files)}.onnx"
            if modelexport.quantize(files["float32"], output, to=text, data=[feeds]).methods:
                files[text] = output
        if name in ("MatMul", "Conv"):
            files["int8 activations"] = folder / "signed.onnx"
            with_int8_activations(files["float32"], files["int8 activations"], feeds)
        taken = seconds(files, feeds)
        for text, file in list(files.items())[1:]:
            model = load_onnx(file)
            found = [
                open_session(each, optimized=True).run(None, feeds)[0]
                for each in (unsigned_copy(model) or model, model)
            ]
            exact, here = (float(np.linalg.norm(array - right) / np.linalg.norm(right)) for array in found)
            before = taken.get(f"{text.partition(':')[0]}:weights=int8")
            beside = f"{taken[text] / before:.2f}" if before else ""
            yield f"| {name} | {text} | {exact:.2%} | {here:.2%} | {taken[text] / taken['float32']:.2f} | {beside} |"


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    onnxruntime.set_default_logger_severity(4)
    here = "here: without VNNI" if saturates_here() else "here: with VNNI"
    print(f"| operator | method | exact | {here} | time | int8 |\n|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder)):
            print(row)
            print(row, file=sys.stderr)


if __name__ == "__main__":
    main()
