"""What a serialized model must not have, checked before ``onnx_ir`` reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from math import prod

import onnx
import onnx_ir as ir

from modelexport.core.limits import CALL_DEPTH, INLINED_NODES, LARGEST_OPSET
from modelexport.errors import FileFormatError
from modelexport.files.protobuf_reading import (
    graphs_in,
    serialized_graphs,
    serialized_nodes,
    serialized_tensors,
    with_nested,
)
from modelexport.format.keys import HIERARCHY_TAGS_ATTRIBUTE, SOURCE_MODULE_ATTRIBUTE

DEFAULT_DOMAIN = "ai.onnx"
"""The other name of the operator set whose name is empty."""
_VALUES = {onnx.AttributeProto.TENSOR: "t", onnx.AttributeProto.GRAPH: "g", onnx.AttributeProto.TYPE_PROTO: "tp"}
_SPARSE = (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS)
_TAGS = (SOURCE_MODULE_ATTRIBUTE, HIERARCHY_TAGS_ATTRIBUTE)
_TYPES = {*onnx.TensorProto.DataType.values()} - {onnx.TensorProto.UNDEFINED}
_NUMBERS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_MOST_IN_ONE = 4
"""Two-bit elements in one number of ``int32_data``."""

_Key = tuple[str, str, str]


def check_model(model: onnx.ModelProto) -> None:
    """Refuse what would be lost without an error, could not be computed, or would fail when it is used.

    Commands that only read refuse it, too: they would describe another model.
    """
    if model.training_info:
        raise FileFormatError("the model has training_info, which is not read: remove it from the file")
    for graph in serialized_graphs(model):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise FileFormatError(f"the initializer {name!r} is sparse, which is not read: make it dense")
        _check_acyclic(graph.node)
    _check_functions(model)
    _check_operator_sets(model.opset_import, model.graph.node)
    for function in model.functions:
        _check_operator_sets(function.opset_import, function.node)
    for node in serialized_nodes(model):
        if not node.output:
            raise FileFormatError(f"the node {node.name!r} ({node.op_type}) has no outputs")
        if node.op_type == "Constant" and node.domain in ("", DEFAULT_DOMAIN):
            values = [attribute.name for attribute in node.attribute if attribute.name not in _TAGS]
            if len(values) != 1:
                raise FileFormatError(f"the Constant {node.name!r} has {len(values)} values, not one")
        for attribute in node.attribute:
            field = _VALUES.get(attribute.type)
            if field is not None and not attribute.ref_attr_name and not attribute.HasField(field):
                raise FileFormatError(f"the attribute {attribute.name!r} of the node {node.name!r} has no value")
            if attribute.type in _SPARSE:
                raise FileFormatError(
                    f"the {attribute.name} of {node.output[0]!r} is sparse, which is not read: make it dense"
                )
    for tensor in serialized_tensors(model):
        _check_tensor(tensor)


def _check_operator_sets(imports: Iterable[onnx.OperatorSetIdProto], nodes: Iterable[onnx.NodeProto]) -> None:
    """Refuse versions that cannot exist, and nodes of operator sets that are not imported."""
    versions = {operators.domain or DEFAULT_DOMAIN: operators.version for operators in imports}
    for domain, version in versions.items():
        if not -LARGEST_OPSET <= version <= LARGEST_OPSET:
            raise FileFormatError(f"the model imports version {version} of the operator set {domain!r}")
    for node in with_nested(nodes):
        if (node.domain or DEFAULT_DOMAIN) not in versions:
            raise FileFormatError(
                f"the node {node.name!r} ({node.op_type}) is of the operator set {node.domain!r}, which the model "
                "does not import"
            )


def _check_acyclic(nodes: Sequence[onnx.NodeProto]) -> None:
    """Refuse nodes of which one depends on itself. They may be in any order."""
    maker = {name: number for number, node in enumerate(nodes) for name in node.output if name}
    needs = {number: {maker[name] for name in _used(node) if name in maker} for number, node in enumerate(nodes)}
    if all(before < number for number, makers in needs.items() for before in makers):
        return  # as nearly always
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        node = nodes[error.args[1][0]]
        raise FileFormatError(f"the node {node.name!r} ({node.op_type}) depends on its own outputs") from error


def _used(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node takes, with those that its nested graphs take from outside."""
    yield from node.input
    for graph in (graph for attribute in node.attribute for graph in graphs_in(attribute)):
        inside = {name for inner in graph.node for name in inner.output}
        inside.update(value.name for value in graph.input)
        inside.update(tensor.name for tensor in graph.initializer)
        yield from (name for inner in graph.node for name in _used(inner) if name not in inside)


def _check_tensor(tensor: onnx.TensorProto) -> None:
    """Refuse a tensor whose data is shorter or longer than its shape requires: reading it later would fail."""
    kind, name, is_raw = tensor.data_type, repr(tensor.name), tensor.HasField("raw_data")
    if kind not in _TYPES:
        raise FileFormatError(f"the tensor {name} has the unknown type {kind}")
    if tensor.HasField("segment"):
        raise FileFormatError(f"the tensor {name} is a segment of another one, which onnx does not read")
    if tensor.dims and min(tensor.dims) < 0:
        raise FileFormatError(f"the tensor {name} has a negative size")
    is_apart = tensor.data_location == onnx.TensorProto.EXTERNAL
    if kind == onnx.TensorProto.STRING and (is_apart or is_raw):
        held = "in another file" if is_apart else "as bytes"
        raise FileFormatError(f"the tensor {name} has texts {held}, which ONNX does not allow")
    if is_apart:
        return
    size = prod(tensor.dims)
    if is_raw:
        held_bytes = len(tensor.raw_data)
        if held_bytes != (size * ir.DataType(kind).bitwidth + 7) // 8:
            raise FileFormatError(f"the tensor {name} has {held_bytes:,} bytes for {size:,} elements")
        return
    held_numbers = max(len(getattr(tensor, field)) for field in _NUMBERS)
    if size > held_numbers * _MOST_IN_ONE:
        raise FileFormatError(f"the tensor {name} has data for {held_numbers:,} of {size:,} elements")
    try:
        onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise FileFormatError(f"the tensor {name} has data of another type or size: {error}") from error


def _check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, are not graphs, or call each other too often to be inlined."""
    if not model.functions:
        return
    for function in model.functions:
        if any(attribute.t.data_location == onnx.TensorProto.EXTERNAL for attribute in function.attribute_proto):
            raise FileFormatError(f"a default of the function {function.name!r} is in another file, which is not read")
        _check_body(function.name, function.node, {*function.input}, function.output)
    called = {
        (function.domain, function.name, function.overload): [_identifier(node) for node in with_nested(function.node)]
        for function in model.functions
    }
    inner = {key: [other for other in calls if other in called] for key, calls in called.items()}
    sizes: dict[_Key, int] = {}
    depth: dict[_Key, int] = {}
    try:
        for key in TopologicalSorter(inner).static_order():
            sizes[key] = len(called[key]) + sum(sizes[other] for other in inner[key])
            depth[key] = 1 + max((depth[other] for other in inner[key]), default=0)
    except CycleError as error:
        name = error.args[1][0][1]
        raise FileFormatError(f"the function {name!r} of the model calls itself: it cannot be inlined") from error
    if max(depth.values()) > CALL_DEPTH:
        raise FileFormatError(f"the calls of the model's functions are nested more than {CALL_DEPTH} deep")
    total = sum(1 + sizes.get(_identifier(node), 0) for node in with_nested(model.graph.node))
    if total > INLINED_NODES:
        raise FileFormatError(
            f"the model would have {total:,} nodes with its functions inlined, and at most {INLINED_NODES:,} are read"
        )


def _check_body(name: str, nodes: Iterable[onnx.NodeProto], known: set[str], outputs: Iterable[str]) -> None:
    """Refuse a function that uses a value before it is made, makes one twice, or gives one that nobody made."""
    results: set[str] = set()
    for node in nodes:
        _check_known(name, node.input, known)
        for graph in (graph for attribute in node.attribute for graph in graphs_in(attribute)):
            inside = {*known, *(value.name for value in (*graph.input, *graph.initializer))}
            _check_body(name, graph.node, inside, [value.name for value in graph.output])
        if again := next((value for value in node.output if value and value in results), None):
            raise FileFormatError(f"the function {name!r} of the model makes the value {again!r} twice")
        results.update(node.output)
        known.update(node.output)
    _check_known(name, outputs, known)


def _check_known(name: str, values: Iterable[str], known: set[str]) -> None:
    if missing := next((value for value in values if value and value not in known), None):
        raise FileFormatError(
            f"the function {name!r} of the model uses the value {missing!r}, which nothing made before"
        )


def _identifier(node: onnx.NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload
