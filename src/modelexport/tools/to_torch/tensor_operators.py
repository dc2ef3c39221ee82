"""The operators of ONNX as expressions of torch: one table, a row for each operator.

To add an operator, add a row to ``TENSOR_OPERATORS`` or to the tables of ``layer_operators.py``: its name, and a
template, in which ``a`` and ``b`` are its operands and ``axis`` is its attribute of this name; ``operation.py`` says
what else a template may have. If one template is not enough, the row is a function that chooses among several. If one
expression is not enough, write a function with the operator's inputs and attributes into a file
``functions_*.py``, and call it in the template; ``test_operators.py`` compares all with the standard.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from typing import Any

from modelexport.tools.to_torch.expressions import LEFT_OUT, Number, code, literal
from modelexport.tools.to_torch.operation import Operation, UnwrittenError
from modelexport.tools.to_torch.shape_operators import SHAPE_OPERATORS

Row = str | Callable[[Operation], ast.expr]


def _div(o: Operation) -> ast.expr:
    if o.kind() == "O":
        raise UnwrittenError("the type of its operands is not known")
    return o.write("torch.div(a, B, rounding_mode='trunc')" if o.kind() in "iu" else "A / B")


def _pow(o: Operation) -> ast.expr:
    exponent = o.number(1)
    template = {2: "a.square()", 0.5: "a.sqrt()"}.get(exponent, "a ** B")
    same = o.kind() == "f" or (o.dtype() == o.dtype(1) and exponent != 0.5) or exponent == 2
    return o.write(template) if same else o.converted(o.write(template), o.dtype())


def _joined(template: str) -> Callable[[Operation], ast.expr]:
    """An operator of any number of tensors, two at a time."""

    def write(o: Operation) -> ast.expr:
        operands: list[Any] = [o.tensor(index) for index in range(len(o.node.inputs))]
        total: ast.expr = functools.reduce(lambda x, y: code(template, x=x, y=y), operands)
        return code("t / count", t=total, count=len(operands)) if o.node.op_type == "Mean" else total

    return write


def _where(o: Operation) -> ast.expr:
    if o.number(1) is None or o.number(2) is None:
        return o.write("torch.where(a, B, C)")
    if o.kind(1) != "f" or o.rank() < max(o.rank(1), o.rank(2)):
        return o.write("torch.where(a, b, c)")
    chosen = o.write("torch.where(a, B, C)")
    return chosen if ast.unparse(o.type_of(o.dtype(1))) == "torch.float32" else o.converted(chosen, o.dtype(1))


def _cast(o: Operation) -> ast.expr:
    if o.kind() == "O":
        raise UnwrittenError("the type of its operand is a text, or not known")
    return o.converted(o.tensor(0), o.attribute("to") if o.node.op_type == "Cast" else o.dtype(1))


def _clip(o: Operation) -> ast.expr:
    if o.version < 11:
        return o.write("a.clamp(min=min, max=max)")
    given = [index for index in (1, 2) if o.has(index)]
    part = o.scalar if all(o.number(index) is not None for index in given) else o.tensor
    bounds = {name: part(index) for name, index in (("min", 1), ("max", 2)) if index in given}
    return o.write("a.clamp(**bounds)" if bounds else "a", bounds=bounds)


def _gemm(o: Operation) -> ast.expr:
    alpha, beta = o.attribute("alpha"), o.attribute("beta")
    if o.kind() != "f" and (alpha % 1 or beta % 1):
        raise UnwrittenError("its factors of whole numbers are fractions")
    product = o.write(f"{'a.T' if o.attribute('transA') else 'a'} @ {'b.T' if o.attribute('transB') else 'b'}")
    product = product if alpha == 1 else code("alpha * p", alpha=alpha, p=product)
    return product if not o.has(2) or beta == 0 else o.write("p + c" if beta == 1 else "p + beta * c", p=product)


def _reduce(template: str) -> Callable[[Operation], ast.expr]:
    """A reduction over ``dims``."""

    def write(o: Operation) -> ast.expr:
        axes, keep = o.axes(1), o.attribute("keepdims")
        if o.kind() in "iu" and ".mean(" in template:
            raise UnwrittenError("it is a mean of integers")
        if not axes and o.attribute("noop_with_empty_axes"):
            return o.write(re.sub(r"\.\w+\(dims\)", "", template))
        rank = o.known_rank() if axes else o.rank()
        axes = sorted(axis % rank for axis in axes or range(rank)) if rank > 0 and axes != [-1] else axes or [0]
        how = {"keepdim": True} if keep and rank else {}
        total = {"dtype": o.type_of(o.dtype())} if o.kind() in "iu" and ".sum(" in template else {}
        operand = o.tensor(0) if rank else o.write("a.unsqueeze(0)")
        dims = axes[0] if len(axes) == 1 else tuple(axes)
        written = o.write(template.replace("(dims)", "(dims, **how)"), a=operand, dims=dims, how={**how, **total})
        return o.converted(written, o.dtype()) if o.kind() in "iu" and template.endswith("sqrt()") else written

    return write


def _reduce_product(o: Operation) -> ast.expr:
    axes, product = o.axes(1), o.write("a")
    if not axes and o.attribute("noop_with_empty_axes"):
        return product
    for axis in sorted((axis % o.rank() for axis in axes or range(o.rank())), reverse=True):
        product = code("x.prod(axis, keepdim=keep, dtype=kind)", x=product, axis=axis, kind=o.type_of(o.dtype()),
                       keep=True if o.attribute("keepdims") else LEFT_OUT)  # fmt: skip
    return product


def _softmax(o: Operation) -> ast.expr:
    name, axis = "log_softmax" if o.node.op_type == "LogSoftmax" else "softmax", o.attribute("axis")
    if o.version >= 13 or axis in (-1, o.known_rank() - 1):
        return o.write(f"a.{name}(axis)")
    return o.write(f"a.flatten(axis).{name}(-1).reshape(a.shape)")


def _hardmax(o: Operation) -> ast.expr:
    axis = o.attribute("axis")
    one = "torch.zeros_like(x).scatter_(axis, x.argmax(axis, keepdim=True), 1)"
    if o.version >= 13 or axis in (-1, o.known_rank() - 1):
        return o.write(one, x=o.tensor(0))
    return o.write(f"{one}.reshape(a.shape)", x=o.write("a.flatten(axis)"), axis=-1)


def _extreme(name: str) -> Callable[[Operation], ast.expr]:
    def write(o: Operation) -> ast.expr:
        keep = True if o.attribute("keepdims") else LEFT_OUT
        if not o.attribute("select_last_index"):
            return o.write(f"a.{name}(axis, keepdim=keep)", keep=keep)
        return o.write(f"a.shape[axis] - 1 - a.flip(axis).{name}(axis, keepdim=keep)", keep=keep)

    return write


def _constant_of_shape(o: Operation) -> ast.expr:
    tensor = o.attribute("value")
    number, kind = (0.0, o.type_of(1)) if tensor is None else (tensor.numpy().reshape(-1)[0], o.type_of(tensor.dtype))
    return o.write("torch.full(s0, number, dtype=kind, device=device)", number=number, kind=kind)


def _range(o: Operation) -> ast.expr:
    start, step = o.number(0), o.number(2)
    shown = "n1" if (start, step) == (0, 1) else "n0, n1" if step == 1 else "n0, n1, n2"
    return o.write(f"torch.arange({shown}, dtype=dtype, device=device)")


def _shape(o: Operation) -> ast.expr:
    start, end = o.attribute("start") or 0, o.attribute("end")
    cut = f"[{start or ''}:{'' if end is None else end}]" if start or end is not None else ""
    return o.write(f"torch.tensor(a.shape{cut}, device=device)")


def _dropout(o: Operation) -> ast.expr:
    o.attribute("ratio")
    drops = o.number(2) if o.version >= 12 and o.has(2) else False
    ratio = o.number(1) if o.has(1) else 0.5
    if drops is None or (drops and (ratio is None or o.outputs_used() > 1)):
        raise UnwrittenError("its mask is used, or it is computed whether it drops, or how much")
    if drops:
        return o.write("F.dropout(a, ratio)", ratio=ratio)
    return o.write("a" if o.outputs_used() == 1 else "(a, torch.ones_like(a, dtype=torch.bool))")


def _is_inf(o: Operation) -> ast.expr:
    signs = o.attribute("detect_positive"), o.attribute("detect_negative")
    if signs == (0, 0):
        return o.write("torch.zeros_like(a, dtype=torch.bool)")
    return o.write(f"torch.{ {(1, 0): 'isposinf', (0, 1): 'isneginf'}.get(signs, 'isinf') }(a)")


def _eye(o: Operation) -> ast.expr:
    if o.attribute("k"):
        raise UnwrittenError("its ones are beside the diagonal")
    kind = o.type_of(o.attribute("dtype") or o.dtype())
    return o.write("torch.eye(*a.shape, dtype=kind, device=device)", kind=kind)


_LINEAR = ("linear", "bilinear", "trilinear")
_NEAREST = {("asymmetric", "floor"): "nearest", ("half_pixel", "round_prefer_floor"): "nearest-exact",
            ("half_pixel", "round_prefer_ceil"): "nearest-exact"}  # fmt: skip


def _resize(o: Operation) -> ast.expr:
    """``F.interpolate``, of images and by what it computes as the standard does."""
    rank, image, mode = o.rank(), o.node.inputs[0], o.attribute("mode") or "nearest"
    old, how = o.node.op_type == "Upsample" or o.version < 11, dict[str, Any]()
    scales = (o.attribute("scales") or o.numbers(1)) if old else (_chosen_scales(o) or o.numbers(2))
    numbers, by_scale = scales or o.numbers(3), old or bool(scales)
    places, nearest = ("asymmetric", "floor") if old else (o.attribute(_PLACES), o.attribute("nearest_mode"))
    axes = [axis % rank for axis in o.attribute("axes") or range(rank)]
    given = dict(zip(axes, numbers or (), strict=False))
    how["scale_factor" if by_scale else "size"] = tuple(given.get(axis) for axis in range(2, rank))
    sizes = ["1.0" if by_scale else str(o.scope.size(image, axis)) for axis in (0, 1) if image is not None]
    changed = any(axis in given and str(given[axis]) != size for axis, size in enumerate(sizes))
    exact = all(not isinstance(number, Number) and number % 1 == 0 for number in numbers or ()) and by_scale
    smooth, cubic = bool(o.attribute("antialias")), (o.attribute("cubic_coeff_a"), o.attribute("exclude_outside") or 0)
    known = cubic == (-0.5, 1) if smooth else mode != "cubic" or cubic == (-0.75, 0)
    how |= {"antialias": True} if smooth else {}
    if mode == "nearest":
        how["mode"] = _NEAREST.get((places, nearest))
    elif places in ("half_pixel", "align_corners") and (mode == "linear" or rank == 4):
        how |= {"mode": _LINEAR[rank - 3] if mode == "linear" else "bicubic"}
        how |= {"align_corners": True} if places == "align_corners" else {}
    if (
        how.get("mode") is None or o.kind() != "f" or changed or not given.keys() >= {*range(2, rank)}
        or o.attribute("keep_aspect_ratio_policy") not in (None, "stretch") or not known or (smooth and mode != "cubic")
        or (how["mode"] == "nearest-exact" and not exact)
    ):  # fmt: skip
        raise UnwrittenError("F.interpolate does not compute it")
    return o.write("F.interpolate(a, **how)", how=how)


_PLACES = "coordinate_transformation_mode"


def _chosen_scales(o: Operation) -> list[float] | None:
    """The numbers whose neighbours in float32, or 1, a file takes for the sizes that PyTorch has by these numbers."""
    value, taken = o.value(2), list[Any]()
    while value is not None and (node := value.producer()) is not None and node.op_type == "Where":
        taken, value = [*taken, node.inputs[1] and o.scope.constant(node.inputs[1])], node.inputs[2]
    known = None if value is None or not taken else o.scope.constant(value)
    if known is None or any(each is None or (abs(each / known - 1) > 1e-6)[each != 1].any() for each in taken):
        return None
    return [float(str(number)) for number in known]


def _dft(o: Operation) -> ast.expr:
    taken = "n2, **attributes" if o.version >= 20 else "axis, inverse=inverse, onesided=onesided"
    return o.write(f"discrete_fourier(a, n1, {taken})")


def _random(o: Operation) -> ast.expr:
    normal = o.node.op_type.startswith("RandomNormal")
    first, second = (o.attribute(name) for name in (("mean", "scale") if normal else ("low", "high")))
    shape = o.write("a.shape") if o.node.inputs else literal(o.attribute("shape"))
    drawn = o.write(f"torch.{'randn' if normal else 'rand'}(shape, dtype=kind, device=device)", shape=shape,
                    kind=o.type_of(o.attribute("dtype") or o.dtype() or 1))  # fmt: skip
    width = second if normal else second - first
    return drawn if (first, width) == (0, 1) else code("x * w + s", x=drawn, w=width, s=first)


def _compress(o: Operation) -> ast.expr:
    axis = o.attribute("axis")
    operand = o.write("a.flatten()" if axis is None else "a")
    return o.write("x.index_select(axis, b.nonzero().flatten())", x=operand, axis=axis or 0)


def _grid_sample(o: Operation) -> ast.expr:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(o.attribute("mode"), o.attribute("mode"))
    corners = bool(o.attribute("align_corners"))
    return o.write("F.grid_sample(a, b, mode, padding_mode, align_corners=corners)", mode=mode, corners=corners)


def _gelu(o: Operation) -> ast.expr:
    return o.write("F.gelu(a, approximate='tanh')" if o.attribute("approximate") == "tanh" else "F.gelu(a)")


def _trilu(o: Operation) -> ast.expr:
    name = "triu" if o.attribute("upper") else "tril"
    return o.write(f"torch.{name}(a, n1)" if o.has(1) else f"torch.{name}(a)")


def either(attribute: str, no: str, yes: str) -> Callable[[Operation], ast.expr]:
    """One template or another by an attribute."""
    return lambda o: o.write(yes if o.attribute(attribute) else no)


TENSOR_OPERATORS: dict[str, Row] = {
    **SHAPE_OPERATORS,
    **{name: f"torch.{name.lower()}(a)" for name in (
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Det", "Erf", "Exp", "Floor",
        "IsNaN", "Log", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh")},
    **{name: f"F.{name.lower()}(a)" for name in ("Mish", "Softplus", "Softsign", "HardSwish")},
    **{name: f"A {sign} B" for name, sign in (
        ("Add", "+"), ("Sub", "-"), ("Mul", "*"), ("MatMul", "@"), ("Equal", "=="), ("Less", "<"),
        ("LessOrEqual", "<="), ("Greater", ">"), ("GreaterOrEqual", ">="), ("And", "&"), ("Or", "|"), ("Xor", "^"),
        ("BitwiseAnd", "&"), ("BitwiseOr", "|"), ("BitwiseXor", "^"))},
    "Div": _div, "Pow": _pow, "Neg": "-a", "Reciprocal": "1 / a", "Not": "~a", "BitwiseNot": "~a",
    "Mod": either("fmod", "torch.remainder(a, B)", "torch.fmod(a, B)"), "Identity": "a",
    "BitShift": lambda o: o.write("a << B" if o.attribute("direction") == "LEFT" else "a >> B"),
    "Max": _joined("torch.maximum(x, y)"), "Min": _joined("torch.minimum(x, y)"), "Sum": _joined("x + y"),
    "Mean": _joined("x + y"), "Where": _where, "Cast": _cast, "CastLike": _cast, "Clip": _clip, "Gemm": _gemm,
    "Einsum": "torch.einsum(equation, *operands)", "ReduceSum": _reduce("a.sum(dims)"),
    "ReduceMean": _reduce("a.mean(dims)"), "ReduceMax": _reduce("a.amax(dims)"), "ReduceMin": _reduce("a.amin(dims)"),
    "ReduceProd": _reduce_product, "ReduceL1": _reduce("a.abs().sum(dims)"),
    "ReduceL2": _reduce("a.square().sum(dims).sqrt()"), "ReduceLogSum": _reduce("a.sum(dims).log()"),
    "ReduceLogSumExp": _reduce("a.logsumexp(dims)"), "ReduceSumSquare": _reduce("a.square().sum(dims)"),
    "Softmax": _softmax, "LogSoftmax": _softmax, "ArgMax": _extreme("argmax"), "ArgMin": _extreme("argmin"),
    "CumSum": "cumulative_sum(a, n1, **attributes)", "ConstantOfShape": _constant_of_shape, "Range": _range,
    "Shape": _shape, "Size": "torch.tensor(a.numel(), device=device)", "OneHot": "one_hot(a, n1, c, **attributes)",
    "TopK": "top_k(a, n1, **attributes)", "Unique": "unique(a, **attributes)", "Dropout": _dropout,
    "NonZero": "a.nonzero().T", "Compress": _compress, "Trilu": _trilu, "IsInf": _is_inf, "Resize": _resize,
    "Upsample": _resize, "DFT": _dft,
    "STFT": "short_time_fourier(a, n1, c, n3, **attributes)",
    "GridSample": _grid_sample,
    "NonMaxSuppression": "non_max_suppression(a, b, n2, n3, n4, **attributes)", "EyeLike": _eye,
    **{f"Random{kind}{like}": _random for kind in ("Normal", "Uniform") for like in ("", "Like")}, "Gelu": _gelu,
    "Swish": "a * torch.sigmoid(alpha * a)", "Elu": "F.elu(a, alpha)", "Celu": "F.celu(a, alpha)",
    "LeakyRelu": "F.leaky_relu(a, alpha)", "Selu": "gamma * F.elu(a, alpha)",
    "HardSigmoid": "(alpha * a + beta).clamp(0, 1)", "PRelu": "torch.where(a < 0, b * a, a)",
    "ThresholdedRelu": "torch.where(a > alpha, a, 0)", "Hardmax": _hardmax,
    "Shrink": "torch.where(a < -lambd, a + bias, torch.where(a > lambd, a - bias, 0))",
    "MeanVarianceNormalization": "normalize_mean_variance(a, **attributes)",
    "ReverseSequence": "reverse_sequence(a, b, **attributes)", "LpNormalization": "F.normalize(a, p, axis, 1e-30)",
    "SequenceConstruct": "[*operands]", "SequenceEmpty": "[]", "SequenceAt": "a[n1]",
    "SequenceLength": "torch.tensor(len(a))",
    "ConcatFromSequence": either("new_axis", "torch.cat(a, axis)", "torch.stack(a, axis)"),
}  # fmt: skip
"""The operators of the standard that move, compare and combine elements, by name."""
