"""Names of nodes and values after the modules that they belong to."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers, nested_graphs
from modelexport.graph.unique_names import free_name


def _names_by_path(model: ir.Model) -> dict[ir.Node, str]:
    """For each node a name like ``/encoder/layer.0/attention/self/MatMul_1``: its module's path, then its operator.

    A part of the path that is a number is joined to the part before it, as older exporters wrote it. Nodes of the same
    operator in one module are numbered in the order of the graph, over all calls of the module. The names differ from
    each other and from those of all values, and are the same for the same graph. A node without an owner is named after
    its operator alone.
    """
    taken = {value.name for node in all_nodes(model) for value in node.outputs}
    taken |= {value.name for value in initializers(model)} | {value.name for value in model.graph.inputs}
    counts: Counter[str] = Counter()
    names: dict[ir.Node, str] = {}
    for node in all_nodes(model):
        owner = owner_of(node)
        stem = f"{_folder(owner.call) if owner is not None else ''}/{node.op_type}"
        name = ""
        while not name or name in taken:
            name = f"{stem}_{counts[stem]}" if counts[stem] else stem
            counts[stem] += 1
        names[node] = name
    return names


def _folder(call: ModuleCall) -> str:
    text = ""
    for part in call.path.split(".") if call.path else ():
        text += f".{part}" if part.isdecimal() and text else f"/{part}"
    return text


def name_nodes_by_path(model: ir.Model) -> dict[str, str]:
    """Rename the nodes of a model in place; returns a map from old to new names where they differ."""
    renamed: dict[str, str] = {}
    for node, name in _names_by_path(model).items():
        if node.name != name:
            renamed[node.name or ""] = name
            node.name = name
    return renamed


def name_values_by_path(model: ir.Model) -> dict[str, str]:
    """Name what nodes compute after the nodes, in place: ``/encoder/layer.0/attention/self/MatMul_1_output_0``.

    Inputs and outputs of the model and initializers keep their names. Returns the old names to the new ones where they
    differ.
    """
    kept = {*model.graph.inputs, *model.graph.outputs, *initializers(model)}
    taken = {value.name for value in kept}
    taken |= {value.name for node in all_nodes(model) for graph in nested_graphs(node) for value in graph.inputs}
    renamed: dict[str, str] = {}
    for node in all_nodes(model):
        for index, value in enumerate(node.outputs):
            if value in kept or not value.name:
                continue
            name = free_name(f"{node.name}_output_{index}", taken, first=1)
            if value.name != name:
                renamed[value.name] = name
                value.name = name
    return renamed


def name_by_path(model: ir.Model) -> dict[str, str]:
    """Name nodes, what they compute and the inputs of nested graphs after their modules, in place.

    Returns:
        The old names of what nodes compute to the new ones, where they differ.
    """
    name_nodes_by_path(model)
    inputs = [(node, value) for node in all_nodes(model) for graph in nested_graphs(node) for value in graph.inputs]
    taken: set[str | None] = set()
    for node, value in inputs:
        value.name = free_name(f"{node.name}_input", taken, first=1)
    return name_values_by_path(model)
