"""Changes of nodes that may make a device compute them right, or run them; on the CPU they change nothing, or
bring the result nearer to that of the unquantized model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.core.owners import Owner, derived_owner
from modelexport.errors import UsageError
from modelexport.files.recipe_files import Rule
from modelexport.graph.copies import copy_of, value_like
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, nested_graphs, nodes_behind, required_inputs
from modelexport.graph.properties import drop_texts, put_texts, text_of
from modelexport.graph.unique_names import free_name, name_new_nodes, names_in
from modelexport.regions.region import Region, put, weights_of
from modelexport.runtime.saturating_products import make_unsigned
from modelexport.tagged.file import TaggedFile

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_WIDER = {ir.DataType.UINT8: (ir.DataType.UINT16, 0), ir.DataType.INT8: (ir.DataType.INT16, 128)}
"""Types of quantized activations to those of twice the bits, and what is added to 257 times the zero point."""
_STEPS = 257
"""The number of steps of a 16-bit type within one of the 8-bit type of the same range: 65535 / 255."""
_SIXTEEN_SINCE = 21
"""The version of ONNX's operators since which ``QuantizeLinear`` has 16-bit types; before, ONNX Runtime's own has."""


_BODY_OF = "modelexport.body_of"
"""The property of nodes of a function that names the node that it replaces; gone when the function is inlined."""


def change_nodes(model: ir.Model, kind: str, names: Collection[str | None]) -> bool:
    """Change some nodes of the main graph in place; returns whether there was something to change.

    New nodes get the owner of the node that they are for.

    Args:
        kind: One of :data:`CHANGES`.
    """
    nodes = [node for node in model.graph if node.name in names and node.op_type != "Constant"]
    before = set(all_nodes(model))
    if not nodes or not CHANGES[kind].make(model, nodes):
        return False
    new = {node: None for node in all_nodes(model) if node not in before}
    name_new_nodes(new, names_in(model, without=new))
    return True


def apply_changes(model: ir.Model, tagged: TaggedFile, rules: Sequence[Rule]) -> dict[str, int]:
    """Make the changes that rules ask for, in place; returns each change to the number of nodes that it was made for.

    Args:
        model: The model of a file, or one that was made from it.
    """
    changed = {rule.method: 0 for rule in rules}
    for rule in rules:
        inside = tagged.select(*rule.selectors).inside
        owners = {node.name: owner_of(node) for node in model.graph}
        names = {name for name, owner in owners.items() if owner is not None and not inside.isdisjoint(owner.calls)}
        # A change before may have removed a node of the file.
        if missing := set(rule.nodes) - names - {node.name for node in tagged.model.graph}:
            raise UsageError(f"{tagged.path} has no node '{min(missing)}' in {', '.join(rule.selectors)}")
        names = names.intersection(rule.nodes) if rule.nodes else names
        changed[rule.method] += len(names) if change_nodes(model, rule.method, names) else 0
    if idle := [change for change, count in changed.items() if not count]:
        selectors = ", ".join(word for rule in rules if rule.method == idle[0] for word in rule.selectors)
        raise UsageError(f"'{idle[0]}' ({CHANGES[idle[0]].words}) changes nothing in {selectors}")
    return changed


def _give(node: ir.Node, name: str | None, owner: Owner | None) -> None:
    """Give a new node the calls of another one, and a name that begins with that one's."""
    node.name = f"{name}.{node.op_type}" if name else node.op_type
    set_owner(node, derived_owner([owner]))


def _keep_apart(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Negate the values between the nodes twice."""
    inside = set(nodes)
    between = [
        value
        for node in nodes
        for value in node.outputs
        if value.dtype in _FLOATS and any(user in inside for user in value.consumers())
    ]
    for value in between:
        maker = value.producer()
        assert maker is not None
        uses = [(user, index) for user, index in value.uses() if user in inside]
        once, twice = value_like(value, f"{value.name}.negated"), value_like(value, f"{value.name}.apart")
        pair = [ir.node("Neg", [source], outputs=[result]) for source, result in ((value, once), (once, twice))]
        model.graph.insert_after(maker, pair)
        for node in pair:
            _give(node, maker.name, owner_of(maker))
        for user, index in uses:
            user.replace_input_with(index, twice)
    return bool(between)


def _by_definition(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Replace operators by the bodies that the standard gives for them, and ``GatherND`` by ``Gather``."""
    sources, changed = dict[str, Owner | None](), False
    for node in nodes:
        if (function := _definition(node, model.opset_imports)) is None:
            changed |= node.op_type == "GatherND" and _gather_flat(model, node)
            continue
        for inner in function:
            put_texts(inner, {_BODY_OF: node.name or ""})
        sources[node.name or ""] = owner_of(node)
        model.functions[function.identifier()] = function
        node.domain, node.op_type, node.overload = function.identifier()
    if sources:
        passes.InlinePass()(model)
    for inlined in model.graph if sources else ():
        if (name := text_of(inlined, _BODY_OF)) is not None:
            drop_texts([inlined], {_BODY_OF})
            _give(inlined, name, sources[name])
    return changed or bool(sources)


def _definition(node: ir.Node, opsets: Mapping[str, int]) -> ir.Function | None:
    """The function that defines a node's operator, in a domain of its own; ``None`` if the standard has none."""
    version = opsets.get("", 1)
    if node.domain or not onnx.defs.has(node.op_type):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, version, "")  # onnx has more of it than its type stubs
    plain = max((since for since in schema.function_opset_versions if since <= version), default=0)
    by_context = max(
        (since for since in schema.context_dependent_function_opset_versions if since <= version), default=0
    )
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
    computed = {name for inner in proto.node for name in inner.output}
    del proto.output[len(node.outputs) :]
    if not computed.issuperset(proto.output):  # of an optional output
        return None
    named = {*proto.attribute, *(attribute.name for attribute in proto.attribute_proto)}
    for name, attribute in schema.attributes.items():  # a call has to state what the node leaves to its default
        if name in named and name not in node.attributes and attribute.default_value.name:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)
    return ir.serde.deserialize_function(proto)


def _gather_flat(model: ir.Model, node: ir.Node) -> bool:
    """Replace a ``GatherND`` of constant places in a value of known sizes by a ``Gather`` along one axis."""
    data, places = node.inputs
    tensor = None if places is None else ir.convenience.get_const_tensor(places)
    if data is None or data.shape is None or not data.shape.is_static() or tensor is None:
        return False
    numbers, sizes = tensor.numpy(), data.shape.numpy()
    leading = sizes[: numbers.shape[-1]]
    if node.attributes.get_int("batch_dims", 0) or not leading:
        return False
    flat = np.ravel_multi_index(tuple(np.moveaxis(numbers % leading, -1, 0)), leading)
    arrays = np.array([-1, *sizes[len(leading) :]], np.int64), flat.astype(np.int64)
    constants = [ir.node("Constant", [], {"value": ir.tensor(array)}) for array in arrays]
    reshape = ir.node("Reshape", [data, constants[0].outputs[0]])
    result = value_like(node.outputs[0])
    gather = ir.node("Gather", [reshape.outputs[0], constants[1].outputs[0]], {"axis": 0}, outputs=[result])
    new = [*constants, reshape, gather]
    for inserted in new:
        _give(inserted, node.name, owner_of(node))
    reshape.outputs[0].type = data.type
    put(model, new, gather.outputs, Region.of([node]), {})
    return True


def _type_of(value: ir.Value | None) -> bytes:
    if value is None or value.type is None:
        return b""
    proto = onnx.TypeProto()
    ir.serde.serialize_type_into(proto, value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    content: bytes = proto.SerializeToString()
    return content


def _quantized_inputs(nodes: Sequence[ir.Node]) -> dict[ir.Node, list[ir.Node]]:
    """The nodes that quantize what some nodes take or return, to those that dequantize it again."""
    values = [value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None]
    makers = [maker for value in values if (maker := value.producer()) is not None]
    back = [maker.inputs[0].producer() for maker in makers if maker.op_type == "DequantizeLinear" and maker.inputs[0]]
    users = [user for node in nodes for value in node.outputs for user in value.consumers()]
    quantizers = {node for node in (*nodes, *makers, *back, *users) if node is not None}
    return {
        node: list(node.outputs[0].consumers())
        for node in sorted(quantizers, key=lambda node: node.name or "")
        if node.op_type == "QuantizeLinear"
        and not node.outputs[0].is_graph_output()
        and all(user.op_type == "DequantizeLinear" for user in node.outputs[0].consumers())
    }


def _in_sixteen_bits(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Quantize activations to 16 bits, with the ranges that they have in 8."""
    changed, taken = False, names_in(model)
    for quantizer, users in _quantized_inputs(nodes).items():
        scale, zero = (ir.convenience.get_const_tensor(v) if v is not None else None for v in quantizer.inputs[1:3])
        if scale is None or zero is None or zero.dtype not in _WIDER:
            continue
        dtype, shift = _WIDER[zero.dtype]
        arrays = (scale.numpy() / scale.numpy().dtype.type(_STEPS), zero.numpy().astype(np.int64) * _STEPS + shift)
        tensors = (ir.tensor(arrays[0]), ir.tensor(arrays[1].astype(dtype.numpy())))
        for index, tensor in enumerate(tensors, 1):
            source = quantizer.inputs[index]
            assert source is not None
            value = ir.val(free_name(f"{source.name}.int16", taken), const_value=tensor)
            model.graph.register_initializer(value)
            for node in (quantizer, *users):
                node.replace_input_with(index, value)
        quantizer.outputs[0].type = ir.TensorType(dtype)  # copies of a model share the types of values
        if model.opset_imports.get("", 1) < _SIXTEEN_SINCE:
            model.opset_imports.setdefault("com.microsoft", 1)
            for node in (quantizer, *users):
                node.domain = "com.microsoft"
        changed = True
    passes.RemoveUnusedNodesPass()(model)
    return changed


def _without_quantization(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Give the nodes that dequantize a value, or their users, the value itself."""
    quantized = _quantized_inputs(nodes)
    for quantizer, users in quantized.items():
        source = quantizer.inputs[0]
        assert source is not None
        for user in users:
            if user.outputs[0].is_graph_output():
                user.op_type, user.domain = "Identity", ""
                user.attributes.clear()
                user.resize_inputs(1)
                user.replace_input_with(0, source)
            else:
                ir.convenience.replace_all_uses_with(user.outputs[0], source)
    passes.RemoveUnusedNodesPass()(model)
    return bool(quantized)


def _on_processor(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Put the nodes into a branch: devices that compile do not enter ``If``, and the CPU runs what is in it.

    The condition, that an input has at least 0 elements, always holds, and is not computed before the file runs.
    """
    region = Region.of(nodes)
    taken, leaving = [*region.inputs, *weights_of(nodes)], region.outputs
    loops = not region.nodes.keys().isdisjoint(nodes_behind(region.inputs))
    shaped = all(value.dtype is not None and value.shape is not None for value in leaving)
    if loops or not shaped or not required_inputs(model) or any(nested_graphs(node) for node in nodes):
        return False
    computed, otherwise = copy_of(ir.GraphView(taken, leaving, nodes=nodes, name="processor")), []
    for value, copied in zip(taken, computed.inputs, strict=True):  # a branch takes values of the graph around it
        ir.convenience.replace_all_uses_with(copied, value)
    computed.inputs.clear()
    for value in leaving:
        assert value.dtype is not None
        assert value.shape is not None
        sizes = np.array([size if isinstance(size, int) else 0 for size in value.shape], np.int64)
        constant = ir.node("Constant", [], {"value": ir.tensor(sizes)})
        fill = {"value": ir.tensor(np.zeros(1, value.dtype.numpy()))}
        otherwise += [constant, ir.node("ConstantOfShape", constant.outputs, fill)]
    for value in computed.outputs:
        value.name = f"{value.name}.computed"
    count = ir.node("Size", required_inputs(model)[:1])
    none = ir.node("Constant", [], {"value": ir.tensor(np.array(-1, np.int64))})
    holds = ir.node("Greater", [count.outputs[0], none.outputs[0]])
    branches = {
        "then_branch": computed,
        "else_branch": ir.Graph([], [n.outputs[0] for n in otherwise[1::2]], nodes=otherwise, name="never"),
    }
    added = [count, none, holds, ir.node("If", holds.outputs, branches, num_outputs=len(leaving))]
    for node in (*otherwise, *added):
        _give(node, nodes[-1].name, owner_of(nodes[-1]))
    put(model, added, added[-1].outputs, region, {})
    return True


class Change(NamedTuple):
    """A change of nodes in place."""

    words: str
    """What the nodes are after it, for messages."""
    make: Callable[[ir.Model, Sequence[ir.Node]], bool]
    """Makes the change; returns whether there was something to change."""


CHANGES: Mapping[str, Change] = {
    "uint8": Change("with weights as uint8 instead of int8, whose products no processor saturates", make_unsigned),
    "apart": Change("kept apart by two negations, so that the device does not fuse them", _keep_apart),
    "definition": Change("replaced by the function that ONNX defines the operator as", _by_definition),
    "int16": Change("with activations of 16 bits instead of 8", _in_sixteen_bits),
    "float": Change("computed without quantization", _without_quantization),
    "processor": Change("put into a branch that only the CPU runs", _on_processor),
}
"""Changes that may make a device run nodes, or compute them right; those that cost the device least come first."""
