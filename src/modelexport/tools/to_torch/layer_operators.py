"""Operators of layers, quantized and of ONNX Runtime, as expressions of torch, and the table of all operators.

How to add one is in ``tensor_operators.py``.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.tools.to_torch.attention_pattern import DOMAIN, OPERATOR
from modelexport.tools.to_torch.expressions import LEFT_OUT, code
from modelexport.tools.to_torch.operation import Operation, UnwrittenError
from modelexport.tools.to_torch.tensor_operators import TENSOR_OPERATORS, Row


def _unless(values: Any, usual: Any) -> Any:
    """An argument for each axis, left out if it is the usual one; one number if all axes have the same."""
    values = list(values if values is not None else usual)
    return LEFT_OUT if values == list(usual) else values[0] if len(set(values)) == 1 else tuple(values)


def _padded(
    o: Operation, image: ast.expr | None, kernel: Sequence[int], value: Any = LEFT_OUT
) -> tuple[ast.expr | None, list[int], list[int]]:
    """An image, and the padding before and behind each axis; it is padded already if that depends on dynamic sizes."""
    ones, automatic = [1] * len(kernel), o.attribute("auto_pad") or "NOTSET"
    strides, dilations = o.attribute("strides") or ones, o.attribute("dilations") or ones
    if not automatic.startswith("SAME"):
        pads = list(o.attribute("pads") or [0] * 2 * len(kernel))
        return image, pads[: len(kernel)], pads[len(kernel) :]
    sizes = o.shape()[2:] if o.known_rank() > 2 else [None] * len(kernel)
    lower = automatic == "SAME_LOWER"
    if any(step > 1 and not isinstance(size, int) for size, step in zip(sizes, strides, strict=True)):
        how = {"lower": True if lower else LEFT_OUT, "value": value}
        image = o.write("pad_same(x, kernel, strides, dilations, **how)", x=image, kernel=tuple(kernel),
                        strides=tuple(strides), dilations=tuple(dilations), how=how)  # fmt: skip
        return image, [0] * len(kernel), [0] * len(kernel)
    fixed = [size if isinstance(size, int) else 1 for size in sizes]  # with steps of 1 it does not matter
    rows = zip(fixed, kernel, strides, dilations, strict=True)
    totals = [max(0, (-(-size // step) - 1) * step + (k - 1) * gap + 1 - size) for size, k, step, gap in rows]
    less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (image, more, less) if lower else (image, less, more)


def _group(o: Operation) -> Any:
    return LEFT_OUT if o.attribute("group") in (None, 1) else o.attribute("group")


def _around(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Padding in the order of ``F.pad``."""
    return tuple(each for pair in reversed(list(zip(before, after, strict=True))) for each in pair)


def _conv(o: Operation, weight: int = 1, *quantized: ast.expr) -> ast.expr:
    """A convolution of the node's operands, or of the numbers that its quantized operands are."""
    kernel = o.shape(weight)[2:]
    axes = len(kernel)
    first, *given = quantized or [o.tensor(index) for index in (0, 1, 2) if o.has(index)]
    image, before, after = _padded(o, first, kernel)
    if before != after:
        image, before = code("F.pad(x, around)", x=image, around=_around(before, after)), [0] * axes
    return o.write(
        f"F.conv{axes}d(x, *given, stride=s, padding=p, dilation=d, groups=g)", x=image, given=given,
        s=_unless(o.attribute("strides"), [1] * axes), p=_unless(before, [0] * axes),
        d=_unless(o.attribute("dilations"), [1] * axes), g=_group(o),
    )  # fmt: skip


def _conv_transpose(o: Operation) -> ast.expr:
    axes, kernel, sizes = o.rank() - 2, o.shape(1)[2:], o.shape()[2:]
    zeros, ones, pads = [0] * axes, [1] * axes, list(o.attribute("pads") or [0] * 2 * (o.rank() - 2))
    strides, more = o.attribute("strides") or ones, o.attribute("output_padding") or zeros
    shape, automatic = o.attribute("output_shape"), o.attribute("auto_pad")
    if shape or automatic.startswith("SAME"):
        if not all(isinstance(size, int) for size in sizes):
            raise UnwrittenError("its padding depends on dynamic sizes")
        wanted = (shape or [size * step for size, step in zip(sizes, strides, strict=True)])[-axes:]
        rows = zip(sizes, strides, kernel, o.attribute("dilations") or ones, more, wanted, strict=True)
        total = [(size - 1) * step + (k - 1) * gap + 1 + extra - want for size, step, k, gap, extra, want in rows]
        first = [cut // 2 if automatic == "SAME_UPPER" else cut - cut // 2 for cut in total]
        pads = [*first, *(cut - begin for cut, begin in zip(total, first, strict=True))]
    equal = pads[:axes] == pads[axes:] and min(pads) >= 0
    written = o.write(
        f"F.conv_transpose{axes}d(a, *given, stride=s, padding=p, output_padding=m, groups=g, dilation=d)",
        given=[o.tensor(index) for index in (1, 2) if o.has(index)], s=_unless(strides, ones),
        p=_unless(pads[:axes] if equal else zeros, zeros), m=_unless(more, zeros),
        g=_group(o), d=_unless(o.attribute("dilations"), ones),
    )  # fmt: skip
    cut = _around([-each for each in pads[:axes]], [-each for each in pads[axes:]])
    return written if equal else code("F.pad(x, cut)", x=written, cut=cut)


def _pool(o: Operation) -> ast.expr:
    maximum, kernel = o.node.op_type == "MaxPool", list(o.attribute("kernel_shape"))
    zeros, ones = [0] * len(kernel), [1] * len(kernel)
    value = -math.inf if maximum else LEFT_OUT
    first = o.tensor(0) if o.kind() == "f" else o.write("a.float()")
    image, before, after = _padded(o, first, kernel, value)
    is_padded = image is not first
    equal = before == after and all(2 * pad <= size for pad, size in zip(before, kernel, strict=True))
    strides, dilations = o.attribute("strides") or ones, _unless(o.attribute("dilations"), ones)
    how = {"stride": _unless(strides, kernel), "padding": _unless(before if equal else zeros, zeros),
           "ceil_mode": True if o.attribute("ceil_mode") else LEFT_OUT}  # fmt: skip
    if o.outputs_used() > 1 or not (maximum or dilations is LEFT_OUT) or not (equal or how["ceil_mode"] is LEFT_OUT):
        raise UnwrittenError("torch pools without its second output, its dilation or its padding")
    counts = o.attribute("count_include_pad") or not (is_padded or any((*before, *after)))
    how |= {"dilation": dilations} if maximum else {} if counts or not equal else {"count_include_pad": False}
    template = f"F.{'max' if maximum else 'avg'}_pool{len(kernel)}d(x, size, **how)"
    size = kernel[0] if len(set(kernel)) == 1 else tuple(kernel)
    around = _around(before, after)
    padded = image if equal else code("F.pad(x, around, value=value)", x=image, around=around, value=value)
    written = code(template, x=padded, size=size, how=how)
    if (is_padded or not equal) and not (maximum or counts):  # the mean of what is inside
        inside = _padded(o, code("torch.ones_like(x[:1, :1])", x=first), kernel)[0]
        inside = inside if equal else code("F.pad(x, around)", x=inside, around=around)
        written = code(f"x / {template.replace('(x', '(inside')}", x=written, inside=inside, size=size, how=how)
    return written if o.kind() == "f" else o.converted(written, o.dtype())


def _global(method: str) -> Callable[[Operation], ast.expr]:
    def write(o: Operation) -> ast.expr:
        dims = tuple(range(2, o.rank()))
        return o.write(f"a.{method}(dims, keepdim=True)", dims=dims[0] if len(dims) == 1 else dims)

    return write


def _batch_norm(o: Operation) -> ast.expr:
    if o.attribute("training_mode") or o.outputs_used() > 1:
        raise UnwrittenError("it is in training mode")
    o.attribute("momentum"), o.attribute("spatial")
    made = [value.producer() for value in o.node.inputs[3:] if value is not None]
    if any(node is not None and node.op_type != "Constant" for node in made):
        shape = (-1, *[1] * (o.rank() - 2))  # statistics that are computed have gradients, which F.batch_norm lacks
        scaled = o.write("(a - d.view(shape)) * (e.view(shape) + epsilon).rsqrt()", shape=shape)
        return o.write("x * b.view(shape) + c.view(shape)", x=scaled, shape=shape)
    return o.write("F.batch_norm(a, d, e, b, c, eps=epsilon)")


def _layer_norm(o: Operation) -> ast.expr:
    axis, shape, ones = o.attribute("axis") % o.rank(), o.shape(1), o.array(1)
    sizes = o.shape()[axis:]
    if o.outputs_used() > 1 or not all(isinstance(size, int) for size in sizes):
        raise UnwrittenError("its mean is used, or its sizes are dynamic")
    if sizes != shape:
        return o.write(f"F.layer_norm(a, sizes, eps=epsilon) * b{' + c' if o.has(2) else ''}", sizes=tuple(sizes))
    plain = not o.has(2) and ones is not None and (ones == 1).all()
    rest = [] if plain else [o.tensor(index) for index in (1, 2) if o.has(index)]
    return o.write("F.layer_norm(a, sizes, *rest, eps=epsilon)", sizes=tuple(sizes), rest=rest)


def _rms_norm(o: Operation) -> ast.expr:
    axis, scale, epsilon = o.attribute("axis"), o.shape(1), o.attribute("epsilon") or 1e-5
    is_unknown = o.known_rank() < 0 and axis == -len(scale)
    sizes = [None] * len(scale) if is_unknown else o.shape()[axis % o.rank() :]
    if len(sizes) == len(scale) and all(
        size == other if isinstance(size, int) else other != 1 for size, other in zip(sizes, scale, strict=True)
    ):
        return o.write("F.rms_norm(a, b.shape, b, epsilon)", epsilon=epsilon)
    if not all(isinstance(size, int) for size in sizes):
        raise UnwrittenError("its sizes are dynamic")
    return o.write("F.rms_norm(a, sizes, eps=epsilon) * b", sizes=tuple(sizes), epsilon=epsilon)


def _group_norm(o: Operation) -> ast.expr:
    each = "" if o.version >= 21 else f".repeat_interleave(a.shape[1] // {int(o.attribute('num_groups'))})"
    return o.write(f"F.group_norm(a, num_groups, b{each}, c{each}, eps=epsilon)")


_GATES = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


def _recurrent(o: Operation) -> ast.expr:
    kind, given = o.node.op_type, o.attribute("activations") if "activations" in o.node.attributes else None
    usual, relu = _GATES[kind], kind == "RNN" and given and set(given) == {"Relu"}
    count = 2 if o.attribute("direction") == "bidirectional" else 1
    if (given and tuple(given) != usual * count and not relu) or o.has(7) or o.has(4) or o.attribute("input_forget"):
        raise UnwrittenError("its activations or gates are not the usual ones, or it has peepholes or lengths")
    if kind == "GRU" and not o.attribute("linear_before_reset"):
        raise UnwrittenError("it resets before the product")
    o.attribute("hidden_size")
    name = {"RNN": "rnn_relu" if relu else "rnn_tanh"}.get(kind, kind.lower())
    states = [o.tensor(5), o.tensor(6)] if kind == "LSTM" else [o.tensor(5)]
    return o.write("recurrent(kind, a, b, c, d, states, **attributes)", kind=name, states=states)


def _dynamic_lstm(o: Operation) -> ast.expr:
    if o.has(4) or o.has(7) or "activations" in o.node.attributes:
        raise UnwrittenError("it has lengths, peepholes or other activations")
    o.attribute("hidden_size")
    scales = [o.tensor(index) for index in range(8, 12)]
    return o.write("dynamic_quantize_lstm(a, b, c, d, f, g, *scales, **attributes)", scales=scales)


def _attention(o: Operation) -> ast.expr:
    if o.outputs_used() > 3:
        raise UnwrittenError("its fourth output is used")
    o.attribute("qk_matmul_output_mode")
    return o.write("attention(a, b, c, d, e, f, g, **attributes)")


def _rotary(o: Operation) -> ast.expr:
    if o.rank(1) != 2:
        raise UnwrittenError("its positions are one number")
    return o.write("rotary_embedding(a, c, d, b, **attributes)")  # ONNX Runtime's order


_LIMITS = {"UINT8": (0, 255), "INT8": (-128, 127), "UINT16": (0, 65535), "INT16": (-32768, 32767), "INT4": (-8, 7),
           "UINT4": (0, 15), "INT32": (-(2**31), 2**31 - 1)}  # fmt: skip


def _quantize(o: Operation) -> ast.expr:
    dtype = o.dtype(2) or ir.DataType(o.attribute("output_dtype") or ir.DataType.UINT8)
    if dtype.name not in _LIMITS:
        raise UnwrittenError(f"it rounds to {dtype.name.lower()}")
    template = "quantize_linear(a, b, c, limits, kind, **attributes)"
    return o.write(template, limits=_LIMITS[dtype.name], kind=o.type_of(dtype))


def _dequantize(o: Operation) -> ast.expr:
    result, dtype = o.write("dequantize_linear(a, b, c, **attributes)"), o.attribute("output_dtype")
    return o.converted(result, dtype) if dtype and dtype != o.dtype(1) else result


def _conv_integer(o: Operation) -> ast.expr:
    ones = o.rank() - 1
    image, weight = o.write("shifted(a, c)"), o.write("shifted(b, d, ones)", ones=ones if o.has(3) and o.rank(3) else 0)
    return code("x.to(torch.int32)", x=_conv(o, 1, image, weight))


def _qlinear_conv(o: Operation) -> ast.expr:
    ones = o.rank() - 1
    image, weight = o.write("shifted(a, c)"), o.write("shifted(d, f, ones)", ones=ones if o.rank(5) else 0)
    total = _conv(o, 3, image, weight)
    shape = [-1, *[1] * (ones - 1)]
    total = o.write("x + i.view(*shape)", x=total, shape=shape) if o.has(8) else total
    return o.write("requantized(x, b * e.reshape(*shape) / g, h)", x=total, shape=shape)


def _fused_matmul(o: Operation) -> ast.expr:
    if o.attribute("transBatchA") or o.attribute("transBatchB"):
        raise UnwrittenError("it transposes batches")
    if any(o.attribute(f"trans{'AB'[index]}") and o.known_rank(index) == 1 for index in (0, 1)):
        raise UnwrittenError("it transposes a vector")
    product = o.write(f"{'a.mT' if o.attribute('transA') else 'a'} @ {'b.mT' if o.attribute('transB') else 'b'}")
    return product if o.attribute("alpha") in (None, 1) else code("p * s", p=product, s=o.attribute("alpha"))


def _fused_conv(o: Operation) -> ast.expr:
    names = {None: "", "": "", "Relu": "torch.relu", "Sigmoid": "torch.sigmoid", "Tanh": "torch.tanh",
             "Clip": "torch.clamp", "LeakyRelu": "F.leaky_relu"}  # fmt: skip
    if o.attribute("activation") not in names:
        raise UnwrittenError(f"its activation is {o.attribute('activation')}")
    result = _conv(o)
    result = o.write("x + d", x=result) if o.has(3) else result
    name = names[o.attribute("activation")]
    return code(f"{name}(x, *more)", x=result, more=o.attribute("activation_params") or []) if name else result


def _cross_entropy(o: Operation) -> ast.expr:
    if o.outputs_used() > 1:
        raise UnwrittenError("its second output is used")
    name = "cross_entropy" if o.node.op_type == "SoftmaxCrossEntropyLoss" else "nll_loss"
    ignored = LEFT_OUT if o.attribute("ignore_index") is None else o.attribute("ignore_index")
    return o.write(f"F.{name}(a, b, c, ignore_index=ignored, reduction=reduction)", ignored=ignored)


def _dot_product_attention(o: Operation) -> ast.expr:
    mask = "a, b, c, d" if o.has(3) else "a, b, c"
    return o.write(f"F.scaled_dot_product_attention({mask}, scale=s)", s=o.attribute("scale") or LEFT_OUT)


def _fold(o: Operation) -> ast.expr:
    size, block, pads = o.numbers(1), o.numbers(2), o.attribute("pads") or [0, 0, 0, 0]
    if size is None or block is None or len(size) != 2 or pads[:2] != pads[2:]:
        raise UnwrittenError("its sizes are not numbers, it is not an image, or its ends are padded differently")
    moved = {"dilation": o.attribute("dilations"), "padding": pads[:2], "stride": o.attribute("strides")}
    steps = {name: tuple(numbers) for name, numbers in moved.items() if numbers}
    return o.write("F.fold(a, size, block, **steps)", size=tuple(size), block=tuple(block), steps=steps)


def _gelu_of_sum(**how: str) -> Callable[[Operation], ast.expr]:
    return lambda o: o.write("F.gelu(a + b, **how)" if o.has(1) else "F.gelu(a, **how)", how=how)


_STANDARD: dict[str, Row] = {
    "SoftmaxCrossEntropyLoss": _cross_entropy, "NegativeLogLikelihoodLoss": _cross_entropy, "Conv": _conv,
    "ConvTranspose": _conv_transpose, "MaxPool": _pool, "AveragePool": _pool, "GlobalAveragePool": _global("mean"),
    "GlobalMaxPool": _global("amax"), "Col2Im": _fold, "LRN": "lrn(a, **attributes)", "BatchNormalization": _batch_norm,
    "InstanceNormalization": "instance_norm(a, b, c, **attributes)", "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm, "GroupNormalization": _group_norm, "RNN": _recurrent, "GRU": _recurrent,
    "LSTM": _recurrent, "Attention": _attention,
    "RotaryEmbedding": "rotary_embedding(a, b, c, d, **attributes)", "DequantizeLinear": _dequantize,
    "QuantizeLinear": _quantize, "DynamicQuantizeLinear": "dynamic_quantize(a)",
    "MatMulInteger": "matmul_integer(a, b, c, d)", "ConvInteger": _conv_integer, "QLinearConv": _qlinear_conv,
    "QLinearMatMul": "requantized(matmul_integer(a, d, c, f), b * e / g, h)",
    "SimplifiedLayerNormalization": _rms_norm,  # ONNX Runtime puts it into the standard's domain
}  # fmt: skip
_MICROSOFT: dict[str, Row] = {
    "DequantizeLinear": _dequantize, "QuantizeLinear": _quantize, "FusedMatMul": _fused_matmul,
    "MatMulNBits": "matmul_n_bits(a, b, c, d, e, f, **attributes)",
    "SkipLayerNormalization": "skip_layer_norm(a, b, c, d, e, **attributes)",
    "SkipSimplifiedLayerNormalization": "skip_layer_norm(a, b, c, None, d, is_rms=True, **attributes)",
    "RotaryEmbedding": _rotary,
    "SimplifiedLayerNormalization": _rms_norm, "Attention": "packed_attention(a, b, c, d, e, f, **attributes)",
    "MultiHeadAttention": "multi_head_attention(a, b, c, d, e, f, g, h, **attributes)", "FusedConv": _fused_conv,
    "GroupQueryAttention": lambda o: o.write(
        "group_query_attention(a, b, c, d, e, f, g, h, i, j, scores, **attributes)", scores=o.tensor(10)),
    "EmbedLayerNormalization": "embed_layer_norm(a, b, c, d, e, f, g, h, i, **attributes)",
    "DynamicQuantizeLSTM": _dynamic_lstm,
    "BiasGelu": _gelu_of_sum(), "Gelu": _gelu_of_sum(), "FastGelu": _gelu_of_sum(approximate="tanh"),
    "QuickGelu": lambda o: o.write("a * torch.sigmoid(s * a)", s=o.attribute("alpha") or 1.702),
}  # fmt: skip

OPERATORS: dict[tuple[str, str], Row] = {
    **{("", name): row for name, row in {**TENSOR_OPERATORS, **_STANDARD}.items()},
    (DOMAIN, OPERATOR): _dot_product_attention,
    **{("com.microsoft", name): row for name, row in _MICROSOFT.items()},
}
"""Domain and name of each operator to what writes it."""
