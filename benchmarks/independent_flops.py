"""The operations of files as ONNX Runtime runs them, beside what ``modelexport cost`` says: a count of another kind.

    OMP_NUM_THREADS=1 python benchmarks/independent_flops.py FILE.onnx ...

ONNX Runtime's profiler writes for every node that ran, also in branches and bodies, the shapes of what it took and
made. The operations follow from these shapes alone: neither the file nor a line of this project is read for them. Both
sides get the same inputs. A multiply-add is two operations; an element of the result of any other arithmetic is one, or
as many as its definition has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from math import prod
from pathlib import Path

import onnxruntime

from modelexport.tables.costs import cost
from modelexport.tagged.file import read_tagged
from modelexport.traces.inputs_and_example_sizes import make_feeds

DATA = frozenset(
    """Cast Concat Constant ConstantOfShape DepthToSpace Expand Flatten Gather GatherElements GatherND Identity If Loop
    NonZero OneHot Pad Range Reshape Scan ScatterElements ScatterND Shape Size Slice Split Squeeze Tile TopK Transpose
    Trilu Unsqueeze Where""".split()  # noqa: SIM905
)
"""Operators that only move data, or run other nodes."""
TIMES = {"Softmax": 5, "LogSoftmax": 6, "BatchNormalization": 4, "LayerNormalization": 7, "InstanceNormalization": 7}
"""Operations for an element of the result: a softmax subtracts, exponentiates, adds and divides, beside its maximum."""


def operations(operator: str, taken: list[list[int]], made: list[list[int]]) -> tuple[int, int]:
    """Multiply-adds and all operations of a run of a node, from the shapes of its inputs and outputs."""
    out = prod(made[0]) if made else 0
    products = 0
    if operator in ("Conv", "FusedConv", "ConvInteger"):
        products = out * prod(taken[1][1:])
    elif operator == "QLinearConv":
        products = out * prod(taken[3][1:])
    elif operator == "ConvTranspose":
        products = prod(taken[0]) * prod(taken[1][1:])
    elif operator in ("MatMul", "MatMulInteger") or operator == "QLinearMatMul":
        products = out * taken[0][-1]
    elif operator in ("Gemm", "FusedGemm"):
        products = prod(taken[0]) * made[0][1]  # rows times inner size, for each column
    elif operator in ("LSTM", "GRU", "RNN"):
        steps, batch = taken[0][:2]
        products = steps * batch * (prod(taken[1]) + prod(taken[2]))
    if products:
        biased = operator in ("Conv", "Gemm", "ConvTranspose") and len(taken) > 2
        return products, 2 * products + biased * out
    if operator in DATA:
        return 0, 0
    if operator.startswith(("Reduce", "Global", "Arg")) or operator.endswith("Pool"):
        return 0, prod(taken[0])
    return 0, out * TIMES.get(operator, 1)


def count(file: Path, feeds: dict[str, object]) -> tuple[int, int]:
    """The multiply-adds and operations of one run."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.enable_profiling = True
    options.add_session_config_entry("session.disable_prepacking", "1")  # weights that are packed have no shape
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = f"{folder}/run"
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    macs = flops = 0
    for event in events:
        about = event.get("args", {})
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            shapes = ([shape for one in about[key] for shape in one.values()] for key in _KEYS)
            products, all_operations = operations(about["op_name"], *shapes)
            macs, flops = macs + products, flops + all_operations
    return macs, flops


_KEYS = ("input_type_shape", "output_type_shape")


def main(files: list[Path]) -> None:
    """Print a row a file."""
    print("| file | multiply-adds counted | of `cost` | difference | operations counted | of `cost` | difference |")
    print("|---" * 7 + "|")
    for file in files:
        tagged = read_tagged(file)
        feeds, _ = make_feeds(tagged, file, None, {}, provider="CPUExecutionProvider", seed=0)
        table = cost(tagged)
        numbers = table.numbers(table.whole)
        cells = [f"{file.parent.name}: {file.name}"]
        for counted, told in zip(count(file, feeds), (numbers["macs"], numbers["flops"]), strict=True):
            off = (told or 0) / counted - 1 if counted else float(bool(told))
            cells += [f"{counted:,}", f"{told or 0:,}", f"{off:+.2%}"]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
