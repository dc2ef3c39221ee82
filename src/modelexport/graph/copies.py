"""Copies of models, graphs and values. A graph that is damaged, so that it cannot be copied, is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import onnx_ir as ir

from modelexport.errors import FileFormatError
from modelexport.graph.properties import properties_of, put_texts

Copied = TypeVar("Copied", ir.Model, ir.Graph, ir.Function)


@overload
def copy_of(original: Copied) -> Copied: ...
@overload
def copy_of(original: ir.GraphView) -> ir.Graph: ...
def copy_of(original: Any) -> Any:
    """A copy that shares the tensors."""
    try:
        copied = original.clone()
        copied.meta.update(original.meta)  # onnx_ir leaves out that of models
        return copied
    except (RuntimeError, ValueError, LookupError) as error:
        raise FileFormatError(
            "the model is damaged: a node uses a value before it is made, or two nodes make the same one"
        ) from error


def value_like(value: ir.Value, name: str | None = None, tensor: ir.TensorProtocol | None = None) -> ir.Value:
    """A value of the same type and shape, with the same name if no other is given."""
    shape = None if value.shape is None else value.shape.copy()
    return ir.Value(name=value.name if name is None else name, type=value.type, shape=shape, const_value=tensor)


def model_like(whole: ir.Model, graph: ir.Graph, functions: Iterable[ir.Function]) -> ir.Model:
    """A model of a graph with what another says of itself."""
    model = ir.Model(
        graph,
        ir_version=whole.ir_version,
        producer_name=whole.producer_name,
        producer_version=whole.producer_version,
        domain=whole.domain,
        model_version=whole.model_version,
        doc_string=whole.doc_string,
        functions=list(functions),
    )
    put_texts(model, properties_of(whole))
    model.meta.update(whole.meta)
    return model


def with_graphs(attribute: ir.Attr, copied: Callable[[ir.Graph], ir.Graph]) -> ir.Attr:
    """An attribute with copies of the graphs that it holds; itself if it holds none."""
    if attribute.is_ref():
        return attribute
    if attribute.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attribute.name, copied(attribute.as_graph()))
    if attribute.type == ir.AttributeType.GRAPHS:
        return ir.AttrGraphs(attribute.name, [copied(graph) for graph in attribute.as_graphs()])
    return attribute
