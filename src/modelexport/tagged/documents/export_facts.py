"""What is known of an exported model besides its graph and its tags: modules, tensors of calls, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall, Port, Side, TracedCall
from modelexport.core.installed_versions import installed_version
from modelexport.core.module_tree import Module
from modelexport.core.owners import Owner
from modelexport.core.tags import Tags
from modelexport.core.uncalled_modules import Comparison
from modelexport.format import documents
from modelexport.graph.boundaries import CallBoundary, match_values
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.snapshot import SourceGraph

Tensors: TypeAlias = Sequence[tuple[documents.CallTensor, ir.Value | None]]
"""The tensors that a module gets or returns, each with its value in the graph if that is known."""
VANISHED = "its operations were folded away or merged into others"
"""Why a module that was called has no nodes."""
_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class CallRun:
    """When a call began and ended in the traced run, and the tensors that its module got and returned."""

    enter: int | None
    exit: int | None
    inputs: Tensors
    outputs: Tensors

    def with_values(self, value_now: Callable[[ir.Value], ir.Value | None]) -> CallRun:
        """The run with other values for its tensors."""
        inputs, outputs = (
            [(tensor, None if value is None else value_now(value)) for tensor, value in tensors]
            for tensors in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class ExportFacts:
    """What is known of an exported model besides its graph and its tags.

    Its values are those of the graph, so that edits of the graph need no names to follow them.
    """

    model: documents.ModelEntry
    settings: documents.Settings
    environment: Mapping[str, str]
    modules: Mapping[str, documents.ModuleEntry]
    """By their paths. The reasons are those known without the graph: why a module was not called, or does nothing."""
    calls: Mapping[ModuleCall, CallRun]

    def moved(self, moved: Mapping[ir.Value, ir.Value]) -> ExportFacts:
        """The facts after values were replaced by others."""
        return replace(
            self,
            calls={call: run.with_values(lambda value: moved.get(value, value)) for call, run in self.calls.items()},
        )


def facts_of_sidecar(sidecar: documents.Hierarchy, values: Mapping[str, ir.Value]) -> ExportFacts:
    """The facts that a sidecar has.

    Args:
        values: Names in the sidecar to values of the model, for those that exist.
    """
    runs = {}
    for entry in sidecar.calls:
        inputs, outputs = (
            [(tensor, values.get(tensor.value or "")) for tensor in tensors]
            for tensors in (entry.inputs, entry.outputs)
        )
        runs[ModuleCall.parse(entry.address)] = CallRun(entry.enter, entry.exit, inputs, outputs)
    modules = {entry.path: entry for entry in sidecar.modules}
    return ExportFacts(sidecar.model, sidecar.settings, sidecar.environment, modules, runs)


def facts_of_export(
    *,
    name: str,
    model: ir.Model,
    source: SourceGraph,
    values: Mapping[Port, ir.Value],
    tags: Tags,
    comparison: Comparison,
    settings: documents.Settings,
    boundaries: Mapping[ModuleCall, CallBoundary],
) -> ExportFacts:
    """The facts of an export.

    Args:
        name: The model's short name.
        source: The unoptimized graph, which shows why a call has no nodes.
        values: The tensors that calls get and return, to their values in the model.
        comparison: The comparison of tree and run, which shows why a module has no calls.
        boundaries: The values at the boundary of each call.
    """
    root, present = tags.tree.root, present_values(model)
    values = {port: value for port, value in values.items() if value in present}
    return ExportFacts(
        documents.ModelEntry(name, root.qualified_class, root.parameters, model.opset_imports.get("", 0)),
        settings,
        {package: installed_version(package) for package in _PACKAGES},
        _modules(source, tags, comparison),
        {
            traced.call: CallRun(
                traced.enter,
                traced.exit,
                _tensors(traced, "inputs", values, boundaries[traced.call].inputs),
                _tensors(traced, "outputs", values, boundaries[traced.call].outputs),
            )
            for traced in tags.calls
        },
    )


def module_facts(module: Module) -> dict[str, Any]:
    """The fields of a module's entry that do not depend on a run."""
    return {
        "path": module.path,
        "class_name": module.class_name,
        "qualified_class": module.qualified_class,
        "line": module.line,
        "depth": module.depth,
        "leaf": module.is_leaf,
        "aliases": list(module.aliases),
        "parameters": module.parameters,
        "trainable": module.trainable,
        "shapes": {name: list(shape) for name, shape in module.shapes.items()},
    }


def paths_with(calls: CallTree, owners: Iterable[Owner]) -> set[str]:
    """The paths of the modules that an owner's call belongs to or ran inside."""
    reached = {call for owner in owners for call in owner.calls}
    for traced in reversed(calls.calls):
        if traced.call in reached and traced.parent is not None:
            reached.add(traced.parent)
    return {call.path for call in reached}


def _modules(source: SourceGraph, tags: Tags, comparison: Comparison) -> dict[str, documents.ModuleEntry]:
    executed = Counter(traced.call.path for traced in tags.calls)
    with_operations = paths_with(tags.calls, (node.owner for node in source.nodes if node.owner is not None))
    compared = {module.path: module.reason for module in comparison.modules}
    entries = {}
    for module in tags.tree:
        reason = "" if module.path in with_operations else "it has no operations: it returns its input"
        entries[module.path] = documents.ModuleEntry(
            **module_facts(module),
            tag=tags.module_tag(module.path),
            level=tags.is_level(module.path),
            calls=executed[module.path],
            reason=reason if executed[module.path] else compared[module.path],
        )
    return entries


def present_values(model: ir.Model) -> set[ir.Value]:
    """The inputs of a model, its initializers, and what its nodes compute."""
    return {*model.graph.inputs, *initializers(model), *(value for node in all_nodes(model) for value in node.outputs)}


def _tensors(traced: TracedCall, side: Side, values: Mapping[Port, ir.Value], boundary: Iterable[ir.Value]) -> Tensors:
    """The tensors that a module gets or returns, with their values: by the trace, or if only one value fits.

    The trace loses a tensor if the exporter removed the node that produced it because the node had no effect.
    """
    tensors = []
    for position, spec in enumerate(traced.inputs if side == "inputs" else traced.outputs):
        value = values.get(Port(traced.call, side, position))
        tensors.append((documents.CallTensor(spec.name, spec.dtype, list(spec.shape)), value))
    taken = {value for _, value in tensors}
    left = [value for value in boundary if value not in taken]
    unknown = [tensor for tensor, value in tensors if value is None]
    by_fit = {id(tensor): value for value, tensor in match_values(left, unknown).items()}
    return [(tensor, by_fit.get(id(tensor), value)) for tensor, value in tensors]
