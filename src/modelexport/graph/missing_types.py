"""Types of values that an exporter or a rewrite left without one, by the schemas of operators or by inference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from modelexport.core.limits import LONGEST_ROW
from modelexport.graph.nodes import all_nodes, initializers, nested_graphs


def fill_types(model: ir.Model) -> None:
    """Assign values without an element type the type that their operator defines, in place.

    The outputs of an operator that is not in the standard have the type of its first input. Initializers get the type
    and the shape of their tensors; one that is an input, too, may be given in another shape.
    """
    for value in initializers(model):
        if value.const_value is not None and not value.is_graph_input():
            value.shape, value.dtype = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype
    for node in all_nodes(model):
        untyped = [value for value in node.outputs if value.dtype is None and value.name != ""]
        if untyped:
            schema = schema_of(node, model.opset_imports.get(node.domain, 0))
            for value in untyped:
                if (dtype := _type_of(node, value, schema)) is not None:
                    value.dtype = dtype


def schema_of(node: ir.Node, version: int) -> onnx.defs.OpSchema | None:
    """The schema of a node's operator; ``None`` if it is not in the standard, or not yet in this version of it, as the
    ``LayerNormalization`` that ONNX Runtime's optimizer writes into a file of opset 9.
    """
    try:
        return onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return None


def _type_of(node: ir.Node, value: ir.Value, schema: onnx.defs.OpSchema | None) -> ir.DataType | None:
    if "to" in node.attributes:
        return ir.DataType(node.attributes.get_int("to"))
    attribute = node.attributes.get("value")
    if attribute is not None and attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
        return attribute.as_tensor().dtype
    if schema is not None and (graphs := nested_graphs(node)):  # the last results of a standard body are its node's
        return graphs[0].outputs[(value.index() or 0) - len(node.outputs)].dtype
    if schema is None:
        return next((taken.dtype for taken in node.inputs if taken is not None), None)
    outputs = schema.outputs
    name = outputs[min(value.index() or 0, len(outputs) - 1)].type_str
    allowed = next(
        (constraint.allowed_type_strs for constraint in schema.type_constraints if constraint.type_param_str == name),
        [name],
    )
    if len(allowed) == 1:
        return ir.DataType[allowed[0].removeprefix("tensor(").removesuffix(")").upper()]
    formal = schema.inputs
    same = (taken for index, taken in enumerate(node.inputs) if formal[min(index, len(formal) - 1)].type_str == name)
    return next((each.dtype for each in same if each is not None and not isinstance(each.type, ir.SequenceType)), None)


def infer_shapes(model: ir.Model) -> None:
    """Give values the types and shapes that ONNX infers, in place; none if some are maps, which ``onnx_ir`` lacks.

    A declared shape that contradicts what its node computes, which runtimes accept, spoils that node's results alone.
    """
    with suppress(ir.serde.SerdeError):
        passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
        computed = (value for node in all_nodes(model) for value in node.outputs)
        if not has_long_row(value.shape for value in computed if value.shape is not None):
            passes.ShapeInferencePass(check_type=False, strict_mode=False)(model)


def has_long_row(shapes: Iterable[Sequence[object] | ir.Shape]) -> bool:
    """Whether a tensor with one axis is too long for onnx's propagation of data, which takes it for a shape and makes
    an object of each of its numbers where it is added or multiplied.
    """
    return any(len(shape) == 1 and isinstance(shape[0], int) and shape[0] > LONGEST_ROW for shape in shapes)
