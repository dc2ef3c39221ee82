"""Equal FX nodes are translated once: the ONNX nodes of the first one are the template for the others.

``torch.onnx`` looks up a Python function for each FX node and calls it; the function records ONNX nodes. What it
records follows from its arguments: Python values, and ONNX values of which it reads type, shape and content. So for a
node with equal arguments the recorded nodes are copied. The copies use the constants of the first node, because
``torch.onnx`` also makes a constant of a Python number once. A function that reads more than its
arguments, such as what produced them, says so with :func:`reads_producers`.

Private names of ``torch.onnx`` are in this file only: ``_dispatching.dispatch``, which looks up the function,
``_core._set_node_metadata``, and ``_tensors.SymbolicTensor``, the class of the recorded values.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import evaluator
from torch.onnx._internal.exporter import _core, _dispatching
from torch.onnx._internal.exporter._tensors import SymbolicTensor

from modelexport.capture.repeats import NotComparableError, comparable
from modelexport.core.attributes import attribute_set
from modelexport.graph.copies import typed_as
from modelexport.graph.nodes import PLAIN_TYPES

_READS_PRODUCERS = "modelexport_reads_producers"

Function = Callable[..., Any]
_Place = tuple[int, int] | int | ir.Value | None
"""Where a value of a template is: an output of one of its nodes, an argument, a constant of the graph, or nowhere."""


def reads_producers(function: Function) -> Function:
    """Mark a translation that reads more of its arguments than their types, shapes and contents."""
    setattr(function, _READS_PRODUCERS, True)
    return function


@contextmanager
def translated_once(*, reuse: bool = True) -> Iterator[None]:
    """Inside, ``torch.onnx.export`` calls the translation of equal FX nodes once. The graph is the same without."""
    if not reuse:
        yield
        return
    dispatch = _dispatching.dispatch
    known: dict[Hashable, _Template] = {}

    def dispatch_once(node: torch.fx.Node, registry: Any) -> tuple[Function | None, str]:
        function, message = dispatch(node, registry)
        if function is None or hasattr(function, _READS_PRODUCERS):
            return function, message
        return functools.partial(_translate, known, function), message

    with (
        attribute_set(_dispatching, "dispatch", dispatch_once),
        attribute_set(_core, "_set_node_metadata", _metadata_once(_core._set_node_metadata)),
    ):
        yield


def _metadata_once(write: Callable[[torch.fx.Node, ir.Node], None]) -> Callable[[torch.fx.Node, ir.Node], None]:
    """The nodes of one FX node, which come one after the other, have the same metadata."""
    last: torch.fx.Node | None = None
    written: dict[str, str] = {}

    def write_once(fx_node: torch.fx.Node, node: ir.Node) -> None:
        nonlocal last, written
        if fx_node is last:
            node.metadata_props.update(written)
            return
        before = set(node.metadata_props)
        write(fx_node, node)
        last, written = fx_node, {key: text for key, text in node.metadata_props.items() if key not in before}

    return write_once


def _translate(known: dict[Hashable, _Template], function: Function, *args: Any, **kwargs: Any) -> Any:
    """What a translation returns; its nodes are recorded by the evaluator that is running."""
    recorder: Any = evaluator.default()
    values: dict[ir.Value, int] = {}
    try:
        key = (function, id(recorder.constant_farm), _described(args, values), _described(kwargs, values))
    except NotComparableError:
        return function(*args, **kwargs)
    if key in known:
        return known[key].stamp(recorder, list(values))
    result = function(*args, **kwargs)
    template = _record(recorder, values, result)
    if template is not None:
        known[key] = template
    return result


def _described(value: Any, values: dict[ir.Value, int]) -> Hashable:
    """What a translation can read of an argument. Values are numbered in the order in which they first come.

    Raises:
        NotComparableError: It cannot be said whether another argument is equal.
    """
    if isinstance(value, ir.Value):
        if value in values:
            return ("again", values[value])
        values[value] = len(values)
        shape = None if value.shape is None else tuple(map(str, value.shape))
        # A value that has its content can be read: it is equal to itself only.
        content = None if value.const_value is None else id(value)
        return ("value", repr(value.type), shape, content, isinstance(value, SymbolicTensor))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_described(part, values) for part in value))
    if isinstance(value, Mapping):
        return ("dict", *((key, _described(part, values)) for key, part in value.items()))
    return comparable(value, {})


@dataclass(frozen=True)
class _Output:
    name: str | None
    shape: ir.Shape | None
    type: ir.TypeProtocol | None
    symbolic: bool


@dataclass(frozen=True)
class _Node:
    identifier: ir.OperatorIdentifier
    version: int | None
    inputs: tuple[_Place, ...]
    attributes: tuple[ir.Attr, ...]
    outputs: tuple[_Output, ...]
    name: str | None
    metadata: Mapping[str, str]

    def made(self, opset: Any, find: Callable[[_Place], ir.Value | None]) -> ir.Node:
        outputs = []
        for output in self.outputs:
            value = SymbolicTensor(opset, name=output.name) if output.symbolic else ir.Value(name=output.name)
            value.shape, value.type = typed_as(output.shape, output.type)
            outputs.append(value)
        domain, op_type, overload = self.identifier
        return ir.Node(
            domain,
            op_type,
            [find(place) for place in self.inputs],
            [_fresh(attribute) for attribute in self.attributes],
            outputs=outputs,
            overload=overload,
            version=self.version,
            name=self.name,
            metadata_props=dict(self.metadata),
        )


@dataclass(frozen=True)
class _Template:
    """The nodes that a translation records, without the constants that the graph has once, and what it returns."""

    nodes: tuple[_Node, ...]
    result: Any
    """A place, or a list or tuple of results."""
    farm: Any
    """The constants of the graph; kept, so that no other graph's have the same ``id``."""

    def stamp(self, recorder: Any, values: Sequence[ir.Value]) -> Any:
        made: list[ir.Node] = []

        def find(place: _Place) -> ir.Value | None:
            if isinstance(place, int):
                return values[place]
            return made[place[0]].outputs[place[1]] if isinstance(place, tuple) else place

        for template in self.nodes:
            node = template.made(recorder.opset, find)
            made.append(node)
            recorder.nodes.append(node)
        return _mapped(self.result, find)


@dataclass(frozen=True)
class _Several:
    """A list or tuple of results; a tuple alone is a place."""

    kind: type
    parts: tuple[Any, ...]


def _mapped(result: Any, find: Callable[[_Place], ir.Value | None]) -> Any:
    if isinstance(result, _Several):
        return result.kind(_mapped(part, find) for part in result.parts)
    return find(result)


class _NoTemplateError(Exception):
    """What a translation recorded cannot be copied."""


def _record(recorder: Any, values: Mapping[ir.Value, int], result: Any) -> _Template | None:
    """The template of what a translation has just recorded; ``None`` if it cannot be copied."""
    shared = {value for value in recorder.constant_farm.values() if isinstance(value, ir.Value)}
    nodes = [node for node in recorder.nodes if not any(value in shared for value in node.outputs)]
    inside = {value: (i, j) for i, node in enumerate(nodes) for j, value in enumerate(node.outputs)}

    def place(value: ir.Value | None) -> _Place:
        if value is None or value in shared:
            return value
        if value in values:
            return values[value]
        if value not in inside:
            raise _NoTemplateError
        return inside[value]

    def returned(value: Any) -> Any:
        if type(value) in (list, tuple):
            return _Several(type(value), tuple(map(returned, value)))
        if isinstance(value, ir.Value):
            return place(value)
        raise _NoTemplateError

    try:
        recorded = tuple(_node(node, place) for node in nodes)
        return _Template(recorded, returned(result), recorder.constant_farm)
    except _NoTemplateError:
        return None


def _node(node: ir.Node, place: Callable[[ir.Value | None], _Place]) -> _Node:
    if node.meta or node.doc_string or not all(type(value) in (SymbolicTensor, ir.Value) for value in node.outputs):
        raise _NoTemplateError
    return _Node(
        node.op_identifier(),
        node.version,
        tuple(map(place, node.inputs)),
        tuple(map(_fresh, node.attributes.values())),
        tuple(map(_output, node.outputs)),
        node.name,
        dict(node.metadata_props),
    )


def _output(value: ir.Value) -> _Output:
    if value.const_value is not None or value.meta or value.metadata_props or value.doc_string:
        raise _NoTemplateError
    return _Output(value.name, *typed_as(value.shape, value.type), isinstance(value, SymbolicTensor))


def _fresh(attribute: ir.Attr) -> ir.Attr:
    """An attribute for another node. A tensor is copied without its content: passes give tensors names."""
    if attribute.is_ref() or attribute.doc_string:
        raise _NoTemplateError
    if attribute.type in PLAIN_TYPES:
        return attribute
    if attribute.type != ir.AttributeType.TENSOR:
        raise _NoTemplateError
    return ir.AttrTensor(attribute.name, copy.copy(attribute.value))
