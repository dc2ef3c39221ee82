"""Operators that move elements as expressions of torch: shapes, slices, concatenations; see ``tensor_operators.py``."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.tools.to_torch.expressions import Number, literal
from modelexport.tools.to_torch.operation import Operation
from modelexport.tools.to_torch.size_numbers import sizes_of

_END = 2**31 - 1
"""From here on the end of a slice is the end of its axis."""


def _transpose(o: Operation) -> ast.expr:
    order = o.attribute("perm") or range(o.rank())[::-1]
    rank = len(order)
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if len(moved) == 2:
        last = moved == [rank - 2, rank - 1]
        return o.write("a.T" if rank == 2 else "a.transpose(*axes)", axes=[-2, -1] if last else moved)
    return o.write("a.permute(*order)" if moved else "a", order=order)


def _reshape(o: Operation) -> ast.expr:
    numbers, keeps, value = o.numbers(1), not o.attribute("allowzero"), o.value(0)
    if numbers is None:
        return o.write("reshape(a, s1)")
    is_kept = [keeps and not isinstance(number, Number) and number == 0 for number in numbers]
    sizes = [
        o.write("a.shape[axis]", axis=axis) if kept else number
        for axis, (kept, number) in enumerate(zip(is_kept, numbers, strict=True))
    ]
    before = sizes_of(value) if value is not None and value.shape is not None else []
    after = sizes_of(o.node.outputs[0])
    if before and len(after) == len(sizes) > 0:
        head = _equal(before, after)
        tail = _equal(before[head:][::-1], after[head:][::-1])
        old, new = len(before) - head - tail, len(after) - head - tail
        if old == new == 0:
            return o.write("a")
        if tail and 0 in (old, new):  # an axis of size 1 more or less belongs to the one behind it
            old, new, tail = old + 1, new + 1, tail - 1
        if old == 1 and new > 1:
            return o.write("a.unflatten(axis, sizes)", axis=head if tail else -1, sizes=tuple(sizes[head : head + new]))
        if new == 1 and old > 1:
            return o.write("a.flatten(*axes)", axes=[head, head + old - 1] if tail else [head])
    return o.write("a.reshape(*sizes)" if sizes else "a.reshape(())", sizes=sizes)


def _equal(some: Sequence[str], others: Sequence[str]) -> int:
    """How many sizes from the start are the same; one that is not known is not."""
    pairs = (one == other and "?" not in one for one, other in zip(some, others, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, pairs))


def _flatten(o: Operation) -> ast.expr:
    axis = o.attribute("axis") % max(o.rank(), 1) if o.attribute("axis") < 0 else o.attribute("axis")
    if axis == 1 and o.rank() > 1:
        return o.write("a.flatten(1)")
    return o.write(f"a.reshape(math.prod(a.shape[:{axis}]), -1)")


def _squeeze(o: Operation) -> ast.expr:
    axes, operand = o.axes(1), o.tensor(0)
    parts = [] if not isinstance(operand, ast.Subscript) else getattr(operand.slice, "elts", [operand.slice])
    if isinstance(operand, ast.Subscript) and axes == [len(parts) - 1] and isinstance(parts[-1], ast.Slice):
        start, end = (ast.unparse(part or ast.Constant(0)) for part in (parts[-1].lower, parts[-1].upper))
        if start.isdigit() and end == str(int(start) + 1) and not any(isinstance(each, ast.Constant) for each in parts):
            return o.write("x[*parts]", x=operand.value, parts=[*parts[:-1], int(start)])
    one = axes[0] if axes and len(axes) == 1 else tuple(axes or ())
    return o.write("x.squeeze(axes)" if axes else "x.squeeze()", x=operand, axes=one)


def _unsqueeze(o: Operation) -> ast.expr:
    axes = o.axes(1) or []
    if len(axes) == 1:
        return o.write("a.unsqueeze(axis)", axis=axes[0])
    new = {axis % (o.rank() + len(axes)) for axis in axes}
    return o.write("a[*parts]", parts=[None if axis in new else ast.Slice() for axis in range(max(new, default=0) + 1)])


def _expand(o: Operation) -> ast.expr:
    value, numbers = o.value(0), o.numbers(1)
    known: list[Any] = list(value.shape) if value is not None and value.shape is not None else [None]
    if numbers is not None and len(known) <= len(numbers):
        known = [1] * (len(numbers) - len(known)) + known
        sizes = [-1 if number == 1 and size != 1 else number for size, number in zip(known, numbers, strict=True)]
        if all(size in (1, number) or number == -1 for size, number in zip(known, sizes, strict=True)):
            return o.write("a.expand(*sizes)", sizes=sizes)
    return o.write("expand(a, s1)" if known else "a.expand(s1)")


def _subscript(axis: int, inside: Any) -> list[Any]:
    """The subscript of an axis, which may be counted from the end."""
    whole: list[Any] = [ast.Slice()]
    return [literal(...), inside, *whole * (-axis - 1)] if axis < 0 else [*whole * axis, inside]


def _gather(o: Operation) -> ast.expr:
    axis, numbers = o.attribute("axis"), o.numbers(1)
    if numbers is not None and o.rank(1) == 0:
        inside = literal(numbers[0])
    elif numbers is not None and o.rank(1) == 1:
        inside = literal(numbers)
    else:
        inside = o.write("b" if o.dtype(1) == ir.DataType.INT64 else "b.long()")
    return o.write("a[*parts]", parts=_subscript(axis, inside))


def _slice_of(start: Any, end: Any, step: Any) -> ast.expr:
    """``start:end:step`` without what is the default."""
    whole = not isinstance(end, Number) and end >= _END
    parts = [None if usual else literal(part)
             for part, usual in ((start, start == 0), (end, whole), (step, step == 1))]  # fmt: skip
    return ast.Slice(*parts)


def _slice(o: Operation) -> ast.expr:
    if o.version < 10:
        starts, ends = (list(o.attribute(name)) for name in ("starts", "ends"))
        axes, steps = list(o.attribute("axes") or range(len(starts))), [1] * len(starts)
    else:
        given = o.numbers(1), o.numbers(2), o.numbers(4) if o.has(4) else []
        axes = (o.axes(3) or []) if o.has(3) else list(range(o.rank()))
        if None in given or any(isinstance(step, Number) or step < 1 for step in given[2] or ()):
            return o.write("slice_axes(a, s1, s2, axes, steps)", axes=tuple(axes),
                           steps=o.sizes(4) if o.has(4) else (1,) * len(axes))  # fmt: skip
        starts, ends, steps = (numbers or [] for numbers in given)
        steps = steps or [1] * len(starts)
    parts = {axis: _slice_of(*part) for axis, *part in zip(axes, starts, ends, steps, strict=False)}
    if len(parts) > 1:
        parts = {axis % o.rank(): inside for axis, inside in parts.items()}
        return o.write("a[*parts]", parts=[parts.get(axis, ast.Slice()) for axis in range(max(parts) + 1)])
    return o.write("a[*parts]", parts=_subscript(*next(iter(parts.items())))) if parts else o.write("a")


def _split(o: Operation) -> ast.expr:
    if o.version < 13 and o.attribute("split"):
        return o.write("a.split(split, axis)")
    if o.version >= 13 and o.has(1):
        return o.write("a.split(s1, axis)")
    count = o.attribute("num_outputs") or len(o.node.outputs)
    return o.write("a.chunk(count, axis)", count=count)


def _pad(o: Operation) -> ast.expr:
    if o.version < 11:
        return o.write("pad(a, pads, value, **attributes)")
    numbers = o.numbers(1)
    if numbers is None or o.has(3) or o.attribute("mode") != "constant" or o.kind() == "b":
        return o.write("pad(a, s1, n2, s3, **attributes)")
    half = len(numbers) // 2
    around = [number for axis in reversed(range(half)) for number in (numbers[axis], numbers[half + axis])]
    while len(around) > 2 and not any(isinstance(number, Number) or number for number in around[-2:]):
        around = around[:-2]
    is_zero = not o.has(2) or (o.number(2) is not None and not isinstance(o.number(2), Number) and o.number(2) == 0)
    return o.write("F.pad(a, around)" if is_zero else "F.pad(a, around, value=n2)", around=tuple(around))


SHAPE_OPERATORS: dict[str, str | Callable[[Operation], ast.expr]] = {
    "Transpose": _transpose, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Expand": _expand, "Gather": _gather, "Slice": _slice, "Split": _split, "Pad": _pad, "Tile": "a.tile(s1)",
    "Concat": "torch.cat([*operands], axis)", "GatherElements": "gather_elements(a, b, **attributes)",
    "GatherND": "gather_nd(a, b, **attributes)", "ScatterND": "scatter_nd(a, b, c, **attributes)",
    **dict.fromkeys(("Scatter", "ScatterElements"), "scatter_elements(a, b, c, **attributes)"),
    "DepthToSpace": "depth_to_space(a, **attributes)", "SpaceToDepth": "space_to_depth(a, **attributes)",
}  # fmt: skip
"""These operators, by name."""
