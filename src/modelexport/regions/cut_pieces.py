"""Nodes of a graph as a small model of their own, and a changed one put back in their place.

A library sees only the nodes that it is to change: what is kept cannot be changed, whatever the library does elsewhere
in a graph. The inputs and outputs of a piece keep their types, so that casts and scales are inside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.owners import Evidence, Owner
from modelexport.errors import UsageError
from modelexport.files.map_types import model_of
from modelexport.files.onnx_models import inside_file
from modelexport.files.protobuf_writing import to_proto
from modelexport.graph.bound_tensors import bind_tensors, share_tensor
from modelexport.graph.copies import copy_of, value_like
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.unique_names import free_name
from modelexport.weights.recorded_transforms import run_operator, since_version, tensor_attributes

MOVES_WEIGHTS = ("Transpose", "Split", "Slice", "Concat", "Squeeze", "Unsqueeze", "Reshape", "Identity")
"""Operators whose results have the elements of their first input, or of all inputs of ``Concat``, in another place."""


def cut_piece(model: ir.Model, nodes: Sequence[ir.Node]) -> onnx.ModelProto:
    """A model of some nodes of the main graph, which have no nested graphs, with their weights in it.

    Its inputs are the values that the nodes take from others, its outputs the values that others take from them; every
    value keeps its name. A weight that the graph transposes or cuts is in it as that: quantizers look for initializers.
    """
    inside = set(nodes)
    inputs = (value for node in nodes for value in node.inputs)
    taken = list(dict.fromkeys(value for value in inputs if value is not None and value.producer() not in inside))
    view = ir.GraphView(taken, outputs_of(nodes), nodes=nodes, opset_imports=model.opset_imports)
    graph = copy_of(view)
    for value, copied in zip(taken, list(graph.inputs), strict=True):
        if weight_behind(value) is not None:
            graph.inputs.remove(copied)
            bind_tensors({copied: _tensor(value, model.opset_imports)})
            graph.register_initializer(copied)
    return to_proto(ir.Model(graph, ir_version=model.ir_version), {})


def weight_behind(value: ir.Value | None) -> ir.Value | None:
    """The first initializer whose elements a value has (:func:`weights_behind`); ``None`` for any other value."""
    return next(iter(weights_behind(value)), None)


def weights_behind(value: ir.Value | None) -> tuple[ir.Value, ...]:
    """The initializers whose elements a value has, all or some of them, in any order; none if it is computed otherwise.

    A layer may use its weight transposed, an expert a slice of one, an LSTM its gates in another order, an attention
    its three weights as one.
    """
    if value is None:
        return ()
    producer = value.producer()
    if producer is not None:
        if producer.op_type not in MOVES_WEIGHTS or producer.domain:
            return ()
        moved = producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
        places = producer.inputs[len(moved) :]
        if not all(place is None or ir.convenience.get_const_tensor(place) is not None for place in places):
            return ()
        behind = [weights_behind(source) for source in moved]
        return tuple(dict.fromkeys(weight for weights in behind for weight in weights)) if all(behind) else ()
    is_weight = value.is_initializer() and not value.is_graph_input() and value.const_value is not None
    return (value,) if is_weight else ()


def _tensor(value: ir.Value, opsets: Mapping[str, int]) -> ir.TensorProtocol:
    """The tensor of a weight, with its elements where the graph puts them."""
    if value.producer() is None:
        assert value.const_value is not None
        return inside_file(value.const_value, at_once=True)
    return ir.tensor(np.ascontiguousarray(_elements(value, opsets)), name=value.name)


def _elements(value: ir.Value, opsets: Mapping[str, int]) -> np.ndarray:
    node = value.producer()
    if node is None or node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(value)
        assert tensor is not None
        return tensor.numpy()
    version = since_version(node.op_identifier(), opsets)
    assert version is not None
    inputs = [None if source is None else _elements(source, opsets) for source in node.inputs]
    attributes = tensor_attributes(node.attributes) | {"n_outputs": len(node.outputs)}
    results = run_operator("", node.op_type, version, inputs, attributes)
    return np.asarray(results[node.outputs.index(value)])


def outputs_of(nodes: Collection[ir.Node]) -> list[ir.Value]:
    """The values that nodes produce for others, or as outputs of the graph."""
    inside = set(nodes)
    outputs = (value for node in nodes for value in node.outputs)
    return [
        value for value in outputs if value.is_graph_output() or any(user not in inside for user in value.consumers())
    ]


class PieceInserter:
    """A graph in whose place of some nodes changed pieces are put, one after the other, in place."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._there: dict[str | None, ir.Value] = {
            value.name: value for node in model.graph for value in node.outputs if value.name
        }
        self._names = {node.name for node in model.graph}
        self._new: set[ir.Node] = set()

    def put(self, nodes: Sequence[ir.Node], changed: onnx.ModelProto) -> None:
        """Put a changed piece in the place of the nodes that it was made from.

        Each node gets the owners of the nodes that it leads to: what quantizes an activation belongs to the call that
        is quantized. A node or an initializer that another piece has brought already (two pieces quantize the same
        activation) is not brought twice.
        """
        graph = self._model.graph
        piece = model_of(changed)
        piece.graph.sort()  # some libraries append new nodes at the end
        import_operators(self._model, piece)
        leaving = outputs_of(nodes)
        taken = {value.name: value for node in nodes for value in node.inputs if value is not None}
        values: dict[ir.Value, ir.Value] = {value: taken[value.name] for value in piece.graph.inputs}
        values |= self._initializers(piece)
        for node in nodes:
            self._names.discard(node.name)
            for value in node.outputs:
                self._there.pop(value.name, None)
        replacing = self._nodes(piece, values, _owners(piece, nodes))
        by_name = {value.name: values[value] for value in piece.graph.outputs}
        arriving = [by_name[value.name] for value in leaving]
        ir.convenience.replace_nodes_and_values(graph, nodes[-1], list(nodes), replacing, leaving, arriving)
        for value in taken.values():
            if weight_behind(value) is not None:
                self._drop(value)
        for value in (values[initializer] for initializer in piece.graph.initializers.values()):
            if value.graph is None:  # it is not one that was there
                if (value.name or "") in graph.initializers:  # a kept node uses the one that has the name
                    value.name = f"{value.name}.{str(value.dtype).lower()}"
                graph.register_initializer(value)

    def _initializers(self, piece: ir.Model) -> dict[ir.Value, ir.Value]:
        """The graph's value for each initializer of a piece: an equal one of this name, or a new one."""
        values = {}
        for value in piece.graph.initializers.values():
            before = self._model.graph.initializers.get(value.name or "")
            if before is not None and same_tensors(before.const_value, value.const_value):
                values[value] = before
            else:
                values[value] = created = value_like(value)
                share_tensor(created, value)
        return values

    def _nodes(
        self, piece: ir.Model, values: dict[ir.Value, ir.Value], owners: Mapping[ir.Node, Owner | None]
    ) -> list[ir.Node]:
        """The nodes of a piece that the graph does not have yet, on the graph's values; their outputs join these."""
        there, created = self._there, []
        for node in piece.graph:
            inputs = [None if value is None else values[value] for value in node.inputs]
            twin = there[node.outputs[0].name].producer() if node.outputs[0].name in there else None
            if twin is not None and _is_same(twin, node, inputs):
                if twin in self._new:
                    set_owner(twin, _together([owner_of(twin), owners[node]]))
                values.update(zip(node.outputs, twin.outputs, strict=True))
                continue
            results = [value_like(value) for value in node.outputs]
            for value in (each for each in results if each.name):
                while value.name in there:
                    value.name = f"{value.name}_again"
                there[value.name] = value
            values.update(zip(node.outputs, results, strict=True))
            attributes = list(node.attributes.values())
            name = free_name(node.name or "quantized", self._names)
            created.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=results, name=name))
            set_owner(created[-1], owners[node])
        self._new.update(created)
        return created

    def _drop(self, value: ir.Value) -> None:
        """Remove a weight that nothing uses any more, and what moved its elements."""
        if value.uses() or value.is_graph_input() or value.is_graph_output():
            return
        producer = value.producer()
        if producer is None:
            self._model.graph.initializers.pop(value.name or "", None)
            return
        if producer.op_type not in (*MOVES_WEIGHTS, "Constant") or any(
            output.uses() or output.is_graph_output() for output in producer.outputs
        ):
            return
        sources = [source for source in producer.inputs if source is not None]
        self._names.discard(producer.name)
        for output in producer.outputs:
            self._there.pop(output.name, None)
        self._model.graph.remove(producer, safe=True)
        for source in sources:
            self._drop(source)


def import_operators(model: ir.Model, piece: ir.Model) -> None:
    """Add the sets of operators that a changed piece uses to those of a model."""
    used = {node.domain: 1 for node in piece.graph if node.domain}  # a library may forget to import them
    for domain, version in (used | piece.opset_imports).items():
        if (has := model.opset_imports.setdefault(domain, version)) != version:
            raise UsageError(
                f"the library needs version {version} of the operators of '{domain or 'ai.onnx'}', and the file has "
                f"{has}: export it with --opset {version}"
            )


def _owners(piece: ir.Model, replaced: Sequence[ir.Node]) -> dict[ir.Node, Owner | None]:
    """The owner of each node of a changed piece: of the replaced node with its result, or of the nodes it leads to."""
    before = {value.name: node for node in replaced for value in node.outputs if value.name}
    owners: dict[ir.Node, Owner | None] = {}
    for node in reversed(piece.graph):
        source = next((before[value.name] for value in node.outputs if value.name in before), None)
        if source is None:
            owners[node] = _together([owners[user] for value in node.outputs for user in value.consumers()])
        elif node.op_identifier() == source.op_identifier():
            owners[node] = owner_of(source)
        else:
            owners[node] = _together([owner_of(source)])
    for node in piece.graph:  # what leads to nothing: the scale of a result
        if owners[node] is None:
            makers = [value.producer() for value in node.inputs if value is not None]
            owners[node] = _together([owners[maker] for maker in makers if maker is not None])
    return owners


def _together(owners: Sequence[Owner | None]) -> Owner | None:
    """All calls of some owners, derived, with the line of the first."""
    known = [owner for owner in owners if owner is not None]
    calls = dict.fromkeys(call for owner in known for call in owner.calls)
    return Owner(tuple(calls), Evidence.DERIVED, known[0].line) if known else None


def same_tensors(first: ir.TensorProtocol | None, second: ir.TensorProtocol | None) -> bool:
    if first is None or second is None or first is second:
        return first is second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.dtype == ir.DataType.STRING:  # which has no bytes
        return bool(first.numpy().tolist() == second.numpy().tolist())
    return first.tobytes() == second.tobytes()


def _is_same(first: ir.Node, second: ir.Node, inputs: Sequence[ir.Value | None]) -> bool:
    return (
        first.op_identifier() == second.op_identifier()
        and list(first.inputs) == list(inputs)
        and len(first.outputs) == len(second.outputs)
        and first.attributes == second.attributes
    )
