"""`verify` of files that `torch.onnx.export` wrote, without a fault and with one: is the verdict right, and the call?

    OMP_NUM_THREADS=1 python benchmarks/foreign_verify.py NAME,... [--results FILE]

A NAME is a model of `tests/zoo`. Each is exported in three ways: by torch's exporter (`dynamo`), by TorchScript
(`torchscript`), and by TorchScript as scripts around transformers do it (`script`: opset 14, folded constants, first
axes dynamic, names of our own). Then a fault is planted: of the largest weight of floating-point numbers every second
element is 5 % too large, under names as they are, and in a file whose names say nothing (`nameless`). A fault is
*located* if the first call that differs uses the parameter, which is known by its elements.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import modelexport
import zoo
from sweep import named

SECONDS = 240
"""For one file and its faults."""
WAYS = ("dynamo", "torchscript", "script")


def export(model: torch.nn.Module, inputs: Any, path: Path, way: str) -> None:
    """Write a file as others do."""
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    options: dict[str, Any] = {"dynamo": way == "dynamo"}
    if way == "script":
        names = list(named(model, inputs)) if isinstance(named(model, inputs), Mapping) else []
        tensors = kwargs or dict(zip(names, args, strict=False))
        axes = {name: {0: "batch"} for name, value in tensors.items() if isinstance(value, torch.Tensor) and value.ndim}
        options |= {"opset_version": 14, "do_constant_folding": True, "input_names": names, "dynamic_axes": axes}
    torch.onnx.export(model, args, str(path), kwargs=kwargs or None, **options)


def largest_weight(model: onnx.ModelProto) -> onnx.TensorProto | None:
    """The largest initializer of floating-point numbers that a node of the graph uses."""
    used = {name for node in model.graph.node for name in node.input}
    weights = [t for t in model.graph.initializer if t.name in used and t.data_type == onnx.TensorProto.FLOAT]
    return max(weights, key=lambda tensor: int(np.prod(tensor.dims)), default=None)


def nameless(model: onnx.ModelProto) -> None:
    """Take the names of all but inputs and outputs away, in place."""
    graph = model.graph
    kept = {value.name for value in (*graph.input, *graph.output)}
    made = [tensor.name for tensor in graph.initializer] + [name for node in graph.node for name in node.output]
    fresh = {name: f"v{number}" for number, name in enumerate(made) if name and name not in kept}
    for node in graph.node:
        node.name = ""
        del node.metadata_props[:]
        for side in (node.input, node.output):
            side[:] = [fresh.get(name, name) for name in side]
    for tensor in graph.initializer:
        tensor.name = fresh.get(tensor.name, tensor.name)
        del tensor.metadata_props[:]
    del graph.value_info[:]


def users(model: torch.nn.Module, array: np.ndarray) -> set[str]:
    """The modules with a parameter of these elements, in any order."""
    elements = np.sort(array.ravel())
    return {
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.numel() == elements.size
        and np.allclose(np.sort(parameter.detach().float().numpy().ravel()), elements, rtol=1e-6)
    }


def _called(model: torch.nn.Module, path: str) -> str:
    """The module, or the nearest around it that is called: a list of parameters is not."""
    while path and isinstance(model.get_submodule(path), torch.nn.ParameterList | torch.nn.ParameterDict):
        path = path.rpartition(".")[0]
    return path


def try_file(case: Any, way: str) -> dict[str, str]:
    """The verdict on the sound file, and on the two with a fault."""
    cells: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        try:
            export(*case(), path, way)
        except Exception as error:
            return {"sound": f"not exported ({type(error).__name__})"}
        model, inputs = case()
        cells["sound"] = verdict(model, inputs, path)[0]
        proto = onnx.load(path)
        if any(node.attribute and any(a.HasField("g") for a in node.attribute) for node in proto.graph.node):
            return cells
        for kind in ("fault", "fault, nameless"):
            wrong = onnx.load(path)
            weight = largest_weight(wrong)
            if weight is None or numpy_helper.to_array(weight).size < 4:
                continue
            array = numpy_helper.to_array(weight)
            model, inputs = case()
            right = users(model, array)
            factors = np.where(np.arange(array.size) % 2, 1.05, 1).astype(np.float32).reshape(array.shape)
            weight.CopyFrom(numpy_helper.from_array(array * factors, weight.name))
            if "nameless" in kind:
                nameless(wrong)
            file = Path(folder) / "wrong.onnx"
            onnx.save(wrong, file)
            told, differing = verdict(model, inputs, file)
            if told == "differ" and right:
                right = {_called(model, path) for path in right}
                told = "located" if right & set(differing) else f"found in {differing[:2]} instead of {sorted(right)}"
            cells[kind] = told
    return cells


def verdict(model: torch.nn.Module, inputs: Any, path: Path) -> tuple[str, list[str]]:
    """What `verify` says, and the innermost calls that differ."""
    try:
        report = modelexport.verify(model, inputs, path, others=False)
    except modelexport.ModelExportError as error:
        return f"refused: {error}"[:160], []
    paths = [call.address.partition("@")[0] for call in report.calls if call.status == "differ"]
    inner = [path for path in paths if not any(other.startswith(f"{path}.") or (other and not path) for other in paths)]
    return ("agree" if report.agrees else report.verdict), inner


def tried(names: list[str], done: set[tuple[str, str]]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Each model in each way; what takes too long is told."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    for case in zoo.cases():
        for way in WAYS if case.name in names else ():
            if (case.name, way) in done:
                continue
            signal.alarm(SECONDS)
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    cells = try_file(case, way)
            except TimeoutError:
                cells = {"sound": f"not done in {SECONDS} s"}
            except Exception as error:
                cells = {"sound": f"internal error: {type(error).__name__}: {error}"[:160]}
            finally:
                signal.alarm(0)
            yield case.name, way, cells


def main(names: list[str], results: Path) -> None:
    """Try what has no line in the results yet, and print the table."""
    warnings.simplefilter("ignore")
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for row in tried(names, {(name, way) for name, way, _ in rows}):
        rows.append(list(row))
        print(*row, file=sys.stderr, flush=True)
        with results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    print("| model | exported by | sound | fault in a weight | the same without names |")
    print("|---" * 5 + "|")
    for name, way, cells in rows:
        print("|", " | ".join([name, way, *(cells.get(k, "") for k in ("sound", "fault", "fault, nameless"))]), "|")


if __name__ == "__main__":
    given = sys.argv[1:]
    place = Path(given.pop(given.index("--results") + 1)) if "--results" in given else Path("foreign_verify.jsonl")
    main([name for text in given if text != "--results" for name in text.split(",")], place)
