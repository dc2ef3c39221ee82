"""Unique names for the values and nodes of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b

import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.graph.nodes import all_graphs, all_nodes, graphs_of, initializers, nested_graphs


def with_unique_names(model: ir.Model, names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Make the names of a graph's values unique, in place: the exporter may name a node's result like a parameter.

    Returns:
        The ``state_dict`` keys of its initializers, by the new names of the initializers.
    """
    keys = {value: names[value.name or ""] for value in initializers(model) if value.name in names}
    passes.NameFixPass()(model)
    return {value.name or "": names for value, names in keys.items()}


def names_in(model: ir.Model, *, without: Collection[ir.Node] = ()) -> set[str | None]:
    """The names of the values and nodes of a model, without those of some nodes."""
    taken = {value.name for value in (*initializers(model), *model.graph.inputs)}
    for node in all_nodes(model):
        if node not in without:
            taken.update((node.name, *(value.name for value in node.outputs)))
    return taken


def free_name(name: str, taken: set[str] | set[str | None], *, first: int = 2) -> str:
    """The name, with a number from ``first`` on behind it if something has it; it is taken then."""
    free, number = name, first
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    taken.add(free)
    return free


def name_new_nodes(nodes: Iterable[ir.Node], taken: set[str | None], label: str = "") -> None:
    """Give new nodes and the values that they compute names of their own, in place.

    Args:
        nodes: The nodes, with the new ones in their nested graphs.
        taken: The names that other things have. The new ones are added.
        label: What a taken name gets in front.
    """

    def unique(name: str) -> str:
        return free_name(f"{label}/{name}" if label and name in taken else name, taken)

    for node in nodes:
        for value in node.outputs:
            if value.name:
                value.name = unique(value.name)
        node.name = unique(node.name or (f"{label}/{node.op_type}" if label else node.op_type))
        for graph in nested_graphs(node):
            for value in (*graph.inputs, *graph.initializers.values()):
                value.name = unique(value.name or "value")
        for value in node.outputs:
            if value.name is None:
                value.name = unique(f"{node.name}.output")


def name_values_apart(model: ir.Model) -> None:
    """Give every value that a node computes a name that nothing else has in its graph and those around it, in place.

    Fusions of ONNX Runtime repeat names of the graph in its branches; it does not load what it has written then. Two
    branches of one node may have equal names.
    """
    _name_values_apart(model.graph, set(), names_in(model))


def _name_values_apart(graph: ir.Graph, around: set[str | None], taken: set[str | None]) -> None:
    own = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    for value in (value for node in graph for value in node.outputs if value.name):
        if value.name in own or value.name in around:
            value.name = free_name(value.name or "", taken)
        own.add(value.name)
    own -= around
    around |= own
    for nested in (nested for node in graph for nested in nested_graphs(node)):
        _name_values_apart(nested, around, taken)
    around -= own


@contextmanager
def branches_named_apart(source: ir.Model, changed: ir.Model) -> Iterator[None]:
    """While the block runs, a name identifies a value in the whole of the source and of the changed model.

    Two branches may have equal names. Where they do in one of the models, each name in such a branch begins with a mark
    of the branch, and so does each in the branch of the other model that is at the same place.
    """
    shared: set[str] = set()
    for model in (source, changed):
        repeats = Counter(value.name for graph in all_graphs(model) for value in _own_values(graph))
        for place, branch in _branches(model.graph):
            if any(value.name and repeats[value.name] > 1 for value in _own_values(branch)):
                shared.add(place)
    named: dict[ir.Value | ir.Node, str] = {}
    for place, branch in [entry for model in (source, changed) for entry in _branches(model.graph)]:
        if place in shared:
            named.update((item, item.name) for item in (*_own_values(branch), *branch) if item.name)
            mark = blake2b(place.encode(), digest_size=8).hexdigest()  # one word: no name is derived from its beginning
            for item in (*_own_values(branch), *branch):
                item.name = f"{mark}{item.name}" if item.name else item.name
    try:
        yield
    finally:
        for item, name in named.items():
            item.name = name


def names_of_initializers(model: ir.Model) -> dict[ir.Value, str]:
    """Initializers to their names, which begin with the place of their branch if another branch has such a name."""
    repeats = Counter(value.name for value in initializers(model))
    places = {value: place for place, branch in _branches(model.graph) for value in branch.initializers.values()}
    return {
        value: f"{places.get(value, '')}{value.name}" if repeats[value.name] > 1 else value.name or ""
        for value in initializers(model)
    }


def _branches(graph: ir.Graph, around: str = "") -> list[tuple[str, ir.Graph]]:
    """The branches and loop bodies in a graph, each with its place: ``y.then_branch.`` of the node that computes y."""
    found = []
    for node in graph:
        base = next((value.name for value in node.outputs if value.name), node.name)
        for attribute in node.attributes.values():
            for index, nested in enumerate(graphs_of(attribute)):
                place = f"{around}{base}.{attribute.name}{index or ''}."
                found += [(place, nested), *_branches(nested, place)]
    return found


def _own_values(graph: ir.Graph) -> list[ir.Value]:
    """The inputs, initializers and computed values of a graph, without those of nested graphs."""
    computed = (value for node in graph for value in node.outputs)
    return list(dict.fromkeys((*graph.inputs, *graph.initializers.values(), *computed)))


def name_nodes_apart(model: ir.Model) -> None:
    """Give every node a unique name that no initializer has either, in place.

    After the optimizer has run, names of nodes are unique only within their graph, and a parameter may have the name
    of a node.
    """
    taken = {value.name for value in initializers(model)}
    repeats: Counter[str] = Counter()
    for node in all_nodes(model):
        name = stem = node.name or node.op_type
        while name in taken:
            repeats[stem] += 1
            name = f"{stem}_{repeats[stem] + 1}"
        taken.add(name)
        node.name = name
