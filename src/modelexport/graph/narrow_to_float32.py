"""Computes a model of narrow floating-point numbers in float32, where a runtime has no kernels for them.

Kernels of such types compute in float32 and round what they give. So does the copy: each node computes in float32, and
its results are rounded to the narrow type.
"""

from __future__ import annotations

import onnx_ir as ir

from modelexport.graph.copies import copy_of
from modelexport.graph.hidden_weights import bind_tensors
from modelexport.graph.nodes import all_nodes, initializers, inputs_and_results

NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


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
        for name, attribute in list(node.attributes.items()):
            if attribute.type is ir.AttributeType.TENSOR and attribute.value.dtype in NARROW:
                node.attributes[name] = ir.AttrTensor(name, _wide(attribute.value, None))
            elif attribute.type is ir.AttributeType.INT and name in ("to", "dtype") and attribute.value in NARROW:
                node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
        for value in node.outputs:
            if value in narrow:
                _round(node, value, narrow[value])
    return copy


def _wide(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype("float32"), name=name)


def _round(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> None:
    """Put the rounding of a value behind its node; the rounded one gets its name, users and place among the outputs."""
    graph, name = node.graph, value.name or ""
    assert graph is not None
    down = ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype.value)], name=f"{name}.down")
    up = ir.Node("", "Cast", [down.outputs[0]], [ir.AttrInt64("to", ir.DataType.FLOAT.value)], name=f"{name}.up")
    down.outputs[0].name, down.outputs[0].type = f"{name}.narrow", ir.TensorType(dtype)
    rounded = up.outputs[0]
    rounded.type, rounded.shape = value.type, value.shape
    graph.insert_after(node, [down, up])
    ir.convenience.replace_all_uses_with(value, rounded, replace_graph_outputs=True)
    down.replace_input_with(0, value)
    value.name, rounded.name = f"{name}.wide", name
