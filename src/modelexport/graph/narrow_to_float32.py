"""Computes narrow floating-point numbers in float32, where a runtime has no kernels for them.

Kernels of such types compute in float32 and round what they give. So do these graphs: a node computes in float32, and
its results are rounded to the narrow type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir

from modelexport.graph.bound_tensors import bind_tensors
from modelexport.graph.copies import copy_of
from modelexport.graph.missing_types import fill_types
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, initializers, inputs_and_results, nested_graphs

NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
OPERATION = "modelexport.operation"
"""The key in ``ir.Node.meta`` of what is equal for all nodes that were made for one operation of the model."""


def narrow_values(model: ir.Model) -> dict[str, ir.DataType]:
    """The names of the values of narrow types to their types, inputs and initializers included."""
    return {
        value.name or "": value.dtype
        for value in (*inputs_and_results(model), *initializers(model))
        if value.dtype in NARROW and value.name
    }


def widened(model: ir.Model) -> ir.Model:
    """A copy of a model without functions in which all narrow values are float32, rounded to their types.

    Values keep their names. Tensors that are not narrow are shared.
    """
    copy = copy_of(model)
    narrow = {
        value: dtype
        for value in dict.fromkeys((*inputs_and_results(copy), *initializers(copy)))
        if (dtype := value.dtype) in NARROW and dtype is not None
    }
    for value in narrow:
        value.type = ir.TensorType(ir.DataType.FLOAT)  # the type itself is shared with the original
    bind_tensors({value: _wide(value.const_value, value.name) for value in narrow if value.const_value is not None})
    for node in list(all_nodes(copy)):
        _widen_attributes(node, NARROW)
        for value in node.outputs:
            if value in narrow:
                round_to(narrow[value], value, node)
    return copy


def compute_in_float32(model: ir.Model, wanted: Callable[[ir.Node], bool] = lambda node: True) -> None:
    """Let nodes whose values are float16 or bfloat16 compute in float32, in place; what they give keeps its type.

    ONNX Runtime's CPU provider has no kernels for bfloat16, but for conversions. It computes nodes of float16 in
    float32 as well, and leaves out the roundings between them. What the nodes of one operation of the
    model pass to each other is not rounded, nor are the numbers of Python that it takes: its kernel rounds neither. Of
    a remainder it rounds the number.

    Args:
        wanted: Which of these nodes.
    """
    fill_types(model)
    before_rounding: dict[ir.Value, ir.Value] = {}
    remainders = {node.meta.get(OPERATION, node) for node in all_nodes(model) if node.op_type == "Mod"}
    for node in list(all_nodes(model)):
        operation, any_type = node.meta.get(OPERATION, node), node.op_type in _ANY_TYPE
        if node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype in _WIDER:
            before_rounding[node.outputs[0]] = node.inputs[0]
        if any(True for _ in nested_graphs(node)) or not wanted(node):
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype in NARROW:
                wide, maker = before_rounding.get(value, value), value.producer()
                passed = maker is not None and maker.meta.get(OPERATION, maker) == operation
                is_number = ir.convenience.get_const_tensor(wide) is not None
                if not passed or (is_number and operation in remainders):
                    wide = value
                if wide.dtype is not ir.DataType.FLOAT and not any_type:
                    up = cast(wide, ir.DataType.FLOAT, f"{node.name}.{index}", node)
                    graph_of(node).insert_before(node, up)
                    wide = up.outputs[0]
                node.replace_input_with(index, wide)
        if any_type:
            continue
        _widen_attributes(node, NARROW)
        for value in node.outputs:
            if value.dtype in NARROW:
                down = cast(value, value.dtype, value.name or "", node)
                down.meta[OPERATION] = operation
                graph_of(node).insert_after(node, down)
                put_in_place_of(value, down.outputs[0], down)
                value.name, value.type = f"{value.name}.unrounded", ir.TensorType(ir.DataType.FLOAT)
                before_rounding[down.outputs[0]] = value


def lacks_types(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Whether the standard has a node's operator, in this version, but not for the narrow types of its values."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:  # an operator of a runtime
        return False
    return any(
        value is not None
        and value.dtype in NARROW
        and f"tensor({value.dtype.name.lower()})" not in declared[min(index, len(declared) - 1)].types
        for values, declared in ((node.inputs, schema.inputs), (node.outputs, schema.outputs))
        for index, value in enumerate(values)  # the last one that is declared may stand for several
    )


_WIDER = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_ANY_TYPE = ("Cast", "Shape", "Size")
"""Operators that every runtime has for these types."""


def _wide(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype("float32"), name=name)


def _widen_attributes(node: ir.Node, narrow: Sequence[ir.DataType]) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type is ir.AttributeType.TENSOR and attribute.value.dtype in narrow:
            node.attributes[name] = ir.AttrTensor(name, _wide(attribute.value, None))
        elif attribute.type is ir.AttributeType.INT and name in ("to", "dtype") and attribute.value in narrow:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)


def round_to(dtype: ir.DataType, value: ir.Value, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Put the rounding of a value behind its node; the rounded one gets its name, users and place among the outputs.

    Returns:
        The rounded value in its type, and in float32.
    """
    name = value.name or ""
    down = cast(value, dtype, f"{name}.narrow", node)
    up = cast(down.outputs[0], ir.DataType.FLOAT, name, node)
    graph_of(node).insert_after(node, [down, up])
    put_in_place_of(value, up.outputs[0], down)
    value.name = f"{name}.wide"
    return down.outputs[0], up.outputs[0]


def cast(value: ir.Value, dtype: ir.DataType, name: str, beside: ir.Node) -> ir.Node:
    """A conversion of a value, whose result has a name; it belongs to the call of another node."""
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype.value)], name=f"{name}.to_{dtype.name.lower()}")
    (result,) = node.outputs
    result.name, result.type, result.shape = name, ir.TensorType(dtype), value.shape
    set_owner(node, owner_of(beside))
    return node


def put_in_place_of(value: ir.Value, other: ir.Value, rounding: ir.Node) -> None:
    """Let all that used a value, but for the node that rounds it, use another one."""
    ir.convenience.replace_all_uses_with(value, other, replace_graph_outputs=True)
    rounding.replace_input_with(0, value)


def graph_of(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph
