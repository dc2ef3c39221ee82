"""Changes of a file that may make a device compute it right; each computes the same as before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.files.atomic_writing import check_writable
from modelexport.graph.copies import value_like
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.unique_names import free_name
from modelexport.precision.quantize import infer_types
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.surgery.edited_files import Documents
from modelexport.surgery.shared_files import SharedFiles
from modelexport.tagged.encodings.encoded import encoded
from modelexport.tagged.file import read_tagged

Kind = Literal["apart", "body", "float"]
"""``apart``: nodes are kept from being fused. ``body``: operators are replaced by the functions that define them.
``float``: without quantization between the nodes."""
KINDS: Mapping[Kind, str] = {
    "apart": "kept apart by two negations, so that the device does not fuse them",
    "body": "replaced by the function that defines it",
    "float": "computed without quantization",
}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def change_nodes(model: ir.Model, kind: Kind, names: Sequence[str]) -> bool:
    """Change some nodes of the main graph in place; returns whether there was something to change.

    The nodes that come in get the owner of the node that they are for.
    """
    wanted = set(names)
    nodes = [node for node in model.graph if node.name in wanted]
    changed: dict[Kind, Callable[[ir.Model, Sequence[ir.Node]], bool]] = {
        "apart": _keep_apart,
        "body": _by_definition,
        "float": _without_quantization,
    }
    return bool(nodes) and changed[kind](model, nodes)


def _keep_apart(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Negate the values between the nodes twice."""
    own = set(nodes)
    between = [
        value
        for node in nodes
        for value in node.outputs
        if value.dtype in _FLOATS and any(user in own for user in value.consumers())
    ]
    for value in between:
        maker = value.producer()
        assert maker is not None
        users = [(user, index) for user, index in value.uses() if user in own]
        once, twice = value_like(value, f"{value.name}.negated"), value_like(value, f"{value.name}.apart")
        inserted = [ir.Node("", "Neg", [value], outputs=[once]), ir.Node("", "Neg", [once], outputs=[twice])]
        before = set(model.graph)
        model.graph.insert_after(maker, inserted)
        for node in inserted:
            set_owner(node, owner_of(maker))
        _name_new(model, before, maker.name or "")
        for user, index in users:
            user.replace_input_with(index, twice)
    return bool(between)


def _by_definition(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Replace operators by the bodies that the standard gives for them."""
    changed = False
    for node in nodes:
        function = _definition(node, model.opset_imports)
        if function is None:
            continue
        before, owner = set(model.graph), owner_of(node)
        model.functions[function.identifier()] = function
        node.domain, node.op_type, node.overload = function.identifier()
        passes.InlinePass()(model)
        for inlined in [one for one in model.graph if one not in before]:
            set_owner(inlined, owner)
        _name_new(model, before, node.name or "")
        changed = True
    return changed


def _definition(node: ir.Node, opsets: Mapping[str, int]) -> ir.Function | None:
    """The function that defines a node's operator, in a domain of its own; ``None`` if the standard has none."""
    version = opsets.get("", 1)
    if node.domain or not onnx.defs.has(node.op_type):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, version, "")  # onnx has more of it than its type stubs
    plain = max((one for one in schema.function_opset_versions if one <= version), default=0)
    by_context = max((one for one in schema.context_dependent_function_opset_versions if one <= version), default=0)
    if by_context > plain:
        types = [_type_of(value) for value in node.inputs]
        serialized = ir.serde.serialize_node(node).SerializeToString()
        content = schema.get_context_dependent_function_with_opset_version(by_context, serialized, types)
    elif plain:
        content = schema.get_function_with_opset_version(plain)
    else:
        return None
    proto = onnx.FunctionProto.FromString(content)
    proto.domain, proto.name = "modelexport.body", f"{node.op_type} {node.name}"
    del proto.opset_import[:]
    proto.opset_import.add(domain="", version=version)
    made = {name for inner in proto.node for name in inner.output}
    del proto.output[len(node.outputs) :]
    if not made.issuperset(proto.output):  # of an optional output
        return None
    named = {*proto.attribute, *(attribute.name for attribute in proto.attribute_proto)}
    for name, attribute in schema.attributes.items():  # a call has to state what the node leaves to its default
        if name in named and name not in node.attributes and attribute.default_value.name:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)
    return ir.serde.deserialize_function(proto)


def _type_of(value: ir.Value | None) -> bytes:
    if value is None or value.type is None:
        return b""
    proto = onnx.TypeProto()
    ir.serde.serialize_type_into(proto, value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    content: bytes = proto.SerializeToString()
    return content


def _without_quantization(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Give the users of a value that is quantized and dequantized the value itself."""
    changed = False
    for node in nodes:
        for value in list(node.inputs) if node.op_type not in ("QuantizeLinear", "DequantizeLinear") else ():
            restored = value.producer() if value is not None else None
            source = restored.inputs[0] if restored is not None and restored.op_type == "DequantizeLinear" else None
            quantized = source.producer() if source is not None else None
            if value is None or quantized is None or quantized.op_type != "QuantizeLinear":
                continue
            before = quantized.inputs[0]
            for user, index in value.uses():
                if user is node and before is not None:
                    node.replace_input_with(index, before)
                    changed = True
    if changed:
        passes.RemoveUnusedNodesPass()(model)
    return changed


def _name_new(model: ir.Model, before: set[ir.Node], stem: str) -> None:
    """Unique names for nodes that came in, and for their values."""
    names = {node.name for node in before}
    values = {value.name for node in before for value in node.outputs} | set(model.graph.initializers)
    for node in [one for one in model.graph if one not in before]:
        node.name = free_name(f"{stem}.{node.op_type}", names)
        names.add(node.name)
        for value in node.outputs:
            if not value.is_graph_output() and (value.name is None or value.name in values):
                value.name = free_name(f"{node.name}.{value.name or 'output'}", values)
            values.add(value.name)


def write_changed(source: Path, changes: Iterable[tuple[Kind, Sequence[str]]], output: Path) -> None:
    """Write a tagged file with changes, made one after the other, and with documents that are true of it.

    Raises:
        OutputError: It cannot be written.
    """
    check_writable(output, [source])
    tagged = read_tagged(source)
    documents = Documents(tagged)
    infer_types(tagged.model)
    for kind, names in changes:
        change_nodes(tagged.model, kind, names)
    beside = documents.of_edited(tagged.call_tags)
    model = encoded(tagged.model, tagged.call_tags, tagged.encoding)
    with checked_and_written(output.parent, [source]) as staging:
        SharedFiles(tagged.model, output, staging).save(model, output.name, beside)


def kinds_for(operators: Sequence[str]) -> Iterator[Kind]:
    """The changes that are tried for some nodes, those first that leave more on the device."""
    if any(operator in ("QuantizeLinear", "DequantizeLinear") for operator in operators):
        yield "float"
    if len(operators) > 1:
        yield "apart"
    yield "body"
