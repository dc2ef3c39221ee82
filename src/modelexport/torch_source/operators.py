"""The operators of ONNX as expressions of torch: one table, a row for each operator.

To add an operator, add a row to ``OPERATORS``: its name, and what gives its text. If it takes more than one call of
torch, write a function into ``functions_of_tensors.py`` or its neighbors and call it with :meth:`Operation.use`;
``tests/torch_source/test_operators.py`` checks each row against the standard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from modelexport.torch_source import functions_of_tensors as f
from modelexport.torch_source.expressions import (
    AND,
    ATOM,
    COMPARISON,
    OR,
    POWER,
    PRODUCT,
    SUM,
    UNARY,
    XOR,
    Expression,
    Number,
    listed,
    literal,
)
from modelexport.torch_source.operation import Operation, Several, Text, Unwritten, literal_or_none

E = Expression
Written = Expression | list[Expression] | Several
"""The text of one output, of each, or of all in one."""
Writer = Callable[[Operation], Written]

_LAST = 2**31 - 1
"""Ends of slices from here on stand for the end of the axis."""


def _function(name: str) -> Writer:
    return lambda o: E(f"{name}({o.x()})")


def _method(text: str) -> Writer:
    return lambda o: E(f"{o.x(0, ATOM)}.{text}")


def _both(sign: str, binding: int) -> Writer:
    left, right = binding + (binding == COMPARISON), binding + 1

    def write(o: Operation) -> Expression:
        if o.number(0) is not None and o.number(1) is not None:
            return E(f"{o.x(0, left)} {sign} {o.x(1, right)}", binding)
        return E(f"{o.scalar(0, left)} {sign} {o.scalar(1, right)}", binding)

    return write


def _div(o: Operation) -> Expression:
    if o.kind() in "iu":
        return o.use(f.divide_integers, o.t(0), Text(o.scalar(1)))
    result = _both("/", PRODUCT)(o)
    assert isinstance(result, Expression)
    return result


def _mod(o: Operation) -> Expression:
    return E(f"torch.{'fmod' if o.attribute('fmod', 0) else 'remainder'}({o.x()}, {o.scalar(1)})")


def _pow(o: Operation) -> Expression:
    number = o.number(1)
    base = o.x(0, ATOM)
    if number is not None and number.literal == 2:
        return E(f"{base}.square()")
    if number is not None and number.literal == 0.5:
        return E(f"{base}.sqrt()")
    text = E(f"{base} ** {o.scalar(1, POWER)}", POWER)
    same = o.dtype() == o.dtype(1) or o.kind() == "f"
    return text if same else o.converted(text.within(ATOM), o.dtype())


def _many(name: str, sign: str | None = None) -> Writer:
    def write(o: Operation) -> Expression:
        texts = [o.x(i, SUM + 1 if sign else 0) for i in range(len(o.node.inputs))]
        if sign:
            return E(f" {sign} ".join(texts), SUM if len(texts) > 1 else SUM + 1)
        result = o.x()
        for text in [o.x(i) for i in range(1, len(texts))]:
            result = f"{name}({result}, {text})"
        return E(result, ATOM if len(texts) > 1 else 0)

    return write


def _mean(o: Operation) -> Expression:
    texts = [o.x(i, SUM + 1) for i in range(len(o.node.inputs))]
    return E(f"({' + '.join(texts)}) / {len(texts)}", PRODUCT)


def _where(o: Operation) -> Expression:
    yes, no = o.number(1), o.number(2)
    if yes is not None and no is not None and all(v is not None and v.shape is not None for v in o.node.inputs):
        if o.rank(0) >= max(o.rank(1), o.rank(2)) and o.kind(1) == "f":
            result = E(f"torch.where({o.x()}, {yes.text}, {no.text})")
            is_float32 = o.type_of(o.dtype(1)) == "torch.float32"
            return result if is_float32 else o.converted(result.text, o.dtype(1))
        return E(f"torch.where({o.x()}, {o.x(1)}, {o.x(2)})")
    return E(f"torch.where({o.x()}, {o.scalar(1)}, {o.scalar(2)})")


def _cast(o: Operation) -> Expression:
    to = o.attribute("to") if o.node.op_type == "Cast" else o.dtype(1)
    if to is None or ir.DataType(to).name == "STRING" or o.kind() == "O":
        raise Unwritten("PyTorch has no texts")
    return o.converted(o.x(0, ATOM), to)


def _clip(o: Operation) -> Expression:
    if o.version < 11:
        bounds = [None if (b := o.attribute(name)) is None else literal(b) for name in ("min", "max")]
    else:
        bounds = [o.scalar(i) if o.has(i) else None for i in (1, 2)]
    named = [f"{name}={bound}" for name, bound in zip(("min", "max"), bounds, strict=True) if bound is not None]
    mixed = o.version >= 11 and any(o.has(i) and o.number(i) is None for i in (1, 2))
    if mixed:
        bounds = [o.x(i) if o.has(i) else None for i in (1, 2)]
        named = [f"{name}={bound}" for name, bound in zip(("min", "max"), bounds, strict=True) if bound is not None]
    return E(f"{o.x(0, ATOM)}.clamp({', '.join(named)})") if named else E(o.x(0, ATOM))


def _matmul(o: Operation) -> Expression:
    return E(f"{o.x(0, PRODUCT)} @ {o.x(1, PRODUCT + 1)}", PRODUCT)


def _gemm(o: Operation) -> Expression:
    a, b = (f"{o.x(i, ATOM)}.T" if o.attribute(name, 0) else o.x(i, PRODUCT + i) for i, name in enumerate(("transA", "transB")))
    alpha, beta = o.attribute("alpha", 1.0), o.attribute("beta", 1.0)
    result = f"{a} @ {b}" if alpha == 1 else f"{literal(alpha)} * ({a} @ {b})"
    if not o.has(2) or beta == 0:
        return E(result, PRODUCT)
    return E(f"{result} + {o.x(2, SUM + 1) if beta == 1 else f'{literal(beta)} * {o.x(2, PRODUCT + 1)}'}", SUM)


def _transpose(o: Operation) -> Expression:
    rank = o.rank()
    order = o.attribute("perm") or list(range(rank))[::-1]
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if rank == 2 and moved:
        return E(f"{o.x(0, ATOM)}.T")
    if len(moved) == 2:
        first, second = moved if moved[1] < rank - 1 or moved[0] < rank - 2 else [-2, -1]
        return E(f"{o.x(0, ATOM)}.transpose({first}, {second})")
    return E(f"{o.x(0, ATOM)}.permute({', '.join(map(str, order))})") if moved else E(o.x(0, ATOM))


def _reshape(o: Operation) -> Expression:
    numbers = o.numbers(1) if o.version >= 5 else [Number.of(size) for size in o.attribute("shape")]
    if numbers is None:
        return o.use(f.reshape, o.t(0), Text(o.sizes(1)))
    texts = [number.text for number in numbers]
    if not o.attribute("allowzero", 0):
        for axis, number in enumerate(numbers):
            if number.literal == 0:
                texts[axis] = f"{o.x(0, ATOM)}.shape[{axis}]"
    return E(f"{o.x(0, ATOM)}.reshape({', '.join(texts) if texts else '()'})")


def _flatten(o: Operation) -> Expression:
    axis = o.attribute("axis", 1)
    axis = axis + o.rank() if axis < 0 else axis
    if axis == 1:
        return E(f"{o.x(0, ATOM)}.flatten(1)") if o.rank() > 1 else E(f"{o.x(0, ATOM)}.unsqueeze(1)")
    sizes = ", ".join(f"{o.x(0, ATOM)}.shape[{each}]" for each in range(axis))
    return E(f"{o.x(0, ATOM)}.reshape(math.prod(({sizes},)), -1)" if axis else f"{o.x(0, ATOM)}.reshape(1, -1)")


def _squeeze(o: Operation) -> Expression:
    axes = o.axes(1)
    if axes is None:
        return E(f"{o.x(0, ATOM)}.squeeze()")
    return E(f"{o.x(0, ATOM)}.squeeze({literal_or_none(axes) if len(axes) != 1 else axes[0]})")


def _unsqueeze(o: Operation) -> Expression:
    axes = o.axes(1) or []
    rank = None if o.node.outputs[0].shape is None else len(o.node.outputs[0].shape)
    if rank is None and any(axis < 0 for axis in axes) and len(axes) > 1:
        rank = o.rank() + len(axes)
    ordered = axes if len(axes) == 1 else sorted(axis + (rank or 0) if axis < 0 else axis for axis in axes)
    return E(o.x(0, ATOM) + "".join(f".unsqueeze({axis})" for axis in ordered))


def _expand(o: Operation) -> Expression:
    value, numbers = o.value(0), o.numbers(1)
    if numbers is None or value is None or value.shape is None:
        return o.use(f.expand, o.t(0), Text(o.sizes(1)))
    known: list[Any] = [1] * (len(numbers) - len(value.shape)) + list(value.shape)
    if len(known) != len(numbers) or any(size != 1 and number.literal != size for size, number in zip(known, numbers, strict=True)):
        return o.use(f.expand, o.t(0), Text(o.sizes(1)))
    return E(f"{o.x(0, ATOM)}.expand({', '.join(number.text for number in numbers)})")


def _concat(o: Operation) -> Expression:
    texts = [o.x(i) for i in range(len(o.node.inputs))]
    return E(f"torch.cat({listed(texts)}, {o.attribute('axis', 1)})")


def _indexed(axis: int, inside: str) -> str:
    """The subscript of an axis: of the last one with an ellipsis before it if it is counted from the end."""
    if axis < 0:
        return "[" + ", ".join(["...", inside, *[":"] * (-axis - 1)]) + "]"
    return "[" + ", ".join([*[":"] * axis, inside]) + "]"


def _gather(o: Operation) -> Expression:
    axis, place = o.attribute("axis", 0), o.number(1)
    scalar = place is not None and o.rank(1) == 0
    if scalar:
        assert place is not None
        return E(f"{o.x(0, ATOM)}{_indexed(axis, place.text)}")
    numbers = o.numbers(1)
    if numbers is not None and o.rank(1) == 1:
        literals = [number.literal for number in numbers]
        if None not in literals and len(literals) > 1:
            step = literals[1] - literals[0]
            if step > 0 and literals[0] >= 0 and literals == list(range(literals[0], literals[-1] + 1, step)):
                return E(f"{o.x(0, ATOM)}{_indexed(axis, _slice_text(literals[0], literals[-1] + 1, step))}")
        places = ", ".join(number.text for number in numbers)
        return E(f"{o.x(0, ATOM)}{_indexed(axis, f'[{places}]')}")
    indices = o.x(1) if o.dtype(1) == ir.DataType.INT64 else f"{o.x(1, ATOM)}.long()"
    return E(f"{o.x(0, ATOM)}{_indexed(axis, indices)}")


def _slice_text(start: Any, end: Any, step: Any = 1) -> str:
    start = "" if start in (0, "0") else start
    end = "" if isinstance(end, int) and end >= _LAST else end
    return f"{start}:{end}" + (f":{step}" if step not in (1, "1") else "")


def _slice(o: Operation) -> Expression:
    if o.version < 10:
        starts, ends = ([Number.of(each) for each in o.attribute(name)] for name in ("starts", "ends"))
        axes, steps = o.attribute("axes") or list(range(len(starts))), [Number.of(1)] * len(starts)
    else:
        numbers = [o.numbers(1), o.numbers(2), o.numbers(4) if o.has(4) else []]
        axes = o.integers(3) if o.has(3) else None
        if numbers[0] is None or numbers[1] is None or numbers[2] is None or (o.has(3) and axes is None):
            return _slice_at_run(o, axes)
        starts, ends, steps = numbers
        axes, steps = axes or list(range(len(starts))), steps or [Number.of(1)] * len(starts)
    if any(step.literal is None or step.literal < 0 for step in steps):
        return _slice_at_run(o, axes)
    parts: dict[int, str] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        last = end.literal if end.literal is not None else end.text
        parts[axis] = _slice_text(start.literal if start.literal is not None else start.text, last, step.literal)
    if len(parts) == 1:
        ((axis, inside),) = parts.items()
        return E(f"{o.x(0, ATOM)}{_indexed(axis, inside)}")
    parts = {axis % o.rank(): inside for axis, inside in parts.items()}
    return E(f"{o.x(0, ATOM)}[{', '.join(parts.get(axis, ':') for axis in range(max(parts) + 1))}]")


def _slice_at_run(o: Operation, axes: list[int] | None) -> Expression:
    count = next((v.shape[0] for v in o.node.inputs[1:3] if v is not None and v.shape), None)
    if axes is None and not isinstance(count, int):
        raise Unwritten("how many axes it cuts is not known")
    axes = axes or list(range(int(str(count))))
    steps = Text(o.sizes(4)) if o.has(4) else [1] * len(axes)
    return o.use(f.slice_axes, o.t(0), Text(o.sizes(1)), Text(o.sizes(2)), axes, steps)


def _split(o: Operation) -> Several:
    axis, count = o.attribute("axis", 0), len(o.node.outputs)
    parts = o.attribute("split") if o.version < 13 else o.numbers(1)
    if parts is not None:
        sizes = listed([part.text if isinstance(part, Number) else str(part) for part in parts])
        whole = f"{o.x(0, ATOM)}.split({sizes}, {axis})"
    elif o.has(1):
        whole = f"{o.x(0, ATOM)}.split({o.sizes(1)}, {axis})"
    else:
        whole = o.use(f.split, o.t(0), o.attribute("num_outputs", count), axis).text
    return Several(whole, count)


def _reduce(text: str, *, whole: str | None = None) -> Writer:
    """A reduction: ``{x}`` is the operand, ``{axes}`` the axes and ``keepdim``."""

    def write(o: Operation) -> Expression:
        axes, keep = o.axes(1), bool(o.attribute("keepdims", 1))
        if not axes and o.attribute("noop_with_empty_axes", 0):
            return E(text.format(x=o.x(0, ATOM), axes="()") if whole == "noop" else o.x(0, ATOM))
        value = o.value(0)
        rank = None if value is None or value.shape is None else len(value.shape)
        if not axes:
            axes = list(range(rank)) if rank is not None else []
        if rank == 0:
            return E(text.format(x=f"{o.x(0, ATOM)}.unsqueeze(0)", axes="0"))
        axes_text = str(axes[0]) if len(axes) == 1 else listed([str(axis) for axis in axes])
        if not axes and not keep:
            axes_text = ""
        elif not axes:
            raise Unwritten("the number of axes of its input is not known")
        return E(text.format(x=o.x(0, ATOM), axes=f"{axes_text}, keepdim=True" if keep else axes_text))

    return write


def _reduce_product(o: Operation) -> Expression:
    axes = o.axes(1) or list(range(o.rank()))
    result, keep = o.x(0, ATOM), bool(o.attribute("keepdims", 1))
    if o.axes(1) in (None, []) and o.attribute("noop_with_empty_axes", 0):
        return E(result)
    for axis in sorted((axis % o.rank() for axis in axes), reverse=True):
        result += f".prod({axis}{', keepdim=True' if keep else ''}, dtype={result_type(o)})"
    return E(result)


def result_type(o: Operation) -> str:
    """The element type of the first output as PyTorch names it."""
    dtype = o.node.outputs[0].dtype or o.dtype()
    if dtype is None:
        raise Unwritten("the type of its output is not known")
    return o.type_of(dtype)


def _reduce_sum(o: Operation) -> Expression:
    result = _reduce("{x}.sum({axes})")(o)
    assert isinstance(result, Expression)
    if o.kind() in "iu" and o.dtype() != ir.DataType.INT64 and ".sum(" in result.text:
        return E(f"{result.text[:-1]}, dtype={o.type_of(o.dtype())})")
    return result


def _softmax(o: Operation) -> Expression:
    log = o.node.op_type == "LogSoftmax"
    axis = o.attribute("axis", -1 if o.version >= 13 else 1)
    if o.version < 13 and axis not in (-1, o.rank() - 1):
        return o.use(f.one_axis_softmax, o.t(0), axis, log)
    return E(f"{o.x(0, ATOM)}.{'log_softmax' if log else 'softmax'}({axis})")


def _arg(largest: bool) -> Writer:
    def write(o: Operation) -> Expression:
        axis, keep = o.attribute("axis", 0), bool(o.attribute("keepdims", 1))
        if not o.attribute("select_last_index", 0):
            return E(f"{o.x(0, ATOM)}.{'argmax' if largest else 'argmin'}({axis}, {keep})" if keep
                     else f"{o.x(0, ATOM)}.{'argmax' if largest else 'argmin'}({axis})")  # fmt: skip
        return o.use(f.arg_extreme, o.t(0), axis, keep, True, largest)

    return write


def _cumsum(o: Operation) -> Expression:
    axis, exclusive, reverse = o.size(1), bool(o.attribute("exclusive", 0)), bool(o.attribute("reverse", 0))
    if not exclusive and not reverse:
        return E(f"{o.x(0, ATOM)}.cumsum({axis}{'' if o.kind() == 'f' else f', dtype={o.type_of(o.dtype())}'})")
    return o.use(f.cumulative_sum, o.t(0), Text(axis), exclusive, reverse)


def _constant_of_shape(o: Operation) -> Expression:
    tensor = o.attribute("value")
    number, dtype = (0.0, ir.DataType.FLOAT) if tensor is None else (tensor.numpy().reshape(-1)[0].item(), tensor.dtype)
    return E(f"torch.full({o.sizes(0)}, {literal(number)}, dtype={o.type_of(dtype)}{o.scope.device})")


def _range(o: Operation) -> Expression:
    texts = [o.size(index) for index in range(3)]
    shown = texts[1:2] if texts[0] in ("0", "0.0") and texts[2] in ("1", "1.0") else texts[:2] if texts[2] == "1" else texts
    return E(f"torch.arange({', '.join(shown)}, dtype={o.type_of(o.dtype())}{o.scope.device})")


def _shape(o: Operation) -> Expression:
    text = f"{o.x(0, ATOM)}.shape"
    start, end = o.attribute("start", 0), o.attribute("end")
    cut = f"[{start or ''}:{'' if end is None else end}]" if start or end is not None else ""
    return E(f"torch.tensor({text}{cut}{o.scope.device})")


def _pad(o: Operation) -> Expression:
    mode = o.attribute("mode", "constant")
    pads = o.attribute("pads") if o.version < 11 else o.numbers(1)
    pads_text = o.sizes(1) if pads is None else listed([p.text if isinstance(p, Number) else str(p) for p in pads])
    value = literal(o.attribute("value", 0.0)) if o.version < 11 else o.size(2) if o.has(2) else "0"
    axes = o.axes(3) if o.version >= 18 else None
    if pads is not None and axes is None and mode == "constant" and o.kind() != "b":
        texts = pads_text[1:-1].rstrip(",").split(", ")
        half = len(texts) // 2
        around = [each for axis in reversed(range(half)) for each in (texts[axis], texts[half + axis])]
        while len(around) > 2 and around[-2:] == ["0", "0"]:
            around = around[:-2]
        return E(f"F.pad({o.x()}, {listed(around)}{'' if value in ('0', '0.0') else f', value={value}'})")
    return o.use(f.pad, o.t(0), Text(pads_text), mode, Text(value), axes)


def _one_hot(o: Operation) -> Expression:
    return o.use(f.one_hot, o.t(0), Text(o.size(1)), o.t(2), o.attribute("axis", -1))


def _top_k(o: Operation) -> Several:
    k = Text(str(o.attribute("k"))) if o.version < 10 else Text(o.size(1))
    axis, largest = o.attribute("axis", -1), bool(o.attribute("largest", 1))
    return o.several(2, f.top_k, o.t(0), k, axis, largest)


def _unique(o: Operation) -> Several:
    return o.several(4, f.unique, o.t(0), o.attribute("axis"), bool(o.attribute("sorted", 1)))


def _tri(o: Operation) -> Expression:
    k = o.size(1) if o.has(1) else "0"
    return E(f"{o.x(0, ATOM)}.{'triu' if o.attribute('upper', 1) else 'tril'}({k if k != '0' else ''})")


def _dropout(o: Operation) -> list[Expression]:
    training = o.version >= 12 and o.has(2) and (o.number(2) is None or bool(getattr(o.number(2), "literal", False)))
    ratio = literal(o.attribute("ratio", 0.5)) if o.version < 12 else o.size(1) if o.has(1) else "0.5"
    result = f"F.dropout({o.x()}, {ratio}, {o.size(2)})" if training else o.x(0, ATOM)
    mask = f"torch.ones_like({o.x()}, dtype=torch.bool)"
    return [E(result), E(f"{result} != 0", COMPARISON) if training else E(mask)][: len(o.node.outputs)]


def _is_inf(o: Operation) -> Expression:
    both = o.attribute("detect_positive", 1), o.attribute("detect_negative", 1)
    names = {(1, 1): "isinf", (1, 0): "isposinf", (0, 1): "isneginf"}
    return E(f"torch.{names[both]}({o.x()})") if any(both) else E(f"torch.zeros_like({o.x()}, dtype=torch.bool)")


def _resize(o: Operation) -> Expression:
    upsample = o.node.op_type == "Upsample" or o.version < 11
    value = o.value(0)
    if value is None or value.shape is None:
        raise Unwritten("the number of axes of its input is not known")
    rank, mode = o.rank(), o.attribute("mode", "nearest")
    places = o.attribute("coordinate_transformation_mode", "asymmetric" if upsample else "half_pixel")
    axes = [axis % rank for axis in o.attribute("axes") or range(rank)]
    by_scale = 1 if upsample else 2
    scales = o.array(by_scale) if o.has(by_scale) else None
    scales = o.attribute("scales") if scales is None and "scales" in o.node.attributes else scales
    if scales is not None and len(scales):
        numbers = [float(scale) for scale in scales]
        kept = [index for index, scale in enumerate(numbers) if scale != 1]
        sizes = [f"int({o.x(0, ATOM)}.shape[{axes[i]}] * {literal(numbers[i])})" for i in kept]
        factors: list[str] = [literal(numbers[i]) for i in kept]
    else:
        wanted = o.numbers(3)
        if wanted is None:
            raise Unwritten("its sizes are computed from values of tensors")
        if o.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Unwritten("it keeps the ratio of sides")
        kept = [i for i in range(len(axes)) if not (wanted[i].literal == value.shape[axes[i]]
                                                    or wanted[i].text == f"{o.x(0, ATOM)}.shape[{axes[i]}]")]  # fmt: skip
        sizes = [wanted[i].text for i in kept]
        factors = [f"{wanted[i].expression.within(PRODUCT)} / {o.x(0, ATOM)}.shape[{axes[i]}]" for i in kept]
    nearest = o.attribute("nearest_mode", "floor" if upsample else "round_prefer_floor")
    mode = "linear" if mode in ("bilinear", "trilinear") else mode
    plain = kept and [axes[i] for i in kept] == list(range(2, rank)) and not o.attribute("exclude_outside", 0)
    exact = not (scales is not None and len(scales)) or all(float(scales[i]).is_integer() for i in kept)
    method = {
        ("nearest", "asymmetric", 4): "nearest", ("nearest", "asymmetric", 3): "nearest",
        ("nearest", "asymmetric", 5): "nearest", ("linear", "half_pixel", 4): "bilinear",
        ("linear", "pytorch_half_pixel", 4): "bilinear", ("linear", "align_corners", 4): "bilinear",
        ("linear", "half_pixel", 3): "linear", ("linear", "pytorch_half_pixel", 3): "linear",
        ("cubic", "half_pixel", 4): "bicubic", ("cubic", "pytorch_half_pixel", 4): "bicubic",
        ("cubic", "align_corners", 4): "bicubic",
    }.get((mode, places, rank))  # fmt: skip
    fits = mode != "nearest" or nearest == "floor"
    fits = fits and (mode != "cubic" or abs(o.attribute("cubic_coeff_a", -0.75) + 0.75) < 1e-6)
    if method and plain and exact and fits and not o.attribute("antialias", 0):
        corners = "" if mode == "nearest" else f", align_corners={places == 'align_corners'}"
        return E(f"F.interpolate({o.x()}, {listed(sizes)}, mode={method!r}{corners})")
    how = {
        "nearest_mode": nearest,
        "cubic_coeff_a": o.attribute("cubic_coeff_a", -0.75),
        "exclude_outside": bool(o.attribute("exclude_outside", 0)),
        "antialias": bool(o.attribute("antialias", 0)),
        "extrapolation_value": o.attribute("extrapolation_value", 0.0),
    }
    texts = [f", {name}={literal(each)}" for name, each in how.items()]
    if places == "tf_crop_and_resize":
        roi, count = [float(each) for each in o.array(1)], len(axes)
        texts.append(f", roi={literal([roi[i] for i in kept] + [roi[count + i] for i in kept])}")
    o.scope.helpers.add(f.resize)
    return E(
        f"resize({o.x()}, {listed(sizes)}, {listed(factors)}, {literal_or_none([axes[i] for i in kept])}, {mode!r}, "
        f"{ascii(places)}{''.join(texts)})"
    )


def _dft(o: Operation) -> Expression:
    axis = o.integers(2) if o.version >= 20 and o.has(2) else None
    place = axis[0] if axis else o.attribute("axis", 1 if o.version < 20 else -2)
    length = Text(o.size(1)) if o.has(1) else None
    inverse, one_sided = bool(o.attribute("inverse", 0)), bool(o.attribute("onesided", 0))
    return o.use(f.discrete_fourier, o.t(0), length, place, inverse, one_sided)


def _stft(o: Operation) -> Expression:
    window = o.t(2) if o.has(2) else None
    length = Text(o.size(3)) if o.has(3) else None
    return o.use(f.short_time_fourier, o.t(0), Text(o.size(1)), window, length, bool(o.attribute("onesided", 1)))


def _window(name: str, constants: str = "") -> Writer:
    def write(o: Operation) -> Expression:
        dtype = o.type_of(o.attribute("output_datatype", 1))
        periodic = bool(o.attribute("periodic", 1))
        return E(f"torch.{name}({o.size(0)}, periodic={periodic}{constants}, dtype={dtype}{o.scope.device})")

    return write


def _random(name: str) -> Writer:
    def write(o: Operation) -> Expression:
        like = o.node.op_type.endswith("Like")
        dtype = o.attribute("dtype", None if like else 1)
        drawn = (f"torch.{name}_like({o.x()}{f', dtype={o.type_of(dtype)}' if dtype else ''})" if like
                 else f"torch.{name}({literal_or_none(o.attribute('shape'))}, dtype={o.type_of(dtype)}{o.scope.device})")  # fmt: skip
        first, second = ("mean", "scale") if name == "randn" else ("low", "high")
        start, end = o.attribute(first, 0.0), o.attribute(second, 1.0)
        width = end if name == "randn" else end - start
        if (start, width) == (0.0, 1.0):
            return E(drawn)
        return E(f"{drawn} * {literal(width)} + {literal(start)}", SUM)

    return write


def _compress(o: Operation) -> Expression:
    axis = o.attribute("axis")
    x = f"{o.x(0, ATOM)}.flatten()" if axis is None else o.x(0, ATOM)
    return E(f"{x}.index_select({axis or 0}, {o.x(1, ATOM)}.nonzero().flatten())")


def _einsum(o: Operation) -> Expression:
    texts = [o.x(i) for i in range(len(o.node.inputs))]
    return E(f"torch.einsum({ascii(o.attribute('equation'))}, {', '.join(texts)})")


def _nms(o: Operation) -> Expression:
    most = Text(o.size(2)) if o.has(2) else 0
    overlap = Text(o.size(3)) if o.has(3) else 0.0
    least = Text(o.size(4)) if o.has(4) else None
    return o.use(f.non_max_suppression, o.t(0), o.t(1), most, overlap, least, bool(o.attribute("center_point_box", 0)))


def _grid_sample(o: Operation) -> Expression:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(o.attribute("mode", "linear"), o.attribute("mode", "linear"))
    if mode not in ("bilinear", "bicubic", "nearest"):
        raise Unwritten(f"its mode is {mode}")
    padding, corners = o.attribute("padding_mode", "zeros"), bool(o.attribute("align_corners", 0))
    return E(f"F.grid_sample({o.x()}, {o.x(1)}, {mode!r}, {ascii(padding)}, align_corners={corners})")


def _sequence(o: Operation) -> Expression:
    return E(f"[{', '.join(o.x(i) for i in range(len(o.node.inputs)))}]")


def _split_to_sequence(o: Operation) -> Expression:
    axis, keep = o.attribute("axis", 0), o.attribute("keepdims", 1)
    if not o.has(1):
        return E(f"list({o.x(0, ATOM)}.split(1, {axis}))" if keep else f"list({o.x(0, ATOM)}.unbind({axis}))")
    return E(f"list({o.x(0, ATOM)}.split({o.size(1) if o.number(1) is not None and o.rank(1) == 0 else o.sizes(1)}, {axis}))")


def _insert(o: Operation) -> Expression:
    if not o.has(2):
        return E(f"[*{o.x()}, {o.x(1)}]")
    place = o.size(2)
    return E(f"[*{o.x(0, ATOM)}[:{place}], {o.x(1)}, *{o.x(0, ATOM)}[{place}:]]")


def _concat_from_sequence(o: Operation) -> Expression:
    return E(f"torch.{'stack' if o.attribute('new_axis', 0) else 'cat'}({o.x()}, {o.attribute('axis')})")


def _bit_shift(o: Operation) -> Expression:
    return E(f"{o.x(0, ATOM)} {'<<' if o.attribute('direction') == 'LEFT' else '>>'} {o.scalar(1, ATOM)}", SUM - 1)


def _alpha(text: str, **defaults: float) -> Writer:
    """An activation with attributes: ``{x}`` is the operand as an argument, ``{a}`` as an atom."""

    def write(o: Operation) -> Expression:
        numbers = {name: literal(o.attribute(name, default)) for name, default in defaults.items()}
        atom = "{a}" in text
        return E(text.format(x="" if atom else o.x(), a=o.x(0, ATOM) if atom else "", **numbers), PRODUCT if " * " in text else ATOM)

    return write


def _gelu(o: Operation) -> Expression:
    tanh = ", approximate='tanh'" if o.attribute("approximate", "none") == "tanh" else ""
    return E(f"F.gelu({o.x()}{tanh})")


_REDUCTIONS: dict[str, Writer] = {
    "ReduceSum": _reduce_sum,
    "ReduceMean": _reduce("{x}.mean({axes})"),
    "ReduceMax": _reduce("{x}.amax({axes})"),
    "ReduceMin": _reduce("{x}.amin({axes})"),
    "ReduceProd": _reduce_product,
    "ReduceL1": _reduce("{x}.abs().sum({axes})"),
    "ReduceL2": _reduce("{x}.square().sum({axes}).sqrt()"),
    "ReduceLogSum": _reduce("{x}.sum({axes}).log()"),
    "ReduceLogSumExp": _reduce("{x}.logsumexp({axes})"),
    "ReduceSumSquare": _reduce("{x}.square().sum({axes})"),
}

TENSOR_OPERATORS: dict[str, Writer] = {
    **_REDUCTIONS,
    **{name: _function(f"torch.{name.lower()}") for name in (
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsNaN",
        "Log", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh", "Det")},
    **{name: _function(f"F.{name.lower()}") for name in ("Mish", "Softplus", "Softsign", "HardSwish")},
    "Add": _both("+", SUM), "Sub": _both("-", SUM), "Mul": _both("*", PRODUCT), "Div": _div, "Mod": _mod, "Pow": _pow,
    "Neg": lambda o: E(f"-{o.x(0, UNARY)}", UNARY), "Reciprocal": lambda o: E(f"1 / {o.x(0, PRODUCT + 1)}", PRODUCT),
    "Equal": _both("==", COMPARISON), "Less": _both("<", COMPARISON), "LessOrEqual": _both("<=", COMPARISON),
    "Greater": _both(">", COMPARISON), "GreaterOrEqual": _both(">=", COMPARISON),
    "And": _both("&", AND), "Or": _both("|", OR), "Xor": _both("^", XOR), "Not": lambda o: E(f"~{o.x(0, UNARY)}", UNARY),
    "BitwiseAnd": _both("&", AND), "BitwiseOr": _both("|", OR), "BitwiseXor": _both("^", XOR),
    "BitwiseNot": lambda o: E(f"~{o.x(0, UNARY)}", UNARY), "BitShift": _bit_shift,
    "Max": _many("torch.maximum"), "Min": _many("torch.minimum"), "Sum": _many("", "+"), "Mean": _mean,
    "Where": _where, "Cast": _cast, "CastLike": _cast, "Clip": _clip, "MatMul": _matmul, "Gemm": _gemm,
    "Einsum": _einsum, "Identity": lambda o: E(o.x(0, ATOM)), "Transpose": _transpose, "Reshape": _reshape,
    "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Expand": _expand, "Concat": _concat,
    "Tile": lambda o: E(f"{o.x(0, ATOM)}.tile({o.sizes(1)})"), "Gather": _gather, "Slice": _slice, "Split": _split,
    "GatherElements": lambda o: o.use(f.gather_elements, o.t(0), o.t(1), o.attribute("axis", 0)),
    "GatherND": lambda o: o.use(f.gather_nd, o.t(0), o.t(1), o.attribute("batch_dims", 0)),
    "ScatterND": lambda o: o.use(f.scatter_nd, o.t(0), o.t(1), o.t(2), o.attribute("reduction", "none")),
    **dict.fromkeys(("ScatterElements", "Scatter"), lambda o: o.use(
        f.scatter_elements, o.t(0), o.t(1), o.t(2), o.attribute("axis", 0), o.attribute("reduction", "none"))),
    "Softmax": _softmax, "LogSoftmax": _softmax, "ArgMax": _arg(True), "ArgMin": _arg(False), "CumSum": _cumsum,
    "ConstantOfShape": _constant_of_shape, "Range": _range, "Shape": _shape,
    "Size": lambda o: E(f"torch.tensor({o.x(0, ATOM)}.numel())"),
    "Pad": _pad, "OneHot": _one_hot, "TopK": _top_k, "Unique": _unique, "Trilu": _tri, "Dropout": _dropout,
    "NonZero": lambda o: E(f"{o.x(0, ATOM)}.nonzero().T"), "Compress": _compress, "IsInf": _is_inf,
    "EyeLike": lambda o: E(f"torch.eye(*{o.x(0, ATOM)}.shape, dtype={o.type_of(o.attribute('dtype') or o.dtype())}{o.scope.device})"
                           + (f".roll({o.attribute('k')}, 1)" if o.attribute("k", 0) else "")),
    "Hardmax": lambda o: o.use(f.hardmax, o.t(0), o.attribute("axis", -1)),
    "ReverseSequence": lambda o: o.use(
        f.reverse_sequence, o.t(0), o.t(1), o.attribute("batch_axis", 1), o.attribute("time_axis", 0)),
    "DepthToSpace": lambda o: o.use(f.depth_to_space, o.t(0), o.attribute("blocksize"), o.attribute("mode", "DCR")),
    "SpaceToDepth": lambda o: o.use(f.space_to_depth, o.t(0), o.attribute("blocksize")),
    "CenterCropPad": lambda o: o.use(f.center_crop_pad, o.t(0), Text(o.sizes(1)), o.attribute("axes")),
    "Resize": _resize, "Upsample": _resize, "DFT": _dft, "STFT": _stft, "GridSample": _grid_sample,
    "HannWindow": _window("hann_window"), "HammingWindow": _window("hamming_window", f", alpha={25 / 46!r}, beta={21 / 46!r}"),
    "BlackmanWindow": _window("blackman_window"), "NonMaxSuppression": _nms,
    "RandomNormal": _random("randn"), "RandomNormalLike": _random("randn"),
    "RandomUniform": _random("rand"), "RandomUniformLike": _random("rand"),
    "Bernoulli": lambda o: E(f"torch.bernoulli({o.x()})" + (f".to({o.type_of(o.attribute('dtype'))})" if o.attribute("dtype") else "")),
    "Multinomial": lambda o: E(f"torch.multinomial({o.x(0, ATOM)}.exp(), {o.attribute('sample_size', 1)}, True)"
                               + f".to({o.type_of(o.attribute('dtype', 6))})"),
    "TensorScatter": lambda o: o.use(f.scatter_cache, o.t(0), o.t(1), o.t(2) if o.has(2) else None,
                                     o.attribute("axis", -2), o.attribute("mode", "linear")),
    "Gelu": _gelu, "Swish": lambda o: E(f"{o.x(0, ATOM)} * torch.sigmoid({literal(o.attribute('alpha', 1.0))} * {o.x(0, PRODUCT + 1)})", PRODUCT),
    "Elu": _alpha("F.elu({x}, {alpha})", alpha=1.0), "Celu": _alpha("F.celu({x}, {alpha})", alpha=1.0),
    "LeakyRelu": _alpha("F.leaky_relu({x}, {alpha})", alpha=0.01),
    "Selu": lambda o: E(f"{literal(o.attribute('gamma', 1.0507010221481323))} * F.elu({o.x()}, {literal(o.attribute('alpha', 1.6732631921768188))})", PRODUCT),
    "HardSigmoid": lambda o: E(f"({literal(o.attribute('alpha', 0.2))} * {o.x(0, PRODUCT + 1)} + {literal(o.attribute('beta', 0.5))}).clamp(0, 1)"),
    "ThresholdedRelu": lambda o: E(f"torch.where({o.x(0, COMPARISON + 1)} > {literal(o.attribute('alpha', 1.0))}, {o.x()}, 0)"),
    "Shrink": lambda o: E(f"torch.where({o.x(0, COMPARISON + 1)} < {literal(-o.attribute('lambd', 0.5))}, {o.x(0, SUM)} + {literal(o.attribute('bias', 0.0))}, "
                          f"torch.where({o.x(0, COMPARISON + 1)} > {literal(o.attribute('lambd', 0.5))}, {o.x(0, SUM)} - {literal(o.attribute('bias', 0.0))}, 0.0))"),
    "PRelu": lambda o: E(f"torch.where({o.x(0, COMPARISON + 1)} < 0, {o.x(1, PRODUCT)} * {o.x(0, PRODUCT + 1)}, {o.x()})"),
    "LpNormalization": lambda o: E(f"{o.x(0, ATOM)} / {o.x(0, ATOM)}.norm({o.attribute('p', 2)}, {o.attribute('axis', -1)}, True)", PRODUCT),
    "SequenceConstruct": _sequence, "SequenceEmpty": lambda o: E("[]"), "SequenceInsert": _insert,
    "SequenceAt": lambda o: E(f"{o.x(0, ATOM)}[{o.size(1)}]"), "SequenceLength": lambda o: E(f"torch.tensor(len({o.x()}))"),
    "SequenceErase": lambda o: E(f"[each for i, each in enumerate({o.x()}) if i != {o.size(1) if o.has(1) else -1} % len({o.x()})]"),
    "SplitToSequence": _split_to_sequence, "ConcatFromSequence": _concat_from_sequence,
    "Optional": lambda o: E(o.x(0, ATOM)), "OptionalGetElement": lambda o: E(o.x(0, ATOM)),
    "OptionalHasElement": lambda o: E(f"torch.tensor({o.x()} is not None)"),
}  # fmt: skip
"""The operators of the standard that move, compare and combine elements, by name."""

