"""Adopt files of other exporters, and compare the owners with those of our own export of the same model.

    OMP_NUM_THREADS=1 python benchmarks/adopt.py [MODEL ...]     the table of exporters by models
    OMP_NUM_THREADS=1 python benchmarks/adopt.py --cost          time by nodes

Two exports of a model have no names in common. So the numbers of nodes of each operator in each call are compared, for
the operators that occur equally often in both files: `compared` is their share of the nodes. Of these, `call` is the
share that belongs to the same call in both files, and `module` the share that belongs to the same module, whatever its
number. Constants and Identity are left out. A node with several owners counts for the first. A cell is `call of
compared`, or `call, module of compared` if these two differ. `--cost` is the time of adopting a chain of many modules,
compared with reading and writing the same file.

Needs what `make test` installs; about three minutes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import transformers
from torch import nn
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

import modelexport
from building import build
from modelexport.core.calls import ModuleCall
from modelexport.graph.node_owners import owner_of
from outcomes import least_seconds
from survival import t5_encoder

SIZES = (5_000, 10_000, 20_000)
MODELS = {name: partial(build, name) for name in ("bert", "albert", "gpt2", "llama", "vit", "resnet")}
MODELS["t5-encoder"] = t5_encoder


class ByPosition(nn.Module):
    """TorchScript passes inputs by position, so the model is wrapped in another module."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(**dict(zip(self.names, tensors, strict=True)))
        return tuple(value for value in output.values() if isinstance(value, torch.Tensor))


def in_memory(model: nn.Module, inputs: dict[str, torch.Tensor], optimize: bool) -> Any:
    return OnnxExporter().export(model, inputs, OnnxConfig(dynamic=False, optimize=optimize))


def by_torch(model: nn.Module, inputs: dict[str, torch.Tensor], optimize: bool) -> Any:
    return torch.onnx.export(model, (), kwargs=inputs, dynamo=True, optimize=optimize, verbose=False)


def by_torchscript(model: nn.Module, inputs: dict[str, torch.Tensor], path: Path) -> Path:
    torch.onnx.export(ByPosition(model, list(inputs)), tuple(inputs.values()), path, dynamo=False, opset_version=18)
    return path


def saved(program: Any, path: Path) -> Path:
    ir.save(getattr(program, "program", None) or program.model, path)
    return path


def programs(
    model: nn.Module, inputs: dict[str, torch.Tensor], folder: Path
) -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Name of the adopted export, whether it is optimized, and how to make it."""
    for optimize in (False, True):
        how = ", optimized" if optimize else ""
        yield f"OnnxExporter in memory{how}", optimize, lambda o=optimize: in_memory(model, inputs, o)
        yield (
            f"OnnxExporter file{how}",
            optimize,
            lambda o=optimize: saved(in_memory(model, inputs, o), folder / "o.onnx"),
        )
        yield f"torch.onnx file{how}", optimize, lambda o=optimize: saved(by_torch(model, inputs, o), folder / "t.onnx")
    yield "TorchScript file", True, lambda: by_torchscript(model, inputs, folder / "s.onnx")


def owners(path: Path, wrapper: str = "") -> dict[str, Counter[ModuleCall | None]]:
    """Operator to the number of its nodes in each call; addresses below ``wrapper`` are those of the model in it."""
    found: defaultdict[str, Counter[ModuleCall | None]] = defaultdict(Counter)
    for node in modelexport.load(path).nodes:
        if node.op_type not in ("Constant", "Identity"):
            owner = owner_of(node)
            call = None if owner is None else owner.call
            if call is not None and wrapper:
                call = ModuleCall(call.path.removeprefix(wrapper).removeprefix("."), call.index)
            found[node.op_type][call] += 1
    return found


def compare(adopted: Path, own: Path, wrapper: str) -> tuple[int, int, int, int]:
    """The numbers of nodes: all, compared, of the same call, of the same module."""
    theirs, ours = owners(adopted, wrapper), owners(own)
    counts: Counter[str] = Counter()
    for operator, calls in theirs.items():
        counts["nodes"] += calls.total()
        if calls.total() == ours[operator].total():
            counts["compared"] += calls.total()
            counts["call"] += (calls & ours[operator]).total()
            counts["module"] += (modules(calls) & modules(ours[operator])).total()
    return counts["nodes"], counts["compared"], counts["call"], counts["module"]


def modules(calls: Counter[ModuleCall | None]) -> Counter[str]:
    found: Counter[str] = Counter()
    for call, count in calls.items():
        found["no module" if call is None else call.path] += count
    return found


def main() -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    if sys.argv[1:] == ["--cost"]:
        cost()
        return
    names = sys.argv[1:] or MODELS
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        for what, cell in agreement(name):
            rows[what].append(cell)
    print(f"| adopted | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for what, cells in rows.items():
        print(f"| {what} | {' | '.join(cells)} |")


def agreement(name: str) -> Iterator[tuple[str, str]]:
    """For each thing that a model can be adopted from, how it agrees with our own export."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for optimized in (False, True):
            with warnings.catch_warnings(action="ignore"):
                modelexport.export(model, inputs, folder / f"own-{optimized}.onnx", optimized=optimized)
        for what, optimized, make in programs(model, inputs, folder):
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
                    program = make()
            except Exception as error:  # a failure of an exporter is a result
                print(f"{name}, {what}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
                yield what, "not exported"
                continue
            coverage = modelexport.adopt(program, folder / "adopted.onnx").coverage
            own = folder / f"own-{optimized}.onnx"
            wrapper = "model" if what == "TorchScript file" else ""
            nodes, compared, call, module = compare(folder / "adopted.onnx", own, wrapper)
            print(f"{name}, {what}: {coverage}", file=sys.stderr, flush=True)
            shares = dict.fromkeys((percent(call / compared), percent(module / compared)))
            yield what, f"{', '.join(shares)} of {compared / nodes:.0%}".replace("%", " %")


def percent(share: float) -> str:
    """With a decimal where there is one to see."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def cost() -> None:
    print("| nodes | load and save | adopt | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        path, output = Path(directory, "chain.onnx"), Path(directory, "out.onnx")
        for size in SIZES:
            ir.save(chain(size), path)
            base, taken = least_seconds(
                lambda: ir.save(ir.load(path), output), lambda: modelexport.adopt(path, output), runs=1
            )
            print(f"| {size:,} | {base:.2f} s | {taken:.2f} s | {taken / base:.1f} |", flush=True)


def chain(nodes: int) -> ir.Model:
    """Layers of ten nodes, named as TorchScript names them, the last node of each without a name."""
    value = ir.val("x", ir.DataType.FLOAT, [4])
    inputs, made = [value], []
    for i in range(nodes):
        made.append(ir.node("Relu", [value], name=f"/layer.{i // 10}/act.{i % 10}/Relu" if i % 10 < 9 else f"n{i}"))
        value = made[-1].outputs[0]
        value.name, value.dtype, value.shape = f"v{i}", ir.DataType.FLOAT, ir.Shape([4])
    return ir.Model(ir.Graph(inputs, [value], nodes=made, opset_imports={"": 18}, name="chain"), ir_version=10)


if __name__ == "__main__":
    main()
