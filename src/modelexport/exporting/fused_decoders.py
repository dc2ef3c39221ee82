"""Rewrites of a fused decoder: fewer nodes for each layer, and a cache that may be a longer buffer.

Each computes exactly what it replaces, and nothing from the values of parameters: weights that are used together are
concatenated by a node, which ONNX Runtime folds when it loads the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.graph.nodes import all_nodes, is_cached_attention

PAST_INPUTS = (3, 4)
"""The inputs of GroupQueryAttention that are the cache."""
_STEPS = 8
"""The largest number of nodes between a projection and the attention that reads it."""


def tidy_fused(model: ir.Model) -> list[Sequence[ir.Node]]:
    """Rewrite a graph after its nodes were fused, in place.

    Returns:
        Groups of nodes that compute the same modules; which these are, the last node of each shows.
    """
    passes.RemoveUnusedNodesPass()(model)  # what is not used counts as a use of its inputs
    for node in list(all_nodes(model)):
        _drop_round_trip(node)
    passes.RemoveUnusedNodesPass()(model)
    attentions = [node for node in all_nodes(model) if is_cached_attention(node)]
    packed = [group for node in attentions for group in _pack_projections(node)]
    _attend_to_written(attentions)
    _take_lengths_from_mask(model)
    passes.RemoveUnusedNodesPass()(model)
    return packed


def _drop_round_trip(node: ir.Node) -> None:
    """Let what reads a value that was split into heads and merged again read the value itself."""
    inner = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] is not None else None
    if inner is None or inner.op_type != "Reshape" or node.outputs[0].is_graph_output():
        return
    value = inner.inputs[0]
    if value is not None and _dims(value) is not None and _dims(value) == _merged(node):
        ir.convenience.replace_all_uses_with(node.outputs[0], value)


def _pack_projections(attention: ir.Node) -> Iterator[Sequence[ir.Node]]:
    """Compute the projections of one value that an attention reads as one product, and split it."""
    graph = attention.graph
    assert graph is not None
    by_kind: dict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
    for value in attention.inputs[:3]:
        projection = _projection(value)
        if projection is not None and projection not in by_kind[_kind(projection)]:
            by_kind[_kind(projection)].append(projection)
    for siblings in by_kind.values():
        if len(siblings) < 2:
            continue
        order = {node: index for index, node in enumerate(graph)}
        first = min(siblings, key=order.__getitem__)
        sizes, inside, axis = [_sizes(node)[0] for node in siblings], _sizes(first)[1], _sizes(first)[2]
        joined = ir.node("Concat", [node.inputs[1] for node in siblings], attributes={"axis": axis})
        joined.outputs[0].shape = ir.Shape([inside, sum(sizes)] if axis else [sum(sizes), inside])
        joined.outputs[0].type = first.outputs[0].type
        product = ir.node(
            first.op_type, [first.inputs[0], joined.outputs[0]], attributes=dict(first.attributes), domain=first.domain
        )
        dims = list(first.outputs[0].shape or ())
        product.outputs[0].shape, product.outputs[0].type = ir.Shape([*dims[:-1], sum(sizes)]), first.outputs[0].type
        split = ir.node(
            "Split",
            [product.outputs[0], _constant(graph, f"{first.outputs[0].name}_sizes", sizes)],
            attributes={"axis": -1},
            num_outputs=len(siblings),
        )
        graph.insert_before(first, [joined, product, split])
        for node, output in zip(siblings, split.outputs, strict=True):
            output.shape, output.type = node.outputs[0].shape, node.outputs[0].type
            _take_place(node.outputs[0], output)
            graph.remove(node)
        yield joined, product, split


def _projection(value: ir.Value | None) -> ir.Node | None:
    """The product with a weight from which alone a value comes, through nodes of one input that is not a constant."""
    for _ in range(_STEPS):
        node = value.producer() if value is not None else None
        if node is None or value is None or len(list(value.uses())) != 1 or value.is_graph_output():
            return None
        if node.op_type in ("MatMul", "FusedMatMul"):
            weight = node.inputs[1]
            if weight is None or weight.shape is None or not weight.is_initializer():
                return None
            return node if len(weight.shape) == 2 else None
        value = node.inputs[0]
    return None


def _kind(node: ir.Node) -> tuple[object, ...]:
    """A key that products share if they can be computed as one product."""
    attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
    weight = node.inputs[1]
    return node.inputs[0], node.op_identifier(), str(attributes), _sizes(node)[1], weight and weight.dtype


def _sizes(product: ir.Node) -> tuple[int, int, int]:
    """The columns that a product gives, how many numbers it sums for each, and the axis of the weight that it gives."""
    weight = product.inputs[1]
    assert weight is not None
    assert weight.shape is not None
    axis = 0 if product.attributes.get_int("transB", 0) else 1
    return weight.shape.numpy()[axis], weight.shape.numpy()[1 - axis], axis


def _attend_to_written(attentions: Sequence[ir.Node]) -> None:
    """Let attentions over a cache of a fixed size read only the positions that are written.

    ONNX Runtime takes a prompt of several rows only if the prompt is as long as all that is attended to.
    """
    counts: dict[ir.Value, ir.Value] = {}
    lengths: dict[ir.Value, ir.Value] = {}
    masks: dict[tuple[ir.Value, ir.Value], ir.Value] = {}
    for node in attentions:
        last, total, bias = node.inputs[_LAST_KEYS], node.inputs[_TOTAL], (*node.inputs, *[None] * _BIAS)[_BIAS]
        if last is None or total is None or total.const_value is None or bias is None or node.inputs[3] is None:
            continue
        if last not in lengths:
            counts[last], lengths[last] = _written(last, node)
        length = lengths[last]
        if (bias, length) not in masks:
            masks[bias, length] = _first_columns(bias, length, node)
        node.replace_input_with(_TOTAL, counts[last])
        node.replace_input_with(_BIAS, masks[bias, length])


_LAST_KEYS, _TOTAL, _BIAS = 5, 6, 10


def _written(last: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The number of positions up to the last one of any row: as a scalar of int32, and as ``[1]`` of int64."""
    graph = before.graph
    assert graph is not None
    largest = ir.node("ReduceMax", [last], attributes={"keepdims": 0})
    count = ir.node("Add", [largest.outputs[0], _constant(graph, f"{last.name}_one", np.array(1, dtype=np.int32))])
    wide = ir.node("Cast", [count.outputs[0]], attributes={"to": ir.DataType.INT64.value})
    row = ir.node("Reshape", [wide.outputs[0], _constant(graph, f"{last.name}_row", [1])])
    graph.insert_before(before, [largest, count, wide, row])
    return count.outputs[0], row.outputs[0]


def _first_columns(bias: ir.Value, count: ir.Value, before: ir.Node) -> ir.Value:
    graph = before.graph
    assert graph is not None
    start, axis = _constant(graph, f"{bias.name}_start", [0]), _constant(graph, f"{bias.name}_axis", [3])
    cut = ir.node("Slice", [bias, start, count, axis])
    graph.insert_before(before, cut)
    return cut.outputs[0]


def _take_lengths_from_mask(model: ir.Model) -> None:
    """Compute the number of cached tokens from the mask and the new tokens, where only attentions read the cache.

    The inputs of the cache may then be longer than what they contain: a buffer that steps write into. The number of
    rows is read from another input too.
    """
    graph = model.graph
    caches = [value for value in graph.inputs if any(reads_cache(*use) for use in value.uses())]
    readers = [use.node for value in caches for use in value.uses() if not reads_cache(*use)]
    others = {dims[0]: value for value in reversed(graph.inputs) if value not in caches and (dims := _dims(value))}
    for node in [node for node in readers if _axis_read(node) == 0]:
        if (dims := _dims(caches[0])) and dims[0] in others:
            node.replace_input_with(0, others[dims[0]])
    lengths = [node for node in readers if _axis_read(node) == _PAST_AXIS]
    if not lengths or any(_axis_read(node) not in (0, _PAST_AXIS) for node in readers):
        return
    counted = _total_and_new(graph, str((_dims(caches[0]) or ())[_PAST_AXIS]))
    if counted is None:
        return
    sizes = [
        ir.node("Shape", [value], attributes={"start": axis, "end": axis + 1}, name=f"size_of_{value.name}")
        for value, axis in counted
    ]
    difference = ir.node("Sub", [node.outputs[0] for node in sizes])
    for node in (*sizes, difference):
        node.outputs[0].shape, node.outputs[0].type = ir.Shape([1]), ir.TensorType(ir.DataType.INT64)
    graph.insert_before(graph[0], [*sizes, difference])
    for node in lengths:
        _take_place(node.outputs[0], difference.outputs[0], named=False)


_PAST_AXIS = 2


def reads_cache(node: ir.Node, index: int) -> bool:
    """Whether a node reads an input as the cache of an attention, which may be longer than what it contains."""
    return is_cached_attention(node) and index in PAST_INPUTS


def _axis_read(node: ir.Node) -> int | None:
    """The axis whose size a node reads; ``None`` if it does anything else."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", -1)
    return start if node.op_type == "Shape" and end == start + 1 else None


def _total_and_new(graph: ir.Graph, past: str) -> tuple[tuple[ir.Value, int], tuple[ir.Value, int]] | None:
    """The axes of two inputs whose sizes differ by the cached tokens: ``past + sequence`` and ``sequence``."""
    axes = {
        str(size): (value, axis)
        for value in reversed(graph.inputs)
        for axis, size in enumerate(_dims(value) or ())
        if isinstance(size, str)
    }
    for size, axis in axes.items():
        for total in (f"{past} + {size}", f"{size} + {past}"):
            if total in axes:
                return axes[total], axis
    return None


def _dims(value: ir.Value) -> tuple[int | str, ...] | None:
    """The sizes of a value, symbols as text; ``None`` if one is not known."""
    if value.shape is None:
        return None
    sizes = [size if isinstance(size, int) else size.value for size in value.shape]
    sizes = [int(size) if isinstance(size, str) and size.isdigit() else size for size in sizes]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _merged(reshape: ir.Node) -> tuple[int | str, ...] | None:
    """The sizes of a merge of heads, if they are known: its own, or those that its constant target gives."""
    declared = _dims(reshape.outputs[0])
    if declared is not None:
        return declared
    target, value = reshape.inputs[1], reshape.inputs[0]
    dims = _dims(value) if value is not None else None
    if target is None or target.const_value is None or dims is None or len(dims) != _HEAD_AXES:
        return None
    rows, tokens, heads, width = dims
    if target.const_value.numpy().tolist() != [0, 0, -1] or not isinstance(heads, int) or not isinstance(width, int):
        return None
    return rows, tokens, heads * width


_HEAD_AXES = 4


def _take_place(old: ir.Value, new: ir.Value, *, named: bool = True) -> None:
    """Let every use of a value read another, under the first one's name."""
    name = old.name
    ir.convenience.replace_all_uses_with(old, new)
    if named:
        old.name, new.name = None, name


def _constant(graph: ir.Graph, name: str, numbers: Sequence[int] | np.ndarray) -> ir.Value:
    """A new initializer; a list is one of int64."""
    tensor = ir.tensor(numbers if isinstance(numbers, np.ndarray) else np.array(numbers, dtype=np.int64), name=name)
    graph.register_initializer(value := ir.val(name, const_value=tensor))
    return value
