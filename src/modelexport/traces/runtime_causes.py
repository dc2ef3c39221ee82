"""Why a right file has wrong outputs in ONNX Runtime: the kernels or the optimizer that cause it, by name.

Three judges compute the outputs of a file: each node as the standard defines it (:mod:`.file_run`), ONNX Runtime
without its optimizer, and ONNX Runtime as users run it. The first two that differ show what is wrong: the file itself,
kernels of the runtime, or its optimizer.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from modelexport.core.collected_messages import native_errors_to
from modelexport.core.text import first_few
from modelexport.errors import UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.graph.nodes import all_nodes, draws, nested_graphs
from modelexport.runtime.devices import CPU
from modelexport.runtime.sessions import open_session, run_session, session_options
from modelexport.runtime.single_nodes import NoKernelError, run_node
from modelexport.traces.array_differences import is_floating, relative_error
from modelexport.traces.file_run import FileRun
from modelexport.traces.node_computation import nudge
from modelexport.traces.tolerances import ALLOWED, UNITS

Agrees = Callable[[Mapping[str, Any]], bool]
"""Whether outputs of a file, by name, are right."""
_IN_8_BITS = 4
"""The ``accuracy_level`` with which ``MatMulNBits`` rounds activations."""


def cause_in_runtime(path: Path, feeds: Mapping[str, Any], agrees: Agrees, provider: str = CPU) -> str:
    """The cause of wrong outputs of a right file; empty if the file itself is wrong, or rounding grows in it.

    Args:
        feeds: Inputs for which the outputs are wrong as users run the file.
    """
    model = load_onnx(path)
    levels = [node.attributes for node in all_nodes(model) if "accuracy_level" in node.attributes]
    if rounding := [level for level in levels if level.get_int("accuracy_level") == _IN_8_BITS]:
        for attributes in rounding:
            attributes.add(ir.AttrInt64("accuracy_level", 0))
        exact = open_session(model, folder=path.parent, provider=provider, optimized=True)
        if agrees(run_session(exact, feeds)):
            return f"MatMulNBits with accuracy_level {_IN_8_BITS}, which rounds activations to 8 bits,"
        model = load_onnx(path)
    try:
        session = open_session(path, provider=provider)
    except UsageError:  # it runs as a copy that computes in float32
        return ""
    if agrees(run_session(session, feeds)):
        is_rounding = _grows(FileRun(model, in_float64_for=None), feeds, agrees)
        return "" if is_rounding else f"ONNX Runtime's optimizer {blamed_optimizer(path, feeds, agrees, provider)}"
    return _blamed_kernels(model, feeds, agrees, provider)


def _blamed_kernels(model: ir.Model, feeds: Mapping[str, Any], agrees: Agrees, provider: str) -> str:
    """The kernels without which the outputs are right; empty if they are wrong by the standard, too, or if the last
    bits of inputs and constants change them as much.
    """
    run, nodes = FileRun(model, in_float64_for=None), list[str]()

    def watch(node: ir.Node, inputs: Sequence[Any], value: ir.Value, array: Any) -> Any:
        if value is node.outputs[0] and _differs_in_runtime(node, inputs, array, model.opset_imports):
            nodes.append(f"{node.op_type} {node.name or ''}".rstrip())
        return array

    try:
        if not agrees(run.run(feeds)):
            return ""
        if provider != CPU:
            return f"ONNX Runtime's {provider}"
        run.run(feeds, watch)
        if nodes:
            return f"ONNX Runtime's kernel of {first_few(dict.fromkeys(nodes), 3)}"
    except (UsageError, MemoryError):  # nothing here computes a node
        return ""
    is_rounding = _grows(run, feeds, agrees)
    return "" if is_rounding else "ONNX Runtime, which computes nodes together otherwise than one by one,"


def _grows(run: FileRun, feeds: Mapping[str, Any], agrees: Agrees) -> bool:
    """Whether nodes one by one give right outputs, but not where the last bits of inputs and constants are others.

    False if nothing here computes a node.
    """
    types = {array.dtype for array in feeds.values()} | {array().dtype for _, array in run.constants()}
    widest = max((dtype for dtype in types if dtype.kind == "f"), key=lambda dtype: dtype.itemsize, default=None)
    nudged = {name: _nudged(array, widest) for name, array in feeds.items()}
    try:
        return agrees(run.run(feeds)) and not agrees(
            run.run(nudged, change=lambda value, array: _nudged(array, widest))
        )
    except (UsageError, MemoryError):
        return False


def _differs_in_runtime(node: ir.Node, inputs: Sequence[Any], right: Any, opsets: Mapping[str, int]) -> bool:
    """Whether ONNX Runtime computes another first output of a node alone, of the same inputs."""
    if nested_graphs(node) or draws(node) or not node.inputs or not isinstance(right, np.ndarray):
        return False
    try:
        results, _ = run_node(ir.serde.serialize_node(node), opsets, inputs)
    except (NoKernelError, RuntimeError):
        return False
    allowed = ALLOWED.get(str(right.dtype), 0.0) if is_floating(right) else 0.0
    return results[0] is not None and not relative_error(right, results[0]) <= allowed


def _nudged(array: Any, dtype: Any) -> Any:
    """Each number of a type, one bit larger or smaller. Numbers of few digits, as 3 or 0.5, are exact, and stay."""
    if array.dtype != dtype:
        return array
    generator = np.random.default_rng(0)
    exact = nudge(array.astype(np.float64), UNITS[array.dtype.name], generator) == array
    towards = generator.choice([-np.inf, np.inf], array.shape).astype(array.dtype)
    return np.where(exact, array, np.nextafter(array, towards))


_APPLIED = re.compile(r"GraphTransformer (\w+) modified: 1")
_RULE = re.compile(r"(?:Rule|RewriteRule) (\w+)")


def blamed_optimizer(path: Path, feeds: Mapping[str, Any], agrees: Agrees, provider: str) -> str:
    """The name of the optimizer without which a file's outputs agree."""
    names = _applied(path, provider)
    for name in names:
        if agrees(_without(path, feeds, provider, [name])):
            return name
    return ", ".join(names) if names and agrees(_without(path, feeds, provider, names)) else "not known by name"


def _without(path: Path, feeds: Mapping[str, Any], provider: str, names: list[str]) -> Mapping[str, Any]:
    options = session_options("all", provider)
    session = onnxruntime.InferenceSession(str(path), options, disabled_optimizers=names)
    try:
        return run_session(session, feeds)
    except UsageError:
        return {}


def _applied(path: Path, provider: str) -> list[str]:
    """The optimizers that change a file when it is loaded, which only the runtime's log tells."""
    options = session_options("all", provider)
    options.log_severity_level = 0
    with tempfile.TemporaryFile() as log:
        with native_errors_to(log.fileno()):
            onnxruntime.InferenceSession(str(path), options)
        log.seek(0)
        text = log.read().decode(errors="replace")
    return list(dict.fromkeys([*_RULE.findall(text), *_APPLIED.findall(text)]))
