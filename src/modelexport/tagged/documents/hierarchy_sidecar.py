"""``NAME.hierarchy.json``, the sidecar: everything that is known about an exported model, as one document."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall, Port, Side, TracedCall
from modelexport.core.module_tree import Module, ModuleTree
from modelexport.core.owners import Owner
from modelexport.core.tags import CallTags, Tags
from modelexport.core.uncalled_modules import Comparison
from modelexport.core.version import __version__
from modelexport.format import documents
from modelexport.format.dtypes import dtype_name
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.boundaries import CallBoundary, find_boundaries, match_values
from modelexport.graph.coverage import count_coverage
from modelexport.graph.node_owners import owner_of, required_owner
from modelexport.graph.nodes import all_nodes, default_shape, initializers
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.graph.snapshot import SourceGraph
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.named_entries import encode_table
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.encodings.metadata import initializer_tags

_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


def hierarchy_document(
    *,
    name: str,
    model: ir.Model,
    source: SourceGraph,
    tree: ModuleTree,
    calls: CallTree,
    values: Mapping[Port, ir.Value],
    tags: Tags,
    comparison: Comparison,
    coverage: documents.Coverage,
    settings: documents.Settings,
) -> documents.Hierarchy:
    """Describe an exported model whose nodes have owners.

    Args:
        name: The model's short name.
        source: The unoptimized graph, which shows why a call has no nodes.
        values: The tensors that calls get and return, to their values in the model.
        comparison: The comparison of tree and run, which shows why a module has no calls.
    """
    return documents.Hierarchy(
        format_version=FORMAT_VERSION,
        modelexport_version=__version__,
        model=documents.ModelEntry(
            name, tree.root.qualified_class, tree.root.parameters, model.opset_imports.get("", 0)
        ),
        settings=settings,
        environment={package: importlib.metadata.version(package) for package in _PACKAGES},
        inputs=[graph_value(value) for value in model.graph.inputs],
        outputs=[graph_value(value) for value in model.graph.outputs],
        coverage=coverage,
        modules=_modules(model, source, tree, calls, tags, comparison),
        calls=_calls(model, calls, tags, values),
        nodes=[_node(node, tags) for node in all_nodes(model)],
        initializers=[_initializer(value, tags) for value in initializers(model)],
    )


def descended_document(
    before: documents.Hierarchy,
    *,
    model: ir.Model,
    values: Mapping[str, ir.Value],
    tags: CallTags,
    coverage: documents.Coverage,
) -> documents.Hierarchy:
    """Describe a model that another tool made from an exported one, starting from the exported model's sidecar.

    Args:
        before: The sidecar of the file that the tool changed.
        model: The tool's result, whose nodes have owners.
        values: Names of values of that file to their values in the model, for those that still exist.
    """

    def tensors(listed: Iterable[documents.CallTensor]) -> list[documents.CallTensor]:
        present = ((tensor, values.get(tensor.value or "")) for tensor in listed)
        return [msgspec.structs.replace(tensor, value=value.name if value else None) for tensor, value in present]

    boundaries = find_boundaries(model, tags.calls)
    nodes_by_call = Counter(owner.call for owner in _owners(model))
    known = {call.address: call for call in before.calls}
    return msgspec.structs.replace(
        before,
        modelexport_version=__version__,
        model=msgspec.structs.replace(before.model, opset=model.opset_imports.get("", 0)),
        inputs=[graph_value(value) for value in model.graph.inputs],
        outputs=[graph_value(value) for value in model.graph.outputs],
        coverage=coverage,
        modules=_descended_modules(before, model, tags),
        calls=[
            documents.CallEntry(
                address=traced.call.address,
                tag=tags.tag(traced.call),
                parent=None if traced.parent is None else traced.parent.address,
                enter=call.enter if call is not None else None,
                exit=call.exit if call is not None else None,
                inputs=tensors(call.inputs) if call is not None else [],
                outputs=tensors(call.outputs) if call is not None else [],
                boundary=_boundary(boundaries[traced.call]),
                nodes=nodes_by_call[traced.call],
            )
            for traced in tags.calls
            for call in [known.get(traced.call.address)]
        ],
        nodes=[_node(node, tags) for node in all_nodes(model) if owner_of(node) is not None],
        initializers=[_initializer(value, tags) for value in initializers(model)],
    )


def descended_documents(
    path: Path,
    before: documents.Hierarchy | None,
    *,
    model: ir.Model,
    values: Mapping[str, ir.Value],
    tags: CallTags,
    untagged: bool = False,
) -> dict[str, bytes]:
    """The documents that are beside a file, made for a model that it became: the end of each name to the content.

    Args:
        path: The file that was changed.
        before, model, values, tags: As :func:`descended_document` has them.
        untagged: Nodes may have no owner. Then the tables, which name every node, are left out.

    Raises:
        FileFormatError: A node has no owner, and none may.
    """
    coverage, without = count_coverage(model)
    written: dict[str, bytes] = {}
    if before is not None:
        written[".hierarchy.json"] = encode_sidecar(
            descended_document(before, model=model, values=values, tags=tags, coverage=coverage)
        )
    for suffix, table in ((".dag.json", dag_document), (".operations.json", operations_document)):
        if not (untagged and without) and path.with_suffix(suffix).is_file():
            written[suffix] = encode_table(table(model, tags))
    return written


def encode_sidecar(hierarchy: documents.Hierarchy) -> bytes:
    """The sidecar as JSON."""
    return msgspec.json.format(msgspec.json.encode(hierarchy), indent=1)


def _descended_modules(before: documents.Hierarchy, model: ir.Model, tags: CallTags) -> list[documents.ModuleEntry]:
    """The modules of a file that was changed: those that are gone stay listed, and those that came are added."""
    executed = Counter(traced.call.path for traced in tags.calls)
    with_nodes = _paths_with(tags.calls, _owners(model))
    entries = []
    for module in before.modules:
        reason = module.reason
        if module.path in with_nodes:
            reason = ""
        elif module.calls and not executed[module.path]:
            reason = _REPLACED
        elif not reason:
            reason = _VANISHED if executed[module.path] else _NOT_CALLED
        first = ModuleCall(module.path)
        tag = tags.tag(first) if first in tags.calls else module.tag
        entries.append(msgspec.structs.replace(module, tag=tag, calls=executed[module.path], reason=reason))
    known = {module.path for module in before.modules}
    added = {traced.call.path: traced.call for traced in reversed(tags.calls.calls) if traced.call.path not in known}
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
                reason="" if path in with_nodes else _VANISHED,
            )
        )
    return entries


_REPLACED = "another module was put in its place, or in that of one around it"
_VANISHED = "its operations were folded away or merged into others"
_NOT_CALLED = "it was not called"


def _boundary(boundary: CallBoundary) -> documents.Boundary:
    return documents.Boundary(
        [value.name or "" for value in boundary.inputs], [value.name or "" for value in boundary.outputs]
    )


def _modules(
    model: ir.Model, source: SourceGraph, tree: ModuleTree, calls: CallTree, tags: Tags, comparison: Comparison
) -> list[documents.ModuleEntry]:
    executed = Counter(traced.call.path for traced in calls)
    with_nodes = _paths_with(calls, _owners(model))
    with_operations = _paths_with(calls, (node.owner for node in source.nodes if node.owner is not None))
    compared = {module.path: module.reason for module in comparison.modules}
    entries = []
    for module in tree:
        if not executed[module.path]:
            reason = compared[module.path]
        elif module.path in with_nodes:
            reason = ""
        elif module.path in with_operations:
            reason = _VANISHED
        else:
            reason = "it has no operations: it returns its input"
        entries.append(
            documents.ModuleEntry(
                **module_facts(module),
                tag=tags.module_tag(module.path),
                level=tags.is_level(module.path),
                calls=executed[module.path],
                reason=reason,
            )
        )
    return entries


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


def _paths_with(calls: CallTree, owners: Iterable[Owner]) -> set[str]:
    """The paths of the modules that an owner's call belongs to or ran inside."""
    reached = {call for owner in owners for call in owner.calls}
    for traced in reversed(calls.calls):
        if traced.call in reached and traced.parent is not None:
            reached.add(traced.parent)
    return {call.path for call in reached}


def _calls(model: ir.Model, calls: CallTree, tags: Tags, values: Mapping[Port, ir.Value]) -> list[documents.CallEntry]:
    boundaries = find_boundaries(model, calls)
    nodes_by_call = Counter(owner.call for owner in _owners(model))
    return [
        documents.CallEntry(
            address=traced.call.address,
            tag=tags.tag(traced.call),
            parent=None if traced.parent is None else traced.parent.address,
            enter=traced.enter,
            exit=traced.exit,
            inputs=_tensors(traced, "inputs", values, boundaries[traced.call].inputs),
            outputs=_tensors(traced, "outputs", values, boundaries[traced.call].outputs),
            boundary=_boundary(boundaries[traced.call]),
            nodes=nodes_by_call[traced.call],
        )
        for traced in calls
    ]


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
    shape = [size if isinstance(size, int) else size.value for size in value.shape] if value.shape is not None else []
    return documents.Value(value.name or "", dtype_name(value.dtype) if value.dtype else "", shape)


def _tensors(
    traced: TracedCall, side: Side, values: Mapping[Port, ir.Value], boundary: Iterable[ir.Value]
) -> list[documents.CallTensor]:
    """The tensors that a module gets or returns, with their values: by the trace, or if only one value fits.

    The trace loses a tensor if the exporter removed the node that produced it because the node had no effect.
    """
    tensors = []
    for position, spec in enumerate(traced.inputs if side == "inputs" else traced.outputs):
        value = values.get(Port(traced.call, side, position))
        tensors.append(documents.CallTensor(spec.name, spec.dtype, list(spec.shape), value.name if value else None))
    open_positions = [position for position, tensor in enumerate(tensors) if tensor.value is None]
    taken = {tensor.value for tensor in tensors}
    left = [value for value in boundary if value.name not in taken]
    for value, tensor in match_values(left, [tensors[position] for position in open_positions]).items():
        position = next(p for p in open_positions if tensors[p] is tensor)
        tensors[position] = msgspec.structs.replace(tensor, value=value.name)
    return tensors
