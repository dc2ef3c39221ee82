"""Simpler forms of what tracing makes of masks: indexing with counted indices is a view, ``Where`` may have no effect.

``mask[batch, keys]``, where each index counts from 0 to the size of an axis, is a view of the mask with more axes.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import onnx_ir as ir

from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.tools.to_torch.entries_as_nodes import Constants
from modelexport.tools.to_torch.size_numbers import FileNumbers, sizes_of

CountedAxis = tuple[str, int]
"""An axis that indices count through: its size, and its number from the end."""


def replace_whole_gathers(graph: ir.Graph, constants: Constants, numbers: FileNumbers) -> None:
    """Replace ``GatherND`` by ``Unsqueeze`` where it takes all elements in order; the axes become constants."""
    for node in list(graph.all_nodes()):
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        if node.op_type != "GatherND" or node.domain or source is None or source.shape is None or result.shape is None:
            continue
        shape, places = sizes_of(result), _counted_axes(node.inputs[1], constants, numbers)
        kept = [axis for axis, size in enumerate(shape) if size != "1"]
        if sizes_of(source) == [shape[axis] for axis in kept] and places == [
            (shape[axis], axis - len(shape)) for axis in kept
        ]:
            added = [axis for axis in range(len(shape)) if axis not in kept]
            axes = ir.Value(
                name=f"{result.name}_axes", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(added)])
            )
            constants[axes] = ir.tensor(np.array(added, np.int64))
            view = ir.node("Unsqueeze", [source, axes], version=13, name=node.name)
            view.outputs[0].name, view.outputs[0].shape, view.outputs[0].type = result.name, result.shape, result.type
            set_owner(view, owner_of(node))
            assert isinstance(node.graph, ir.Graph)
            node.graph.insert_before(node, view)
            ir.convenience.replace_all_uses_with(result, view.outputs[0], replace_graph_outputs=True)


def drop_choices_without_effect(graph: ir.Graph, kept: Container[str | None], constants: Constants) -> None:
    """Replace ``Where`` by the operand that it chooses everywhere, as for rows that see no key where all see some.

    Args:
        kept: The names of values that calls without nodes return, and that have to stay.
    """
    for node in list(graph.all_nodes()):
        condition = constants.array(node.inputs[0]) if node.op_type == "Where" and node.inputs[0] else None
        if condition is None or not condition.size or len({*condition.reshape(-1).tolist()}) > 1:
            continue
        chosen, result = node.inputs[1 if condition.all() else 2], node.outputs[0]
        fits = chosen is not None and chosen.shape is not None and chosen.shape == result.shape
        if fits and chosen is not None and not result.is_graph_output() and result.name not in kept:
            result.replace_all_uses_with(chosen)
            assert isinstance(node.graph, ir.Graph)
            node.graph.remove(node, safe=True)


def _counted_axes(indices: ir.Value | None, constants: Constants, numbers: FileNumbers) -> list[CountedAxis | None]:
    """The axis that the indices of each axis count through; ``None`` if they are something else."""
    array = constants.array(indices) if indices is not None else None
    joined = indices.producer() if indices is not None else None
    if array is not None:
        shape = array.shape[:-1]
        axes = [axis for axis, size in enumerate(shape) if size > 1]
        same = np.array_equal(np.moveaxis(np.indices(shape)[axes], 0, -1), array)
        return [(str(shape[axis]), axis - len(shape)) for axis in axes] if same else []
    return [_axis(part, numbers) for part in joined.inputs] if joined is not None and joined.op_type == "Concat" else []


def _axis(part: ir.Value | None, numbers: FileNumbers) -> CountedAxis | None:
    value = _before(_before(part, "Unsqueeze", most=1), "Expand")
    axes = [axis for axis, size in enumerate(sizes_of(value)) if size != "1"] if value is not None else []
    counted = _before(value, "Unsqueeze")
    node = counted.producer() if counted is not None else None
    if value is None or node is None or node.op_type != "Range" or len(axes) != 1:
        return None
    start, end, step = (numbers.number(each) for each in node.inputs)
    return (str(end), axes[0] - len(value.shape or ())) if (start, step) == (0, 1) else None


def is_always_true(value: ir.Value | None, constants: Constants, numbers: FileNumbers) -> bool:
    """Whether a truth value does not depend on anything: a constant, or whether counted indices are at least 0."""
    array, node = (constants.array(value), value.producer()) if value is not None else (None, None)
    if array is not None or node is None:
        return array is not None and bool(array.all())
    if node.op_type == "And":
        return all(is_always_true(each, constants, numbers) for each in node.inputs)
    counted = _before(node.inputs[0], "Unsqueeze") if node.op_type == "GreaterOrEqual" else None
    start = counted.producer() if counted is not None else None
    if start is None or start.op_type != "Range":
        return False
    low, step, least = (numbers.number(each) for each in (start.inputs[0], start.inputs[2], node.inputs[1]))
    return all(isinstance(each, int) for each in (low, step, least)) and low >= least and step > 0


def _before(value: ir.Value | None, operator: str, *, most: int = 9) -> ir.Value | None:
    """The value from which a chain of nodes of one operator computes this value; itself without such nodes."""
    for _ in range(most):
        node = value.producer() if value is not None else None
        if node is None or node.op_type != operator:
            break
        value = node.inputs[0]
    return value
