"""Operators that move elements as expressions of torch: shapes, slices, concatenations; see ``operators.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.torch_source import functions_of_tensors as f
from modelexport.torch_source.expressions import ATOM, Number, listed, literal_or_none
from modelexport.torch_source.operation import (
    E,
    Operation,
    Several,
    Text,
    UnwrittenError,
    Writer,
    Written,
    called,
    integers_of,
    listed_operands,
)

_END = 2**31 - 1
"""From here on the end of a slice is the end of its axis."""


def _transpose(o: Operation) -> Written:
    rank = o.rank()
    order = o.attribute("perm") or list(range(rank))[::-1]
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if len(moved) == 2:
        last = moved == [rank - 2, rank - 1]
        turned = ".T" if rank == 2 else ".transpose(-2, -1)" if last else f".transpose({moved[0]}, {moved[1]})"
        return E(f"{o.x(0, ATOM)}{turned}")
    return E(f"{o.x(0, ATOM)}.permute({', '.join(map(str, order))})" if moved else o.x(0, ATOM))


def _reshape(o: Operation) -> Written:
    numbers = o.numbers(1)
    if numbers is None:
        return o.call(f.reshape, Text(o.x()), Text(o.sizes(1)))
    keeps = not o.attribute("allowzero", 0)
    texts = [
        f"{o.x(0, ATOM)}.shape[{axis}]" if keeps and number.literal == 0 else number.text
        for axis, number in enumerate(numbers)
    ]
    return E(f"{o.x(0, ATOM)}.reshape({', '.join(texts) or '()'})")


def _flatten(o: Operation) -> Written:
    axis = o.attribute("axis", 1)
    axis = axis + o.rank() if axis < 0 else axis
    if axis == 1 and o.rank() > 1:
        return E(f"{o.x(0, ATOM)}.flatten(1)")
    return E(f"{o.x(0, ATOM)}.reshape(math.prod({o.x(0, ATOM)}.shape[:{axis}]), -1)")


def _squeeze(o: Operation) -> Written:
    axes = o.axes(1)
    shown = "" if not axes else axes[0] if len(axes) == 1 else literal_or_none(axes)
    return E(f"{o.x(0, ATOM)}.squeeze({shown})")


def _unsqueeze(o: Operation) -> Written:
    axes = o.axes(1) or []
    if len(axes) > 1:
        axes = sorted(axis % (o.rank() + len(axes)) for axis in axes)
    return E(o.x(0, ATOM) + "".join(f".unsqueeze({axis})" for axis in axes))


def _expand(o: Operation) -> Written:
    value, numbers = o.value(0), o.numbers(1)
    known: list[Any] = list(value.shape) if value is not None and value.shape is not None else []
    known = [1] * (len(numbers or ()) - len(known)) + known
    fits = numbers is not None and value is not None and value.shape is not None and len(known) == len(numbers)
    if fits and all(size in (1, number.literal) for size, number in zip(known, numbers or (), strict=True)):
        return E(f"{o.x(0, ATOM)}.expand({', '.join(number.text for number in numbers or ())})")
    return o.call(f.expand, Text(o.x()), Text(o.sizes(1)))


def _subscript(axis: int, inside: str) -> str:
    """The subscript of an axis, which may be counted from the end."""
    parts = ["...", inside, *[":"] * (-axis - 1)] if axis < 0 else [*[":"] * axis, inside]
    return f"[{', '.join(parts)}]"


def _gather(o: Operation) -> Written:
    axis, numbers = o.attribute("axis", 0), o.numbers(1)
    inside = o.x(1) if o.dtype(1) == ir.DataType.INT64 else f"{o.x(1, ATOM)}.long()"
    if numbers is not None and o.rank(1) == 0:
        inside = numbers[0].text
    elif numbers is not None and o.rank(1) == 1:
        inside = _run_of([number.literal for number in numbers]) or f"[{', '.join(number.text for number in numbers)}]"
    return E(f"{o.x(0, ATOM)}{_subscript(axis, inside)}")


def _run_of(places: list[Any]) -> str | None:
    """Places in equal steps as a slice."""
    if len(places) < 2 or None in places or places[0] < 0 or places[1] <= places[0]:
        return None
    steps = range(places[0], places[-1] + 1, places[1] - places[0])
    return _slice_text(steps.start, steps.stop, steps.step) if list(steps) == places else None


def _slice_text(start: Any, end: Any, step: Any) -> str:
    end = "" if isinstance(end, int) and end >= _END else end
    return f"{start or ''}:{end}" + (f":{step}" if step != 1 else "")


def _slice(o: Operation) -> Written:
    if o.version < 10:
        starts, ends = ([Number.of(each) for each in o.attribute(name)] for name in ("starts", "ends"))
        axes, steps = o.attribute("axes") or list(range(len(starts))), [Number.of(1)] * len(starts)
    else:
        given = o.numbers(1), o.numbers(2), o.numbers(4) if o.has(4) else []
        axes = o.integers(3) if o.has(3) else list(range(o.rank()))
        if axes is None:
            raise UnwrittenError("its axes are computed")
        if any(numbers is None for numbers in given) or any((n.literal or 0) < 1 for n in given[2] or ()):
            count = next((v.shape[0] for v in o.node.inputs[1:3] if v is not None and v.shape), len(axes))
            steps_text = Text(o.sizes(4)) if o.has(4) else [1] * len(axes)
            axes = axes[: count if isinstance(count, int) else None]
            return o.call(f.slice_axes, Text(o.x()), Text(o.sizes(1)), Text(o.sizes(2)), axes, steps_text)
        starts, ends, steps = (numbers or [] for numbers in given)
        steps = steps or [Number.of(1)] * len(starts)
    parts = {
        axis: _slice_text(*(n.text if n.literal is None else n.literal for n in (start, end, step)))
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=False)
    }
    if len(parts) > 1:
        parts = {axis % o.rank(): inside for axis, inside in parts.items()}
        return E(f"{o.x(0, ATOM)}[{', '.join(parts.get(axis, ':') for axis in range(max(parts) + 1))}]")
    return E(o.x(0, ATOM) + "".join(_subscript(axis, inside) for axis, inside in parts.items()))


def _split(o: Operation) -> Written:
    axis, count = o.attribute("axis", 0), len(o.node.outputs)
    if o.version < 13 and o.attribute("split"):
        return Several(f"{o.x(0, ATOM)}.split({literal_or_none(o.attribute('split'))}, {axis})", count)
    if o.version >= 13 and o.has(1):
        return Several(f"{o.x(0, ATOM)}.split({o.sizes(1)}, {axis})", count)
    size = f"-(-{o.x(0, ATOM)}.shape[{axis}] // {o.attribute('num_outputs', count)})"
    return Several(f"{o.x(0, ATOM)}.split({size}, {axis})", count)


def _pad(o: Operation) -> Written:
    if o.version < 11:
        return called(
            f.pad, inputs=(Text(o.x()), o.attribute("pads"), o.attribute("value")), ignored=("pads", "value")
        )(o)
    numbers = o.numbers(1)
    if numbers is None or o.has(3) or o.attribute("mode", "constant") != "constant" or o.kind() == "b":
        return called(f.pad, numbers=(1, 3), scalars=(2,))(o)
    half = len(numbers) // 2
    around = [number.text for axis in reversed(range(half)) for number in (numbers[axis], numbers[half + axis])]
    while len(around) > 2 and around[-2:] == ["0", "0"]:
        around = around[:-2]
    value = f", value={o.size(2)}" if o.has(2) and o.size(2) not in ("0", "0.0") else ""
    return E(f"F.pad({o.x()}, {listed(around)}{value})")


def _gather_nd(o: Operation) -> Written:
    """A reshape, if constant indices name every element in order."""
    value, indices = o.value(0), o.array(1)
    sizes = integers_of(value.shape) if value is not None and value.shape is not None else None
    if indices is not None and sizes and not o.attribute("batch_dims", 0) and indices.shape[-1] == len(sizes):
        whole = np.moveaxis(np.indices(sizes), 0, -1).reshape(-1, len(sizes))
        if np.array_equal(indices.reshape(-1, len(sizes)), whole):
            return E(f"{o.x(0, ATOM)}.reshape({', '.join(map(str, indices.shape[:-1]))})")
    return called(f.gather_nd)(o)


SHAPE_OPERATORS: dict[str, Writer] = {
    "Transpose": _transpose, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Expand": _expand, "Gather": _gather, "Slice": _slice, "Split": _split, "Pad": _pad,
    "Tile": lambda o: E(f"{o.x(0, ATOM)}.tile({o.sizes(1)})"),
    "Concat": lambda o: E(f"torch.cat([{listed_operands(o)}], {o.attribute('axis', 1)})"),
    "GatherElements": called(f.gather_elements), "GatherND": _gather_nd, "ScatterND": called(f.scatter_nd),
    "ScatterElements": called(f.scatter_elements), "Scatter": called(f.scatter_elements),
    "DepthToSpace": called(f.depth_to_space), "SpaceToDepth": called(f.space_to_depth),
}  # fmt: skip
"""These operators, by name."""
