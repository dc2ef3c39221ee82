"""More faults to plant, as `plants.py`: in comparisons, bounds, indices, and operators that few models have.

Most change few elements, by little, or for some inputs only: those beyond the range of the example, above all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from planted.plants import (
    CALL,
    CALLS,
    COPIES,
    EVIDENCE,
    PARAMETER,
    TAGS,
    Place,
    calls_of,
    constant_of,
    give,
    insert_after,
    insert_before_input,
    insert_chain,
    is_number,
    last_size,
    owners,
    private,
    static_shape,
    tell_initializers,
    weight_of,
)  # fmt: skip

ANYWHERE = frozenset(["*"])
STRICT = {"Less": "LessOrEqual", "LessOrEqual": "Less", "Greater": "GreaterOrEqual", "GreaterOrEqual": "Greater"}
LOGIC = {"And": "Or", "Or": "And", "Xor": "Or", "ReduceMax": "ReduceMean", "ReduceMean": "ReduceMax", "Max": "Min",
         "ReduceSum": "ReduceMean", "Floor": "Ceil", "Ceil": "Floor", "Round": "Floor", "Min": "Max",
         "MaxPool": "AveragePool", "ArgMax": "ArgMin", "ArgMin": "ArgMax"}  # fmt: skip


def comparisons(node: ir.Node) -> bool:
    if node.op_type not in STRICT:
        return False
    node.op_type = STRICT[node.op_type]
    return True


def logic(node: ir.Node) -> bool:
    if node.op_type not in LOGIC or (node.op_type == "MaxPool" and len(node.outputs) > 1):
        return False
    if node.op_type == "MaxPool":
        for key in ("storage_order", "dilations"):
            node.attributes.pop(key, None)
    node.op_type = LOGIC[node.op_type]
    return True


def bound(node: ir.Node) -> bool:
    """A bound of a Clip, one percent off."""
    if node.op_type != "Clip":
        return False
    for index in (2, 1):
        value = node.inputs[index] if len(node.inputs) > index else None
        if is_number(value) and value.const_value is not None and np.abs(value.const_value.numpy()).max() > 0:
            private(node, index, value.const_value.numpy() * np.float32(0.99), metadata=False)
            return True
    return False


def constant_index(node: ir.Node) -> Iterator[int]:
    for index, value in enumerate(node.inputs):
        if value is None or value.const_value is None or value.dtype is not ir.DataType.INT64:
            continue
        if value.is_initializer() and value.const_value.size > 3 and PARAMETER not in value.metadata_props:
            yield index


def index_off(node: ir.Node) -> bool:
    """One element of a constant of indices, off by one."""
    if node.op_type not in ("Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Add", "Where"):
        return False
    for index in constant_index(node):
        array = node.inputs[index].const_value.numpy().copy()
        flat = array.reshape(-1)
        at = flat.size // 2
        flat[at] += 1 if flat[at] < flat.max() else -1
        private(node, index, array, metadata=False)
        return True
    return False


def slice_bound(which: int) -> Callable[[ir.Node], bool]:
    def change(node: ir.Node) -> bool:
        """Two zeros and one end: the same size, one element further."""
        if node.op_type != "Slice" or len(node.inputs) < 3:
            return False
        value = node.inputs[which]
        if value is None or value.const_value is None:
            return False
        array = value.const_value.numpy().copy()
        if not (np.abs(array) < 1 << 30).all():
            return False
        private(node, which, array + (1 if which == 1 else -1), metadata=False)
        return True

    return change


def slice_moved(node: ir.Node) -> bool:
    """A slice of the same size, one element further on or back."""
    if node.op_type != "Slice" or len(node.inputs) < 4 or node.inputs[0].shape is None:
        return False
    begin, end, axes = (node.inputs[k].const_value if node.inputs[k] is not None else None for k in (1, 2, 3))
    if begin is None or end is None or axes is None or begin.size != 1:
        return False
    b, e, axis = (int(one.numpy().reshape(-1)[0]) for one in (begin, end, axes))
    size = node.inputs[0].shape[axis]
    if not isinstance(size, int) or b < 0 or e < 0:
        return False
    e = min(e, size)
    step = 1 if e < size else -1 if b > 0 else 0
    if not step:
        return False
    private(node, 1, np.array([b + step]), metadata=False)
    private(node, 2, np.array([e + step]), metadata=False)
    return True


def heads(node: ir.Node) -> bool:
    """Two heads exchanged."""
    shape = node.outputs[0].shape
    if shape is None or len(shape) != 4:
        return False
    for axis in (1, 2):
        if isinstance(shape[axis], int) and 1 < shape[axis] <= 16:
            order = [1, 0, *range(2, shape[axis])]
            insert_after(node, "Gather", np.array(order), axis=axis)
            return True
    return False


def added_twice(node: ir.Node) -> bool:
    if node.op_type != "Add" or not all(is_number(v) for v in node.inputs):
        return False
    one, other = node.inputs
    if one.shape != node.outputs[0].shape:
        one, other = other, one
    if one.shape != node.outputs[0].shape or one.is_initializer():
        return False
    index = list(node.inputs).index(one)
    new = insert_before_input(node, index, "Identity")
    new.op_type = "Add"
    new.resize_inputs(2)
    new.replace_input_with(1, other)
    return True


def epsilon_doubled(node: ir.Node) -> bool:
    attribute = node.attributes.get("epsilon")
    if attribute is None or attribute.value < 1e-12:
        return False
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", attribute.value * 2)
    return True


def outputs_swapped(node: ir.Node) -> bool:
    """Two outputs of one node, of the same type and shape."""
    if len(node.outputs) < 2 or node.outputs[0].dtype != node.outputs[1].dtype:
        return False
    if node.outputs[0].shape != node.outputs[1].shape:
        return False
    one, other = node.outputs[0], node.outputs[1]
    a, b = list(one.uses()), list(other.uses())
    for user, index in a:
        user.replace_input_with(index, other)
    for user, index in b:
        user.replace_input_with(index, one)
    return bool(a or b)


def branches_swapped(node: ir.Node) -> bool:
    if node.op_type != "Where":
        return False
    one, other = node.inputs[1:]
    node.replace_input_with(1, other)
    node.replace_input_with(2, one)
    return True


def small_constant(node: ir.Node) -> bool:
    """A constant that keeps a divisor from zero, ten times as large."""
    for index, value in enumerate(node.inputs):
        if is_number(value) and value.is_initializer() and PARAMETER not in value.metadata_props:
            array = value.const_value.numpy() if value.const_value is not None else np.zeros(0)
            if array.size == 1 and 0 < abs(float(array.reshape(-1)[0])) < 1e-4:
                private(node, index, array * np.float32(10))
                return True
    return False


def square_transposed(node: ir.Node) -> bool:
    shape = static_shape(node.outputs[0])
    if not shape or len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2:
        return False
    insert_after(node, "Identity")
    new = next(user for user, _ in node.outputs[0].uses() if user.name == f"{node.name}.faulty")
    new.op_type = "Transpose"
    rank = len(shape)
    new.attributes["perm"] = ir.AttrInt64s("perm", [*range(rank - 2), rank - 1, rank - 2])
    return True


def rounded(node: ir.Node) -> bool:
    insert_after(node, "Mul", np.array(512, np.float32))
    first = next(user for user, _ in node.outputs[0].uses())
    value = first.outputs[0]
    insert_after(first, "Round")
    second = next(user for user, _ in value.uses())
    insert_after(second, "Mul", np.array(1 / 512, np.float32))
    return True


def faint(node: ir.Node) -> bool:
    insert_after(node, "Mul", np.array(1.00002, np.float32))
    return True


def not_a_number(node: ir.Node) -> bool:
    """``x * (x / x)``: not a number where it is zero."""
    insert_after(node, "Div")
    new = next(user for user, _ in node.outputs[0].uses() if user.op_type == "Div" and len(user.inputs) == 1)
    new.resize_inputs(2)
    new.replace_input_with(1, new.inputs[0])
    value = new.outputs[0]
    insert_after(new, "Mul")
    times = next(user for user, _ in value.uses() if user.op_type == "Mul" and len(user.inputs) == 1)
    times.resize_inputs(2)
    times.replace_input_with(1, new.inputs[0])
    return True


def leaking(node: ir.Node) -> bool:
    """A thousandth of the next row of the batch."""
    shape = node.outputs[0].shape
    if shape is None or len(shape) < 2 or (isinstance(shape[0], int) and shape[0] < 2):
        return False
    value = node.outputs[0]
    users = list(value.uses())
    if not users or any(output is value for output in node.graph.outputs):
        return False
    props = dict(node.metadata_props)
    total = ir.Node("", "ReduceMean", [value, constant_of(node, f"{value.name}.zero", np.array([0]))],
                    name=f"{node.name}.total", metadata_props=props)  # fmt: skip
    less = ir.Node("", "Mul", [total.outputs[0], constant_of(node, f"{value.name}.less", np.array(1e-3, np.float32))],
                   name=f"{node.name}.less", metadata_props=props)  # fmt: skip
    both = ir.Node("", "Add", [value, less.outputs[0]], name=f"{node.name}.both", metadata_props=props)
    insert_chain(node, (total, less, both), users)
    return True


def last_row_zero(node: ir.Node) -> bool:
    shape = static_shape(node.outputs[0])
    if not shape or len(shape) < 2 or shape[-2] < 2:
        return False
    factor = np.ones((shape[-2], 1), np.float32)
    factor[-1] = 0
    insert_after(node, "Mul", factor)
    return True


def negative_ids(node: ir.Node) -> bool:
    """Rows are found from the end of a table."""
    if node.op_type != "Gather" or node.inputs[1].is_initializer() or node.inputs[1].dtype is not ir.DataType.INT64:
        return False
    if not node.inputs[0].is_initializer():
        return False
    new = insert_before_input(node, 1, "Neg")
    return new is not None


def zero_id(node: ir.Node) -> bool:
    """The id of padding is looked up as that of the next row."""
    if node.op_type != "Gather" or not node.inputs[0].is_initializer() or node.inputs[1].is_initializer():
        return False
    if node.inputs[1].dtype is not ir.DataType.INT64 or node.inputs[0].shape[0] < 3:
        return False
    new = insert_before_input(node, 1, "Max", np.array(1))
    return new is not None


def moved_mean(node: ir.Node) -> bool:
    """One column gets a thousandth more."""
    size = last_size(node.outputs[0])
    if size < 2:
        return False
    added = np.zeros(size, np.float32)
    added[size // 2] = 1e-3
    insert_after(node, "Add", added)
    return True


NUMBERS: dict[str, Callable[[ir.Node], bool]] = {
    "comparison strict or not": comparisons, "another reduction or logic": logic, "bound of a clip": bound,
    "an index off by one": index_off, "begin of a slice": slice_bound(1), "end of a slice": slice_bound(2),
    "slice moved by one": slice_moved, "heads exchanged": heads, "added twice": added_twice,
    "epsilon doubled": epsilon_doubled, "outputs of a node exchanged": outputs_swapped,
    "branches of a selection exchanged": branches_swapped, "small constant ten times": small_constant,
    "square transposed": square_transposed, "rounded to 1/512": rounded, "output times 1.00002": faint,
    "not a number at zero": not_a_number, "batch leaks": leaking, "last row zero": last_row_zero,
    "ids negated": negative_ids, "padding id as the next": zero_id, "a thousandth added to a column": moved_mean,
}  # fmt: skip
ANY_TYPE = {"comparison strict or not", "another reduction or logic", "an index off by one", "begin of a slice",
            "end of a slice", "slice moved by one", "outputs of a node exchanged",
            "branches of a selection exchanged"}  # fmt: skip


def of_nodes(model: ir.Model) -> Iterator[Place]:
    for kind, change in NUMBERS.items():
        for position, node in enumerate(model.graph):
            if CALL not in node.metadata_props or (kind not in ANY_TYPE and not is_number(node.outputs[0])):
                continue

            def plant(model: ir.Model, path: Path, p: int = position, change: Any = change) -> bool:
                return bool(change(model.graph[p]))

            names = {v.name or "" for v in node.inputs if v is not None and v.is_initializer()} - {""}
            yield Place(kind, node.name or "", owners(node) | names, plant, node.outputs[0].name or "")


def weight_changes(model: ir.Model) -> Iterator[Place]:
    def bfloat(a: Any) -> Any:
        return ((a.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    def last_bit(a: Any) -> Any:
        bits = a.copy().view(np.uint32)
        bits.reshape(-1)[-1] ^= 1
        return bits.view(np.float32)

    kinds: dict[str, Callable[[Any], Any]] = {
        "weight in bfloat16": bfloat, "last bit of a weight": last_bit,
        "last element of a weight zero": lambda a: np.concatenate(
            [a.reshape(-1)[:-1], np.zeros(1, a.dtype)]).reshape(a.shape),
    }  # fmt: skip
    for kind, change in kinds.items():
        for position, node in enumerate(model.graph):
            found = weight_of(node)
            if found is None or CALL not in node.metadata_props or PARAMETER not in found[1].metadata_props:
                continue
            array = np.ascontiguousarray(found[1].const_value.numpy())
            if np.array_equal(change(array).view(np.uint32), array.view(np.uint32)) or len(found[1].uses()) > 1:
                continue

            def plant(model: ir.Model, path: Path, p: int = position, i: int = found[0], c: Any = change) -> bool:
                value = model.graph[p].inputs[i]
                array = c(np.ascontiguousarray(value.const_value.numpy()))
                value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)
                return True

            yield Place(kind, f"{found[1].name}", owners(node) | {found[1].name or ""}, plant, node.name or "")


def constants(model: ir.Model) -> Iterator[Place]:
    """Constants that are no parameters: numbers of a table, by little."""
    for position, node in enumerate(model.graph):
        for index, value in enumerate(node.inputs):
            if CALL not in node.metadata_props or value is None or not is_number(value) or value.const_value is None:
                continue
            if PARAMETER in value.metadata_props or not value.is_initializer():
                continue
            array = value.const_value.numpy()
            if not np.isfinite(array).all() or not np.abs(array).max(initial=0) > 0:
                continue

            def plant(model: ir.Model, path: Path, p: int = position, i: int = index) -> bool:
                node = model.graph[p]
                array = node.inputs[i].const_value.numpy().copy()
                largest = np.abs(array).argmax()
                array.reshape(-1)[largest] *= np.float32(1.001)
                private(node, i, array)
                return True

            yield Place("one number of a constant", f"{node.name} {index}", owners(node) | {value.name or ""}, plant,
                        node.outputs[0].name or "")  # fmt: skip


def beyond_example(model: ir.Model, run: Callable[[list[str]], dict[str, Any]]) -> Iterator[Place]:
    """What holds for numbers as large as those of the example."""
    computing = [
        (p, n) for p, n in enumerate(model.graph)
        if CALL in n.metadata_props and is_number(n.outputs[0]) and n.op_type not in COPIES
    ]  # fmt: skip
    values = run([n.outputs[0].name or "" for _, n in computing]) if computing else {}
    for position, node in computing:
        array = values[node.outputs[0].name or ""]
        if not array.size or not np.isfinite(array).all():
            continue
        low, high = float(array.min()), float(array.max())

        def plant(model: ir.Model, path: Path, p: int = position, low: float = low, high: float = high) -> bool:
            insert_after(model.graph[p], "Clip", np.array(low, np.float32), np.array(high, np.float32))
            return True

        yield Place("clipped at the example's range", node.name or "", owners(node), plant, node.outputs[0].name or "")


def foreign_copies(model: ir.Model) -> Iterator[Place]:
    """A copy of a value, in a call that has nothing to do with it."""
    own, _, source = calls_of(model)
    calls = list(source)
    for position, node in enumerate(model.graph):
        if CALL not in node.metadata_props or not is_number(node.outputs[0]) or node.op_type in COPIES:
            continue
        near = set(owners(node)) | {c for user, _ in node.outputs[0].uses() if CALL in user.metadata_props
                                    for c in owners(user)}  # fmt: skip
        far = [c for c in calls if not any(c == n or c.startswith(n + ".") or n.startswith(c + ".") or not n or not c
                                           for n in near)]  # fmt: skip
        if not far:
            continue
        other = far[position % len(far)]

        def plant(model: ir.Model, path: Path, p: int = position, other: str = other) -> bool:
            node = model.graph[p]
            first = node.outputs[0]
            insert_after(node, "Identity")
            new = next(n for n in model.graph if n.name == f"{node.name}.faulty")
            give(new, other, source[other], own[other])
            return first is not None

        yield Place("a copy in another call", f"{node.name} in {other}", frozenset([other, *owners(node)]), plant,
                    f"{node.name}.faulty", tags=True)  # fmt: skip


def callers(model: ir.Model, run: Callable[[list[str]], dict[str, Any]]) -> Iterator[Place]:
    """Nodes that compute, given to the call around theirs or to one inside it, and that around beside theirs."""
    own, parent, source = calls_of(model)
    computing = [
        (p, n) for p, n in enumerate(model.graph)
        if n.metadata_props.get(EVIDENCE) == "exact" and CALLS not in n.metadata_props
        and is_number(n.outputs[0]) and n.op_type not in COPIES
    ]  # fmt: skip
    values = run([n.outputs[0].name or "" for _, n in computing]) if computing else {}
    for position, node in computing:
        (right,) = owners(node)
        if np.unique(values[node.outputs[0].name or ""]).size < 5:
            continue  # that occurs anywhere
        around = parent.get(right)
        while around is not None and around not in source:
            around = parent.get(around)
        inside = next((call for call in source if parent.get(call) == right), None)

        def moved(model: ir.Model, path: Path, p: int = position, other: str = "") -> bool:
            give(model.graph[p], other, source[other], own[other])
            return True

        def one_more(model: ir.Model, path: Path, p: int = position, other: str = "", right: str = right) -> bool:
            node = model.graph[p]
            node.metadata_props[CALLS] = json.dumps([right, other])
            node.metadata_props[TAGS] = json.dumps([source[right], source[other]])
            tell_initializers(node)
            return True

        for kind, other, change in (
            ("given to the call around", around, moved), ("given to a call inside", inside, moved),
            ("the call around as another owner", around, one_more),
        ):  # fmt: skip
            if other is not None and other != right:
                yield Place(kind, f"{node.name} and {other}", frozenset([right, other]), partial(change, other=other),
                            node.name or "", tags=True)  # fmt: skip


def declared(model: ir.Model) -> Iterator[Place]:
    """Symbols of the interface, which nothing computes with."""
    symbols = {s.value for v in model.graph.inputs for s in v.shape or () if isinstance(s, ir.SymbolicDim) and s.value}
    for side in ("inputs", "outputs"):
        for k, value in enumerate(getattr(model.graph, side)):
            for axis, size in enumerate(value.shape or ()):
                if not isinstance(size, ir.SymbolicDim) or size.value is None:
                    continue
                for other in sorted(symbols - {size.value}):

                    def plant(model: ir.Model, path: Path, k: int = k, axis: int = axis, side: str = side,
                              other: str = other) -> bool:  # fmt: skip
                        value = getattr(model.graph, side)[k]
                        sizes = [s if isinstance(s, int) else s.value for s in value.shape]
                        sizes[axis] = other
                        value.shape = ir.Shape(sizes)
                        return True

                    where = f"{value.name}, axis {axis}: {other}"
                    yield Place(f"another symbol of the {side}", where, ANYWHERE, plant, tags=True, sizes=True)


def rare(model: ir.Model, run: Callable[[list[str]], dict[str, Any]]) -> Iterator[Place]:
    """All of this file."""
    yield from of_nodes(model)
    yield from weight_changes(model)
    yield from constants(model)
    yield from beyond_example(model, run)
    yield from foreign_copies(model)
    yield from callers(model, run)
    yield from declared(model)
