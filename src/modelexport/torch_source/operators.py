"""The operators of ONNX as expressions of torch: one table, a row for each operator.

To add an operator, add a row to ``TENSOR_OPERATORS`` or to the tables of ``layer_operators.py``: its name, and what
gives its text. If it takes more than one call of torch, write a function with the operator's inputs and attributes
into a file ``functions_*.py``, and the row is ``called(function)``; ``tests/torch_source/test_operators.py`` compares
every row with the standard.
"""

from __future__ import annotations

import re
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
    SHIFT,
    SUM,
    UNARY,
    XOR,
    Expression,
    literal,
    literal_or_none,
)
from modelexport.torch_source.operation import (
    E,
    Operation,
    Text,
    UnwrittenError,
    Writer,
    Written,
    called,
    integers_of,
    listed_operands,
)
from modelexport.torch_source.shape_operators import SHAPE_OPERATORS


def text(template: str, binding: int = ATOM, **attributes: Any) -> Writer:
    """An expression: ``{x}`` is the operand as an argument, ``{a}`` as an atom, and the attributes of the operator have
    their defaults here."""

    def write(o: Operation) -> Expression:
        shown = {name: literal(o.attribute(name, default)) for name, default in attributes.items()}
        operand = o.x(0, ATOM if "{a}" in template else 0) if o.node.inputs else ""
        return E(template.format(x=operand, a=operand, **shown), binding)

    return write


def _both(sign: str, binding: int) -> Writer:
    left, right = binding + (binding == COMPARISON), binding + 1

    def write(o: Operation) -> Expression:
        first = o.x if o.number(0) is not None and o.number(1) is not None else o.scalar
        return E(f"{first(0, left)} {sign} {o.scalar(1, right)}", binding)

    return write


def _and(o: Operation) -> Written:
    """A constant that is true everywhere only changes the shape."""
    shape = o.node.outputs[0].shape
    sizes = integers_of(shape) if shape is not None else None
    for index in (0, 1):
        array, other = o.array(index), o.value(1 - index)
        if array is not None and array.all() and other is not None and sizes is not None:
            return E(o.x(1 - index, ATOM) + ("" if other.shape == shape else f".expand({', '.join(map(str, sizes))})"))
    return _both("&", AND)(o)


def _div(o: Operation) -> Written:
    if o.kind() == "O":
        raise UnwrittenError("the type of its operands is not known")
    if o.kind() in "iu":
        return E(f'torch.div({o.x()}, {o.scalar(1)}, rounding_mode="trunc")')
    return _both("/", PRODUCT)(o)


def _pow(o: Operation) -> Written:
    number, base = o.number(1), o.x(0, ATOM)
    known = {2: "square", 0.5: "sqrt"}.get(number.literal) if number is not None else None
    if known:
        result = E(f"{base}.{known}()")
        return result if known == "square" or o.kind() == "f" else o.converted(result.text, o.dtype())
    text = E(f"{base} ** {o.scalar(1, POWER)}", POWER)
    return text if o.dtype() == o.dtype(1) or o.kind() == "f" else o.converted(text.within(ATOM), o.dtype())


def _nested(name: str) -> Writer:
    """A function of two tensors for any number of them."""

    def write(o: Operation) -> Expression:
        result = o.x()
        for index in range(1, len(o.node.inputs)):
            result = f"{name}({result}, {o.x(index)})"
        return E(result, ATOM if len(o.node.inputs) > 1 else 1)

    return write


def _sum(o: Operation) -> Written:
    total = " + ".join(o.x(i, SUM + 1) for i in range(len(o.node.inputs)))
    return E(f"({total}) / {len(o.node.inputs)}", PRODUCT) if o.node.op_type == "Mean" else E(total, SUM)


def _where(o: Operation) -> Written:
    yes, no = o.number(1), o.number(2)
    if yes is None or no is None:
        return E(f"torch.where({o.x()}, {o.scalar(1)}, {o.scalar(2)})")
    if o.kind(1) != "f" or o.rank() < max(o.rank(1), o.rank(2)):
        return E(f"torch.where({o.x()}, {o.x(1)}, {o.x(2)})")
    result = f"torch.where({o.x()}, {yes.text}, {no.text})"
    return E(result) if o.type_of(o.dtype(1)) == "torch.float32" else o.converted(result, o.dtype(1))


def _cast(o: Operation) -> Written:
    to = o.attribute("to") if o.node.op_type == "Cast" else o.dtype(1)
    if to is None or (o.kind() == "O" and (o.dtype() is None or o.dtype() == ir.DataType.UNDEFINED)):
        raise UnwrittenError("the type of its operand or of its result is not known")
    if to not in {*ir.DataType} or ir.DataType(to) == ir.DataType.STRING or o.kind() == "O":
        raise UnwrittenError("PyTorch has no such type")
    return o.converted(o.x(0, ATOM), to)


def _clip(o: Operation) -> Written:
    names = ("min", "max")
    if o.version < 11:
        bounds = {name: literal(o.attribute(name)) for name in names if o.attribute(name) is not None}
    else:
        given = [i for i in (1, 2) if o.has(i)]
        text = o.scalar if all(o.number(i) is not None for i in given) else o.x
        bounds = {names[i - 1]: text(i) for i in given}
    return E(
        f"{o.x(0, ATOM)}.clamp({', '.join(f'{name}={bound}' for name, bound in bounds.items())})"
        if bounds
        else o.x(0, ATOM)
    )


def _gemm(o: Operation) -> Written:
    a, b = (f"{o.x(i, ATOM)}.T" if o.attribute(name, 0) else o.x(i, ATOM) for i, name in ((0, "transA"), (1, "transB")))
    alpha, beta = o.attribute("alpha", 1.0), o.attribute("beta", 1.0)
    if o.kind() != "f" and (alpha % 1 or beta % 1):
        raise UnwrittenError("its factors of whole numbers are fractions")
    result = f"{a} @ {b}" if alpha == 1 else f"{literal(alpha)} * ({a} @ {b})"
    if not o.has(2) or beta == 0:
        return E(result, PRODUCT)
    return E(f"{result} + {o.x(2, SUM + 1) if beta == 1 else f'{literal(beta)} * {o.x(2, ATOM)}'}", SUM)


def _reduce(template: str) -> Writer:
    """A reduction: ``{a}`` is the operand, ``{axes}`` the axes and ``keepdim``."""

    def write(o: Operation) -> Expression:
        axes, keep = o.axes(1), bool(o.attribute("keepdims", 1))
        if not axes and o.attribute("noop_with_empty_axes", 0):
            return E(_SUMS.sub("", template).format(a=o.x(0, ATOM)))
        if o.rank() == 0:
            return E(template.format(a=f"{o.x(0, ATOM)}.unsqueeze(0)", axes="0"))
        axes = axes or list(range(o.rank()))
        shown = str(axes[0]) if len(axes) == 1 else literal_or_none(axes)
        shown += ", keepdim=True" if keep else ""
        if o.kind() in "iu" and template.endswith("sum({axes})"):
            shown += f", dtype={o.type_of(o.dtype())}"
        result = E(template.format(a=o.x(0, ATOM), axes=shown))
        return o.converted(result.text, o.dtype()) if o.kind() in "iu" and template.endswith("sqrt()") else result

    return write


_SUMS = re.compile(r"\.(sum|mean|amax|amin|logsumexp)\(\{axes\}\)")
"""What of a reduction is left out without axes."""


def _reduce_product(o: Operation) -> Written:
    result, keep = o.x(0, ATOM), ", keepdim=True" if o.attribute("keepdims", 1) else ""
    axes = o.axes(1)
    if not axes and o.attribute("noop_with_empty_axes", 0):
        return E(result)
    for axis in sorted((axis % o.rank() for axis in axes or range(o.rank())), reverse=True):
        result += f".prod({axis}{keep}, dtype={o.type_of(o.dtype())})"
    return E(result)


def _softmax(o: Operation) -> Written:
    name = "log_softmax" if o.node.op_type == "LogSoftmax" else "softmax"
    axis = o.attribute("axis", -1 if o.version >= 13 else 1)
    if o.version >= 13 or axis in (-1, o.rank() - 1):
        return E(f"{o.x(0, ATOM)}.{name}({axis})")
    return E(f"{o.x(0, ATOM)}.flatten({axis}).{name}(-1).reshape({o.x(0, ATOM)}.shape)")


def _extreme(name: str) -> Writer:
    def write(o: Operation) -> Expression:
        axis, keep = o.attribute("axis", 0), ", True" if o.attribute("keepdims", 1) else ""
        if not o.attribute("select_last_index", 0):
            return E(f"{o.x(0, ATOM)}.{name}({axis}{keep})")
        return E(f"{o.x(0, ATOM)}.shape[{axis}] - 1 - {o.x(0, ATOM)}.flip({axis}).{name}({axis}{keep})", SUM)

    return write


def _constant_of_shape(o: Operation) -> Written:
    tensor = o.attribute("value")
    number, dtype = (0.0, ir.DataType.FLOAT) if tensor is None else (tensor.numpy().reshape(-1)[0].item(), tensor.dtype)
    return E(f"torch.full({o.sizes(0)}, {literal(number)}, dtype={o.type_of(dtype)}{o.scope.device})")


def _range(o: Operation) -> Written:
    start, end, step = (o.size(index) for index in range(3))
    shown = [end] if start == "0" and step == "1" else [start, end] if step == "1" else [start, end, step]
    return E(f"torch.arange({', '.join(shown)}, dtype={o.type_of(o.dtype())}{o.scope.device})")


def _shape(o: Operation) -> Written:
    start, end = o.attribute("start", 0), o.attribute("end")
    cut = f"[{start or ''}:{'' if end is None else end}]" if start or end is not None else ""
    return E(f"torch.tensor({o.x(0, ATOM)}.shape{cut}{o.scope.device})")


def _dropout(o: Operation) -> Written:
    if o.version >= 12 and o.has(2) and getattr(o.number(2), "literal", None) is not False:
        raise UnwrittenError("it is in training mode")
    return [E(o.x(0, ATOM)), E(f"torch.ones_like({o.x()}, dtype=torch.bool)")][: len(o.node.outputs)]


def _is_inf(o: Operation) -> Written:
    signs = o.attribute("detect_positive", 1), o.attribute("detect_negative", 1)
    if signs == (0, 0):
        return E(f"torch.zeros_like({o.x()}, dtype=torch.bool)")
    return E(f"torch.{ {(1, 0): 'isposinf', (0, 1): 'isneginf'}.get(signs, 'isinf') }({o.x()})")


def _eye(o: Operation) -> Written:
    if o.attribute("k", 0):
        raise UnwrittenError("its ones are beside the diagonal")
    dtype = o.type_of(o.attribute("dtype") or o.dtype())
    return E(f"torch.eye(*{o.x(0, ATOM)}.shape, dtype={dtype}{o.scope.device})")


def _resize(o: Operation) -> Written:
    ignored = ("extrapolation_value", "keep_aspect_ratio_policy")
    if o.attribute("coordinate_transformation_mode") == "tf_crop_and_resize" or (
        o.attribute("keep_aspect_ratio_policy", "stretch") != "stretch"
    ):
        raise UnwrittenError("it crops, or keeps the ratio of sides")
    if o.node.op_type == "Resize" and o.version >= 11:
        sizes = [Text(o.sizes(i)) if o.has(i) and o.integers(i) != [] else None for i in (2, 3)]
        return called(f.resize, inputs=(Text(o.x()), None, *sizes), ignored=ignored)(o)
    scales = o.attribute("scales") or Text(o.sizes(1))
    mode = "nearest" if o.attribute("mode", "nearest") == "nearest" else "linear"
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return o.call(f.resize, Text(o.x()), None, scales, mode=mode, **how)


def _dft(o: Operation) -> Written:
    if o.version >= 20:
        return called(f.discrete_fourier, scalars=(1, 2))(o)
    length = Text(o.size(1)) if o.has(1) else None
    return called(f.discrete_fourier, inputs=(Text(o.x()), length, o.attribute("axis", 1)), ignored=("axis",))(o)


def _window(name: str) -> Writer:
    def write(o: Operation) -> Expression:
        dtype, periodic = o.type_of(o.attribute("output_datatype", 1)), bool(o.attribute("periodic", 1))
        return E(f"torch.{name}({o.size(0)}, periodic={periodic}, dtype={dtype}{o.scope.device})")

    return write


def _random(name: str, first: str, second: str) -> Writer:
    def write(o: Operation) -> Expression:
        dtype = o.attribute("dtype")
        kind = f"dtype={o.type_of(dtype or o.dtype() or 1)}"
        sizes = f"{o.x(0, ATOM)}.shape" if o.node.inputs else literal_or_none(o.attribute("shape"))
        start, end = o.attribute(first, 0.0), o.attribute(second, 1.0)
        width = end if name == "randn" else end - start
        drawn = f"torch.{name}({sizes}, {kind}{o.scope.device})"
        return E(drawn) if (start, width) == (0.0, 1.0) else E(f"{drawn} * {literal(width)} + {literal(start)}", SUM)

    return write


def _compress(o: Operation) -> Written:
    axis = o.attribute("axis")
    x = f"{o.x(0, ATOM)}.flatten()" if axis is None else o.x(0, ATOM)
    return E(f"{x}.index_select({axis or 0}, {o.x(1, ATOM)}.nonzero().flatten())")


def _einsum(o: Operation) -> Written:
    return E(f"torch.einsum({o.attribute('equation')!a}, {', '.join(o.x(i) for i in range(len(o.node.inputs)))})")


def _grid_sample(o: Operation) -> Written:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(o.attribute("mode", "linear"), o.attribute("mode", "linear"))
    padding, corners = o.attribute("padding_mode", "zeros"), bool(o.attribute("align_corners", 0))
    return E(f"F.grid_sample({o.x()}, {o.x(1)}, {mode!a}, {padding!a}, align_corners={corners})")


def _split_to_sequence(o: Operation) -> Written:
    axis = o.attribute("axis", 0)
    if not o.has(1):
        return E(f"list({o.x(0, ATOM)}.{'split(1, ' if o.attribute('keepdims', 1) else 'unbind('}{axis}))")
    return E(f"list({o.x(0, ATOM)}.split({o.size(1) if o.rank(1) == 0 else o.sizes(1)}, {axis}))")


def _prelu(o: Operation) -> Written:
    return E(f"torch.where({o.x(0, SUM)} < 0, {o.x(1, PRODUCT)} * {o.x(0, ATOM)}, {o.x()})")


def _norm(o: Operation) -> Written:
    return E(f"F.normalize({o.x()}, {o.attribute('p', 2)}, {o.attribute('axis', -1)}, 1e-30)")


_TANH, _JOINS = ', approximate="tanh"', ("cat", "stack")
TENSOR_OPERATORS: dict[str, Writer] = {
    **SHAPE_OPERATORS,
    **{name: text(f"torch.{name.lower()}({{x}})") for name in (
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Det", "Erf", "Exp", "Floor",
        "IsNaN", "Log", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh")},
    **{name: text(f"F.{name.lower()}({{x}})") for name in ("Mish", "Softplus", "Softsign", "HardSwish")},
    **{name: _both(sign, binding) for name, sign, binding in (
        ("Add", "+", SUM), ("Sub", "-", SUM), ("Mul", "*", PRODUCT), ("MatMul", "@", PRODUCT),
        ("Equal", "==", COMPARISON), ("Less", "<", COMPARISON), ("LessOrEqual", "<=", COMPARISON),
        ("Greater", ">", COMPARISON), ("GreaterOrEqual", ">=", COMPARISON), ("Or", "|", OR),
        ("Xor", "^", XOR),        ("BitwiseAnd", "&", AND), ("BitwiseOr", "|", OR), ("BitwiseXor", "^", XOR))},
    "And": _and, "Div": _div, "Pow": _pow, "Neg": text("-{a}", UNARY), "Reciprocal": text("1 / {a}", PRODUCT),
    "Mod": lambda o: E(f"torch.{'fmod' if o.attribute('fmod', 0) else 'remainder'}({o.x()}, {o.scalar(1)})"),
    "Not": text("~{a}", UNARY), "BitwiseNot": text("~{a}", UNARY),
    "BitShift": lambda o: _both("<<" if o.attribute("direction") == "LEFT" else ">>", SHIFT)(o),
    "Max": _nested("torch.maximum"), "Min": _nested("torch.minimum"), "Sum": _sum, "Mean": _sum, "Where": _where,
    "Cast": _cast, "CastLike": _cast, "Clip": _clip, "Gemm": _gemm, "Einsum": _einsum, "Identity": text("{a}"),
    "ReduceSum": _reduce("{a}.sum({axes})"), "ReduceMean": _reduce("{a}.mean({axes})"),
    "ReduceMax": _reduce("{a}.amax({axes})"), "ReduceMin": _reduce("{a}.amin({axes})"), "ReduceProd": _reduce_product,
    "ReduceL1": _reduce("{a}.abs().sum({axes})"), "ReduceL2": _reduce("{a}.square().sum({axes}).sqrt()"),
    "ReduceLogSum": _reduce("{a}.sum({axes}).log()"), "ReduceLogSumExp": _reduce("{a}.logsumexp({axes})"),
    "ReduceSumSquare": _reduce("{a}.square().sum({axes})"), "Softmax": _softmax, "LogSoftmax": _softmax,
    "ArgMax": _extreme("argmax"), "ArgMin": _extreme("argmin"), "CumSum": called(f.cumulative_sum, scalars=(1,)),
    "ConstantOfShape": _constant_of_shape, "Range": _range, "Shape": _shape, "Size": text("torch.tensor({a}.numel())"),
    "OneHot": called(f.one_hot, scalars=(1,)), "TopK": called(f.top_k, scalars=(1,), count=2),
    "Unique": called(f.unique, count=4), "Dropout": _dropout, "NonZero": text("{a}.nonzero().T"), "Compress": _compress,
    "Trilu": lambda o: E(f"torch.tri{'lu'[o.attribute('upper', 1)]}({o.x()}, {o.size(1) if o.has(1) else 0})"),
    "IsInf": _is_inf,
    "Resize": _resize, "Upsample": _resize, "DFT": _dft, "STFT": called(f.short_time_fourier, scalars=(1, 3)),
    "GridSample": _grid_sample, "HannWindow": _window("hann_window"), "BlackmanWindow": _window("blackman_window"),
    "NonMaxSuppression": called(f.non_max_suppression, scalars=(2, 3, 4)),
    **{f"Random{kind}{like}": _random(*row) for like in ("", "Like") for kind, row in (
        ("Normal", ("randn", "mean", "scale")), ("Uniform", ("rand", "low", "high")))},
    "EyeLike": _eye,
    "Gelu": lambda o: text(f"F.gelu({{x}}{_TANH if o.attribute('approximate') == 'tanh' else ''})")(o),
    "Swish": text("{a} * torch.sigmoid({alpha} * {a})", PRODUCT, alpha=1.0),
    "Elu": text("F.elu({x}, {alpha})", alpha=1.0),
    "Celu": text("F.celu({x}, {alpha})", alpha=1.0), "LeakyRelu": text("F.leaky_relu({x}, {alpha})", alpha=0.01),
    "Selu": text("{gamma} * F.elu({x}, {alpha})", PRODUCT, alpha=1.6732631921768188, gamma=1.0507010221481323),
    "HardSigmoid": text("({alpha} * {a} + {beta}).clamp(0, 1)", alpha=0.2, beta=0.5), "PRelu": _prelu,
    "ThresholdedRelu": text("torch.where({a} > {alpha}, {x}, 0)", alpha=1.0), "LpNormalization": _norm,
    "SequenceConstruct": lambda o: E(f"[{listed_operands(o)}]"), "SequenceEmpty": text("[]"),
    "SequenceAt": lambda o: E(f"{o.x(0, ATOM)}[{o.size(1)}]"), "SequenceInsert": called(f.insert, scalars=(2,)),
    "SequenceLength": text("torch.tensor(len({x}))"), "SplitToSequence": _split_to_sequence,
    "ConcatFromSequence": lambda o: text(f"torch.{_JOINS[o.attribute('new_axis', 0)]}({{x}}, {{axis}})", axis=0)(o),
}  # fmt: skip
"""The operators of the standard that move, compare and combine elements, by name."""
