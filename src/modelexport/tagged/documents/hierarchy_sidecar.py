"""``NAME.hierarchy.json``, the sidecar: everything that is known about an exported model, as one document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import onnx_ir as ir
from msgspec.structs import replace

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.core.tags import CallTags
from modelexport.core.version import __version__
from modelexport.format import documents
from modelexport.format.dtypes import dtype_name
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.boundaries import CallBoundary, find_boundaries
from modelexport.graph.coverage import count_coverage
from modelexport.graph.node_owners import owner_of, required_owner
from modelexport.graph.nodes import all_nodes, default_shape, initializers, sizes_of
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.tagged.documents.export_facts import (
    VANISHED,
    CallRun,
    ExportFacts,
    Tensors,
    paths_with,
    present_values,
)
from modelexport.tagged.encodings.metadata import initializer_tags


def hierarchy_document(
    facts: ExportFacts, model: ir.Model, tags: CallTags, boundaries: Mapping[ModuleCall, CallBoundary] | None = None
) -> documents.Hierarchy:
    """Describe a model, as it was exported or after it was changed. Nodes without an owner are left out.

    Args:
        facts: What is known of it besides its graph. Values that the graph no longer has are left out.
        boundaries: The values at the boundary of each call, if they are known.
    """
    present = present_values(model)

    def tensors(listed: Tensors) -> list[documents.CallTensor]:
        return [replace(tensor, value=value.name if value in present else None) for tensor, value in listed]

    boundaries = find_boundaries(model, tags.calls) if boundaries is None else boundaries
    nodes_by_call = Counter(owner.call for owner in _owners(model))
    never_ran = CallRun(None, None, [], [])
    return documents.Hierarchy(
        format_version=FORMAT_VERSION,
        modelexport_version=__version__,
        model=replace(facts.model, opset=model.opset_imports.get("", 0)),
        settings=facts.settings,
        environment=dict(facts.environment),
        inputs=[graph_value(value) for value in model.graph.inputs],
        outputs=[graph_value(value) for value in model.graph.outputs],
        coverage=count_coverage(model)[0],
        modules=_modules(facts, model, tags),
        calls=[
            documents.CallEntry(
                address=traced.call.address,
                tag=tags.tag(traced.call),
                parent=None if traced.parent is None else traced.parent.address,
                enter=run.enter,
                exit=run.exit,
                inputs=tensors(run.inputs),
                outputs=tensors(run.outputs),
                boundary=_boundary(boundaries[traced.call]),
                nodes=nodes_by_call[traced.call],
            )
            for traced in tags.calls
            for run in [facts.calls.get(traced.call, never_ran)]
        ],
        nodes=[_node(node, tags) for node in all_nodes(model) if owner_of(node) is not None],
        initializers=[_initializer(value, tags) for value in initializers(model)],
    )


def _modules(facts: ExportFacts, model: ir.Model, tags: CallTags) -> list[documents.ModuleEntry]:
    """The modules of a model: those that are gone stay listed, and those that came without facts are added."""
    executed = Counter(traced.call.path for traced in tags.calls)
    with_nodes = paths_with(tags.calls, _owners(model))
    entries = []
    for module in facts.modules.values():
        reason = module.reason
        if module.path in with_nodes:
            reason = ""
        elif module.calls and not executed[module.path]:
            reason = _REPLACED
        elif not reason:
            reason = VANISHED if executed[module.path] else _NOT_CALLED
        entry = replace(module, calls=executed[module.path], reason=reason)
        if (first := ModuleCall(module.path)) in tags.calls:
            name = tags.class_of(first)
            entry = replace(entry, tag=tags.tag(first), level=tags.is_level_call(first), class_name=name)
            if module.qualified_class.rpartition(".")[2] != name:  # another module was put in its place
                entry = replace(entry, qualified_class=name, line=0)
        entries.append(entry)
    unlisted = (traced.call for traced in reversed(tags.calls.calls) if traced.call.path not in facts.modules)
    added = {call.path: call for call in unlisted}
    for path, call in sorted(added.items()):
        class_name = tags.class_of(call)
        entries.append(
            documents.ModuleEntry(
                path=path,
                tag=tags.tag(call),
                class_name=class_name,
                qualified_class=class_name,
                depth=path.count(".") + 1,
                leaf=not any(other.startswith(f"{path}.") for other in added),
                aliases=[],
                parameters=0,
                trainable=0,
                shapes={},
                level=tags.is_level_call(call),
                calls=executed[path],
                reason="" if path in with_nodes else VANISHED,
            )
        )
    return entries


_REPLACED = "another module was put in its place, or in that of one around it"
_NOT_CALLED = "it was not called"


def _boundary(boundary: CallBoundary) -> documents.Boundary:
    return documents.Boundary(
        [value.name or "" for value in boundary.inputs], [value.name or "" for value in boundary.outputs]
    )


def _owners(model: ir.Model) -> Iterator[Owner]:
    return (owner for node in all_nodes(model) if (owner := owner_of(node)) is not None)


def _node(node: ir.Node, tags: CallTags) -> documents.NodeEntry:
    owner = required_owner(node)
    several = owner.calls if len(owner.calls) > 1 else ()
    return documents.NodeEntry(
        name=node.name or "",
        op_type=node.op_type,
        domain=node.domain,
        call=owner.call.address,
        source_module=tags.source_tag(owner.call),
        evidence=owner.evidence.value,
        calls=[call.address for call in several],
        hierarchy_tags=[tags.source_tag(call) for call in several],
        line=owner.line,
    )


def _initializer(value: ir.Value, tags: CallTags) -> documents.InitializerEntry:
    assert value.dtype is not None
    plan = parameter_plan(value)
    return documents.InitializerEntry(
        name=value.name or "",
        dtype=dtype_name(value.dtype),
        shape=default_shape(value),
        parameter=plan.keys if plan else [],
        transform=plan.steps if plan else [],
        hierarchy_tags=initializer_tags(value, tags),
    )


def graph_value(value: ir.Value) -> documents.Value:
    """An input or output of the graph, as documents describe it."""
    return documents.Value(value.name or "", dtype_name(value.dtype) if value.dtype else "", sizes_of(value))
