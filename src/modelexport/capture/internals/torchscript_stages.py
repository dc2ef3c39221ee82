"""What the TorchScript-based exporter records about modules, before and after each of its stages.

While it traces a model, PyTorch keeps a map from module to scope name (``torch.jit._trace._trace_module_map``), and
every node gets the chain of the scopes that were open. No public function returns the intermediate stages: they are
read from the two functions of the exporter that return them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from modelexport.capture.internals.internals_report import ExporterStage, key_facts
from modelexport.capture.patches import private, replaced
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import properties_of
from modelexport.pytorch.nested_tensors import copied, output_tensors, run_arguments, tensors_in
from modelexport.pytorch.private_torch import tracing_state

TRACED_CALL = "prim::TracedModuleForward"
"""The node that contains everything that ran in one call, until the exporter flattens the graph."""


class ScopeCounts:
    """The scope names that the exporter uses, as far as it got."""

    def __init__(self) -> None:
        self.by_path: dict[str, str | None] = {}
        """Module path to its scope, as in PyTorch's own map."""
        self.captured: set[str] = set()
        """The scopes of captured nodes."""


def look_at_torchscript(model: nn.Module, inputs: Any, stages: list[ExporterStage], scopes: ScopeCounts) -> None:
    """Export the model, and append each stage as it is reached; if the exporter fails, the earlier stages remain.

    Must be called inside :func:`~modelexport.pytorch.calls.traced_tree.untouched`: ``forward`` is replaced, because the
    exporter passes tensors only by position and accepts only tensors as outputs.

    Raises:
        Exception: Any exception of the exporter.
    """

    def before(module: nn.Module, args: Any) -> None:
        # By now the exporter has turned its log on, which writes the whole graph to file descriptor 1, not sys.stdout.
        private("log switch")(False)
        names = private("scopes")
        if names is not None:
            scopes.by_path = {path: names.get(module) for path, module in model.named_modules()}

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if (tracing := tracing_state()) is not None:
            scopes.captured = {node.scopeName() for node in _nodes(tracing.graph())}
            stages.append(_stage("captured", tracing.graph()))

    tensors = _by_position(model, *run_arguments(inputs))
    handles = (model.register_forward_pre_hook(before), model.register_forward_hook(after))
    logged = private("log state")()
    file = io.BytesIO()
    try:
        stages_seen = {
            "translated": lambda make: _watched(make, lambda graph: stages.append(_stage("translated", graph))),
            "optimised": lambda make: _watched(make, lambda result: stages.append(_stage("optimised", result[0]))),
        }
        with replaced(stages_seen):
            torch.onnx.export(model, tensors, file, dynamo=False, verbose=False)  # type: ignore[arg-type]  # a file, too
    finally:
        for handle in handles:
            handle.remove()
        private("log switch")(logged)
    stages.append(_written(ir.from_proto(onnx.load_from_string(file.getvalue()))))


def _by_position(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Replace ``forward`` by one that takes the tensors in the arguments by position and returns only tensors."""
    forward = model.forward
    inputs = {id(tensor): tensor for _, tensor in tensors_in((args, kwargs))}

    def by_position(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positional, named = copied((args, kwargs), dict(zip(inputs, tensors, strict=True)))
        return tuple(tensor for _, tensor in output_tensors(forward(*positional, **named)))

    model.forward = by_position
    return tuple(inputs.values())


def _watched(function: Callable[..., Any], see: Callable[[Any], None]) -> Callable[..., Any]:
    """The function, whose results are passed to another one as well."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        see(result)
        return result

    return watched


def _nodes(block: Any) -> Iterator[Any]:
    """The nodes of a TorchScript graph or block and of the blocks in it, without the nodes that contain a call."""
    for node in block.nodes():
        if node.kind() != TRACED_CALL:
            yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _traced_calls(block: Any) -> int:
    return sum((node.kind() == TRACED_CALL) + sum(map(_traced_calls, node.blocks())) for node in block.nodes())


def _stage(name: str, graph: Any) -> ExporterStage:
    nodes = list(_nodes(graph))
    scopes = [node.scopeName() for node in nodes]
    sizes: dict[str, list[int | None]] = {
        "scope": [len(scope.encode()) for scope in scopes if scope],
        "source range": [len(text.encode()) for node in nodes if (text := node.sourceRange())],
    }
    # Scopes do not number the calls of a module. Each call has a node that contains it, until the graph is flattened.
    calls = _traced_calls(graph) or len({part for scope in scopes if scope for part in _chain(scope)})
    return ExporterStage(name, "TorchScript", len(nodes), len(sizes["scope"]), calls, key_facts(sizes))


def _written(model: ir.Model) -> ExporterStage:
    """The stage of the file: the exporter numbers scopes and writes their names into the names of nodes."""
    nodes = list(all_nodes(model))
    names = [node.name or "" for node in nodes]
    placed = [name for name in names if name.startswith("/")]
    sizes: dict[str, list[int | None]] = {
        "doc_string": [len(node.doc_string.encode()) for node in nodes if node.doc_string],
        "metadata_props": [
            sum(len(f"{key}{text}".encode()) for key, text in properties.items())
            for properties in map(properties_of, nodes)
            if properties
        ],
        "name": [len(name.encode()) for name in names if name],
    }
    calls = {part for name in placed for part in _chain(name.rpartition("/")[0])}
    return ExporterStage("written", "ONNX", len(nodes), len(placed), len(calls), key_facts(sizes))


def _chain(scope: str) -> Iterator[str]:
    """A scope and its enclosing scopes: ``a``, ``a/b`` and ``a/b/c`` for ``a/b/c``."""
    return accumulate(scope.split("/"), lambda outer, inner: f"{outer}/{inner}")
