"""The graph of a file as the page draws it: which values its nodes take and give, and what is known of these.

Texts that many nodes and values share, such as types and attributes, are listed once and referred to by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from modelexport.core.text import shortened
from modelexport.format.dtypes import dtype_name
from modelexport.graph.attribute_texts import typed_text
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import graphs_of, nested_graphs, sizes_of, stored_tensors
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.runtime.shapes import Shapes
from modelexport.tagged.file import TaggedFile

if TYPE_CHECKING:  # which imports the runtime
    from modelexport.traces.value_ranges import ValueRange

_ATTRIBUTE = 60
"""The most characters of an attribute that are shown."""
WEIGHT, RESULT = 1, 2
"""Marks of a value: it is a weight or a constant; it is an output of the graph or of a nested one."""


@dataclass
class Listed:
    """Distinct texts, each with its number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


@dataclass(frozen=True)
class PageGraph:
    """What the page's script reads of a graph."""

    nodes: list[list[Any]]
    """For each node of the file, in order: the numbers of the values that it takes and gives, of its attributes and its
    line of code, and for a node in a nested graph the number of the enclosing node and the name of the graph."""
    values: list[list[Any]]
    """Name, number of the type, what else it is, and of what was computed the range."""
    types: list[str]
    attributes: list[str]
    lines: list[str]


def page_graph(
    tagged: TaggedFile, shapes: Shapes | None = None, ranges: Mapping[ir.Value, ValueRange] | None = None
) -> PageGraph:
    """The graph of a file.

    Args:
        shapes: Shapes of values whose shape the file does not have.
        ranges: What values were when the file was run.
    """
    types, attributes, lines = Listed(), Listed(), Listed()
    weights = {value for value, _ in stored_tensors(tagged.model)}
    results = {value for graph in tagged.model.graphs() for value in graph.outputs}
    numbers: dict[ir.Value, int] = {}
    values: list[list[Any]] = []

    def number(value: ir.Value) -> int:
        if value not in numbers:
            numbers[value] = len(values)
            kind = WEIGHT * (value in weights) + RESULT * (value in results)
            known = [] if ranges is None or value not in ranges else [_numbers(ranges[value])]
            values.append([_name(value), types.number(type_text(value, shapes)), kind, *known])
        return numbers[value]

    places = {node: index for index, node in enumerate(tagged.nodes)}
    around = {
        inner: (places[node], attribute.name if len(nested_graphs(node)) > 1 else "")
        for node in tagged.nodes
        for attribute in node.attributes.values()
        for graph in graphs_of(attribute)
        for inner in graph
    }
    nodes = [
        [
            [number(value) for value in node.inputs if value is not None],
            [number(value) for value in node.outputs if value.name],
            attributes.number(attributes_text(node)),
            lines.number(owner.line if (owner := owner_of(node)) is not None else ""),
            *around.get(node, ()),
        ]
        for node in tagged.nodes
    ]
    return PageGraph(nodes, values, list(types.numbers), list(attributes.numbers), list(lines.numbers))


def _numbers(numbers: ValueRange) -> list[Any]:
    """Smallest and largest, how many elements there are, are zero, NaN and infinite, and those by powers of two."""
    known = numbers.smallest <= numbers.largest
    first = min(numbers.powers, default=0)
    powers = [numbers.powers[power] for power in range(first, max(numbers.powers, default=-1) + 1)]
    ends = [numbers.smallest, numbers.largest] if known else [None, None]
    return [*ends, numbers.elements, numbers.zeros, numbers.nan, numbers.infinite, first, powers]


def type_text(value: ir.Value, shapes: Shapes | None = None) -> str:
    """Element type and shape of a value, as far as they are known: ``float32[batch, 16, 128]``."""
    tensor = value.const_value
    dtype = value.dtype or (shapes.types.get(value.name or "") if shapes is not None else None)
    name = dtype_name(dtype) if dtype is not None else "?"
    sizes: list[Any] | None = None
    if tensor is not None:
        sizes = list(tensor.shape)
    elif value.shape is not None and None not in sizes_of(value):
        sizes = list(sizes_of(value))
    elif shapes is not None and (known := shapes.of(value)) is not None:
        sizes = list(known)
    return name if sizes is None else typed_text(name, sizes)


def attributes_text(node: ir.Node) -> str:
    """The attributes of a node, without the graphs inside it."""
    shown = []
    for attribute in node.attributes.values():
        if attribute.is_ref() or graphs_of(attribute):
            continue
        if attribute.type is ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            text = str(tensor.numpy().tolist()) if tensor.size <= 4 else f"{dtype_name(tensor.dtype)} {tensor.shape}"
        else:
            value = attribute.value
            text = str(list(value)) if isinstance(value, tuple) else str(value)
        shown.append(f"{attribute.name} = {shortened(text, _ATTRIBUTE)}")
    return ", ".join(shown)


def _name(value: ir.Value) -> str:
    """The name to show for a value; for a parameter its ``state_dict`` key."""
    plan = parameter_plan(value)
    return (plan.keys[0] if plan is not None and plan.keys else value.name) or ""
