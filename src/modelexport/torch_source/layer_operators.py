"""Operators of layers, quantized ones and those of ONNX Runtime as expressions of torch; see ``operators.py``."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from modelexport.torch_source import functions_of_layers as f
from modelexport.torch_source import functions_of_quantized as q
from modelexport.torch_source.expressions import ATOM, PRODUCT, SUM, UNARY, Expression, listed, literal
from modelexport.torch_source.operation import Operation, Several, Text, Unwritten, literal_or_none
from modelexport.torch_source.operators import TENSOR_OPERATORS, Writer, Written

E = Expression


def _same(numbers: list[int]) -> str:
    """A number for all axes if they are equal, otherwise a tuple."""
    return str(numbers[0]) if len(set(numbers)) == 1 else listed([str(number) for number in numbers])


class _Window:
    """The attributes that convolutions and pools share."""

    def __init__(self, o: Operation) -> None:
        axes = o.rank() - 2
        if not 1 <= axes <= 3:
            raise Unwritten(f"it has {axes} axes")
        self.axes = axes
        self.strides: list[int] = o.attribute("strides") or [1] * axes
        self.dilations: list[int] = o.attribute("dilations") or [1] * axes
        auto = o.attribute("auto_pad", "NOTSET")
        self.pads: Any = o.attribute("pads") if auto == "NOTSET" else auto if auto.startswith("SAME") else None
        self.pads = self.pads or [0] * 2 * axes
        self.kernel: list[int] = o.attribute("kernel_shape") or []
        self.ceil = bool(o.attribute("ceil_mode", 0))

    @property
    def is_even(self) -> bool:
        """Whether the padding is the same at both ends of each axis."""
        return not isinstance(self.pads, str) and self.pads[: self.axes] == self.pads[self.axes :]

    def named(self, *, group: int = 1) -> str:
        """Arguments of a convolution of ``torch.nn.functional`` other than the defaults."""
        pads = self.pads[: self.axes]
        texts = [f", {name}={_same(numbers)}" for name, numbers, default in
                 (("stride", self.strides, 1), ("padding", pads, 0), ("dilation", self.dilations, 1))
                 if set(numbers) != {default}]  # fmt: skip
        return "".join(texts) + (f", groups={group}" if group != 1 else "")

    def arguments(self) -> tuple[Any, ...]:
        return self.kernel, self.strides, self.pads, self.dilations, self.ceil


def _conv(o: Operation) -> Expression:
    window, group = _Window(o), o.attribute("group", 1)
    bias = f", {o.x(2)}" if o.has(2) else ""
    if window.is_even:
        return E(f"F.conv{window.axes}d({o.x()}, {o.x(1)}{bias}{window.named(group=group)})")
    return o.use(f.convolution, o.t(0), o.t(1), o.t(2), window.strides, window.pads, window.dilations, group)


def _conv_transpose(o: Operation) -> Expression:
    window, group = _Window(o), o.attribute("group", 1)
    more = o.attribute("output_padding") or [0] * window.axes
    shape = o.attribute("output_shape")
    smaller = all(a < max(s, d) for a, s, d in zip(more, window.strides, window.dilations, strict=True))
    if shape is None and window.is_even and smaller:
        bias = f", {o.x(2)}" if o.has(2) else ""
        extra = f", output_padding={_same(more)}" if any(more) else ""
        return E(f"F.conv_transpose{window.axes}d({o.x()}, {o.x(1)}{bias}{window.named(group=group)}{extra})")
    return o.use(f.transposed_convolution, o.t(0), o.t(1), o.t(2), window.strides, window.pads, window.dilations, group,
                 more, shape)  # fmt: skip


def _max_pool(o: Operation) -> Expression | Several:
    window = _Window(o)
    if len(o.node.outputs) > 1 and o.outputs_used() > 1:
        return o.several(2, f.max_pool_with_places, o.t(0), *window.arguments(), bool(o.attribute("storage_order", 0)))
    fits = window.is_even and all(2 * pad <= k for pad, k in zip(window.pads, window.kernel, strict=False))
    if not fits or o.kind() != "f":
        return o.use(f.max_pool, o.t(0), *window.arguments())
    ceil = ", ceil_mode=True" if window.ceil else ""
    step = "" if window.strides == window.kernel else f", {_same(window.strides)}"
    named = window.named().replace(f", stride={_same(window.strides)}", "")
    return E(f"F.max_pool{window.axes}d({o.x()}, {_same(window.kernel)}{step or f', {_same(window.strides)}'}{named}{ceil})")


def _average_pool(o: Operation) -> Expression:
    window, count = _Window(o), bool(o.attribute("count_include_pad", 0))
    fits = window.is_even and all(2 * pad <= k for pad, k in zip(window.pads, window.kernel, strict=False))
    if not fits or set(window.dilations) != {1}:
        return o.use(f.average_pool, o.t(0), *window.arguments(), count)
    pads = f", {_same(window.pads[: window.axes])}" if any(window.pads) else ""
    named = (", ceil_mode=True" if window.ceil else "") + ("" if count or not any(window.pads) else ", count_include_pad=False")
    return E(f"F.avg_pool{window.axes}d({o.x()}, {_same(window.kernel)}, {_same(window.strides)}{pads}{named})")


def _global(method: str) -> Writer:
    def write(o: Operation) -> Expression:
        axes = listed([str(axis) for axis in range(2, o.rank())])
        return E(f"{o.x(0, ATOM)}.{method}({axes}, keepdim=True)")

    return write


def _batch_norm(o: Operation) -> Written:
    if o.attribute("training_mode", 0) or o.outputs_used() > 1:
        raise Unwritten("it is in training mode")
    epsilon = literal(o.attribute("epsilon", 1e-5))
    text = E(f"F.batch_norm({o.x()}, {o.x(3)}, {o.x(4)}, {o.x(1)}, {o.x(2)}, eps={epsilon})")
    return [text] * len(o.node.outputs)


def _instance_norm(o: Operation) -> Expression:
    return E(f"F.instance_norm({o.x()}, weight={o.x(1)}, bias={o.x(2)}, eps={literal(o.attribute('epsilon', 1e-5))})")


def _layer_norm(o: Operation) -> Expression | Several:
    axis, epsilon = o.attribute("axis", -1), o.attribute("epsilon", 1e-5)
    scale = o.value(1)
    shape = list(scale.shape) if scale is not None and scale.shape is not None else []
    plain = axis % o.rank() + len(shape) == o.rank() and all(isinstance(size, int) for size in shape)
    if o.outputs_used() > 1 or not plain:
        return o.several(3, f.layer_norm, o.t(0), o.t(1), o.t(2), axis, epsilon)
    return E(f"F.layer_norm({o.x()}, {literal_or_none(shape)}, {o.x(1)}, {o.x(2)}, {literal(epsilon)})")


def _rms_norm(o: Operation) -> Expression:
    if o.outputs_used() > 1:
        raise Unwritten("its second output is used")
    return o.use(f.rms_norm, o.t(0), o.t(1), o.attribute("axis", -1), o.attribute("epsilon", 1e-5))


def _group_norm(o: Operation) -> Expression:
    groups, epsilon = o.attribute("num_groups"), literal(o.attribute("epsilon", 1e-5))
    channels, scales = (v.shape[i] if v is not None and v.shape is not None else None for v, i in ((o.value(0), 1), (o.value(1), 0)))
    each = "" if scales == channels else f".repeat_interleave({o.x(0, ATOM)}.shape[1] // {groups})"
    return E(f"F.group_norm({o.x()}, {groups}, {o.x(1, ATOM)}{each}, {o.x(2, ATOM)}{each}, {epsilon})")


_GATES = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


def _recurrent(o: Operation) -> Several:
    kind, direction = o.node.op_type, o.attribute("direction", "forward")
    activations = o.attribute("activations") or _GATES[kind] * (2 if direction == "bidirectional" else 1)
    states = [o.x(5)] if kind != "LSTM" else [o.x(5), o.x(6)]
    named = [("layout", 0), ("clip", None), ("linear_before_reset", 0), ("input_forget", 0),
             ("activation_alpha", None), ("activation_beta", None)]  # fmt: skip
    names = ("layout", "clip", "reset_after", "coupled", "alphas", "betas")
    texts = [
        f", {name}={literal_or_none(o.attribute(key))}"
        for name, (key, default) in zip(names, named, strict=True)
        if o.attribute(key, default) not in (default, None)
    ]
    o.scope.helpers.add(f.recurrent_layer)
    weights = listed([o.x(1), o.x(2), o.x(3), o.x(7)])
    return Several(f"recurrent_layer({kind!r}, {o.x()}, {weights}, {o.x(4)}, {listed(states)}, {ascii(direction)}, "
                   f"{literal_or_none(list(activations))}{''.join(texts)})", 1 + len(states))  # fmt: skip


def _attention(o: Operation) -> Several:
    scale, softcap = o.attribute("scale"), o.attribute("softcap", 0.0)
    heads = [o.attribute("q_num_heads", 0), o.attribute("kv_num_heads", 0)]
    causal, past = bool(o.attribute("is_causal", 0)), Text(listed([o.x(4), o.x(5)]))
    return o.several(4, f.attention, o.t(0), o.t(1), o.t(2), o.t(3), causal, scale, softcap, heads, past, o.t(6),
                     o.attribute("qk_matmul_output_mode", 0))  # fmt: skip


def _rotary(o: Operation) -> Expression:
    if o.node.domain:  # of ONNX Runtime: positions come second, and may be the first place alone
        if o.number(1) is not None or o.rank(1) != 2:
            raise Unwritten("its positions are one number")
        order = (0, 2, 3, 1)
    else:
        order = (0, 1, 2, 3)
    return o.use(f.rotary_embedding, *(o.t(i) for i in order), bool(o.attribute("interleaved", 0)),
                 o.attribute("rotary_embedding_dim", 0), o.attribute("num_heads", 0))  # fmt: skip


def _dequantize(o: Operation) -> Expression:
    return o.use(q.dequantize, o.t(0), o.t(1), o.t(2), o.attribute("axis", 1), o.attribute("block_size", 0))


_RANGES = {"UINT8": (0, 255), "INT8": (-128, 127), "UINT16": (0, 65535), "INT16": (-32768, 32767),
           "INT4": (-8, 7), "UINT4": (0, 15), "INT32": (-(2**31), 2**31 - 1)}  # fmt: skip


def _quantize(o: Operation) -> Expression:
    dtype = o.dtype(2) or ir.DataType(o.attribute("output_dtype", 0) or ir.DataType.UINT8)
    if dtype.name not in _RANGES:
        raise Unwritten(f"it rounds to {dtype.name.lower()}")
    axis, block = o.attribute("axis", 1), o.attribute("block_size", 0)
    return o.use(q.quantize, o.t(0), o.t(1), o.t(2), axis, block, *_RANGES[dtype.name], Text(o.type_of(dtype)))


def _matmul_integer(o: Operation) -> Expression:
    return o.use(q.integer_product, o.t(0), o.t(1), o.t(2), o.t(3))


def _conv_integer(o: Operation) -> Expression:
    w = _Window(o)
    return o.use(q.integer_convolution, *(o.t(i) for i in range(4)), w.strides, w.pads, w.dilations, o.attribute("group", 1))


def _requantized(o: Operation, total: str, scale: str, zero: int) -> Expression:
    """Whole numbers times a scale, rounded to the type of the output's zero point."""
    dtype = o.dtype(zero)
    if dtype is None or dtype.name not in _RANGES:
        raise Unwritten("the type of its zero point is not known")
    low, high = _RANGES[dtype.name]
    return E(f"(torch.round({total} * {scale}) + {o.x(zero, SUM + 1)}).clamp({low}, {high}).to({o.type_of(dtype)})")


def _qlinear_matmul(o: Operation) -> Expression:
    total = o.use(q.integer_product, o.t(0), o.t(3), o.t(2), o.t(5)).text
    return _requantized(o, total, f"({o.x(1, ATOM)} * {o.x(4, ATOM)} / {o.x(6, ATOM)})", 7)


def _qlinear_conv(o: Operation) -> Expression:
    w = _Window(o)
    total = o.use(q.integer_convolution, o.t(0), o.t(3), o.t(2), o.t(5), w.strides, w.pads, w.dilations,
                  o.attribute("group", 1)).text  # fmt: skip
    shape = listed(["-1", *["1"] * w.axes])
    total = f"({total} + {o.x(8, ATOM)}.view{shape})" if o.has(8) else total
    scale = o.value(4)
    by_channel = scale is None or scale.shape is None or len(scale.shape) > 0
    factor = f"{o.x(4, ATOM)}.view{shape}" if by_channel else o.x(4, ATOM)
    return _requantized(o, total, f"({o.x(1, ATOM)} * {factor} / {o.x(6, ATOM)})", 7)


def _fused_matmul(o: Operation) -> Expression:
    if o.attribute("transBatchA", 0) or o.attribute("transBatchB", 0):
        raise Unwritten("it transposes batches")
    a, b = (f"{o.x(i, ATOM)}.mT" if o.attribute(name, 0) else o.x(i, PRODUCT + i) for i, name in enumerate(("transA", "transB")))
    alpha = o.attribute("alpha", 1.0)
    return E(f"{a} @ {b}" if alpha == 1 else f"({a} @ {b}) * {literal(alpha)}", PRODUCT)


def _matmul_n_bits(o: Operation) -> Expression:
    bits, block = o.attribute("bits", 4), o.attribute("block_size")
    if o.has(4):
        raise Unwritten("it has an index of groups")
    weight = o.use(q.block_weight, o.t(1), o.t(2), o.t(3), o.attribute("K"), o.attribute("N"), bits, block).text
    return E(f"F.linear({o.x()}, {weight}{f', {o.x(5)}' if o.has(5) else ''})")


def _skip_norm(centered: bool) -> Writer:
    def write(o: Operation) -> Several:
        shift, bias = (o.t(3), o.t(4)) if centered else (Text("None"), o.t(3))
        epsilon = o.attribute("epsilon", 1e-12)
        return o.several(4, q.skip_norm, o.t(0), o.t(1), o.t(2), shift, bias, epsilon, centered)

    return write


def _packed_attention(o: Operation) -> Several:
    return o.several(2, q.packed_attention, *(o.t(i) for i in range(6)), o.attribute("num_heads"), o.attribute("scale"),
                     o.attribute("mask_filter_value", -10000.0), bool(o.attribute("unidirectional", 0)),
                     o.attribute("qkv_hidden_sizes"))  # fmt: skip


def _multi_head(o: Operation) -> Several:
    return o.several(3, q.multi_head_attention, *(o.t(i) for i in range(8)), o.attribute("num_heads"),
                     o.attribute("scale") or None, o.attribute("mask_filter_value", -10000.0),
                     bool(o.attribute("unidirectional", 0)))  # fmt: skip


def _group_query(o: Operation) -> Several:
    return o.several(
        3, q.group_query_attention, *(o.t(i) for i in (0, 1, 2, 3, 4, 5, 7, 8, 9, 10)), o.attribute("num_heads"),
        o.attribute("kv_num_heads"), o.attribute("scale") or None, o.attribute("softcap", 0.0),
        bool(o.attribute("do_rotary", 0)), bool(o.attribute("rotary_interleaved", 0)),
        o.attribute("local_window_size", -1),
    )  # fmt: skip


def _embed_norm(o: Operation) -> Several:
    return o.several(3, q.embed_norm, *(o.t(i) for i in range(9)), o.attribute("epsilon", 1e-12))


def _fused_conv(o: Operation) -> Expression:
    kind, numbers = o.attribute("activation", ""), o.attribute("activation_params") or []
    result = _conv(o)
    result = E(f"{result.text} + {o.x(3, SUM + 1)}", SUM) if o.has(3) else result
    texts = {"": result.text, "Relu": f"torch.relu({result.text})", "Sigmoid": f"torch.sigmoid({result.text})",
             "Tanh": f"torch.tanh({result.text})"}  # fmt: skip
    if kind == "Clip":
        return E(f"({result.text}).clamp({literal(numbers[0])}, {literal(numbers[1])})")
    if kind == "LeakyRelu":
        return E(f"F.leaky_relu({result.text}, {literal(numbers[0])})")
    if kind not in texts:
        raise Unwritten(f"its activation is {kind}")
    return E(texts[kind], result.binding if not kind else ATOM)


def _bias_gelu(approximate: str) -> Writer:
    return lambda o: E(f"F.gelu({o.x(0, SUM)}{f' + {o.x(1, SUM + 1)}' if o.has(1) else ''}{approximate})")


OPERATORS: dict[tuple[str, str], Writer] = {
    **{("", name): writer for name, writer in TENSOR_OPERATORS.items()},
    **{("", name): writer for name, writer in {
        "Conv": _conv, "ConvTranspose": _conv_transpose, "MaxPool": _max_pool, "AveragePool": _average_pool,
        "LpPool": lambda o: o.use(f.lp_pool, o.t(0), *_Window(o).arguments(), o.attribute("p", 2)),
        "GlobalAveragePool": _global("mean"), "GlobalMaxPool": _global("amax"),
        "GlobalLpPool": lambda o: E(f"{o.x(0, ATOM)}.norm({o.attribute('p', 2)}, {listed([str(a) for a in range(2, o.rank())])}, True)"),
        "MaxUnpool": lambda o: o.use(f.max_unpool, o.t(0), o.t(1), Text(o.sizes(2))),
        "BatchNormalization": _batch_norm, "InstanceNormalization": _instance_norm, "LayerNormalization": _layer_norm,
        "RMSNormalization": _rms_norm, "GroupNormalization": _group_norm,
        "MeanVarianceNormalization": lambda o: o.use(f.mean_variance_norm, o.t(0), o.attribute("axes", [0, 2, 3])),
        "LRN": lambda o: o.use(f.local_response, o.t(0), o.attribute("size"), o.attribute("alpha", 1e-4),
                               o.attribute("beta", 0.75), o.attribute("bias", 1.0)),
        "RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent, "Attention": _attention, "RotaryEmbedding": _rotary,
        "DequantizeLinear": _dequantize, "QuantizeLinear": _quantize,
        "DynamicQuantizeLinear": lambda o: o.several(3, q.dynamic_quantize, o.t(0)),
        "MatMulInteger": _matmul_integer, "ConvInteger": _conv_integer,
        "QLinearMatMul": _qlinear_matmul, "QLinearConv": _qlinear_conv,
    }.items()},
    **{("com.microsoft", name): writer for name, writer in {
        "DequantizeLinear": _dequantize, "QuantizeLinear": _quantize, "FusedMatMul": _fused_matmul,
        "MatMulNBits": _matmul_n_bits, "SkipLayerNormalization": _skip_norm(True),
        "SkipSimplifiedLayerNormalization": _skip_norm(False), "Attention": _packed_attention,
        "MultiHeadAttention": _multi_head, "GroupQueryAttention": _group_query, "EmbedLayerNormalization": _embed_norm,
        "FusedConv": _fused_conv, "RotaryEmbedding": _rotary, "BiasGelu": _bias_gelu(""), "Gelu": _bias_gelu(""),
        "FastGelu": _bias_gelu(", approximate='tanh'"),
        "QuickGelu": lambda o: E(f"{o.x(0, PRODUCT)} * torch.sigmoid({literal(o.attribute('alpha', 1.702))} * {o.x(0, PRODUCT + 1)})", PRODUCT),
        "MatMulIntegerToFloat": lambda o: E(
            o.use(q.integer_product, o.t(0), o.t(1), o.t(4), o.t(5)).text + f" * {o.x(2, UNARY)} * {o.x(3, UNARY)}"
            + (f" + {o.x(6, UNARY)}" if o.has(6) else ""), SUM),
        "DynamicQuantizeMatMul": lambda o: E(
            f"dequantize(*dynamic_quantize({o.x()})) @ " + o.use(q.dequantize, o.t(1), o.t(2), o.t(3), -1).text
            + (f" + {o.x(4, UNARY)}" if o.has(4) else ""), SUM) if o.scope.helpers.add(q.dynamic_quantize) is None else E(""),
        "GatherBlockQuantized": lambda o: o.use(
            q.gather_blocks, o.t(0), o.t(1), o.t(2), o.t(3), o.attribute("gather_axis", 0),
            o.attribute("block_size", 128), o.attribute("bits", 4)),
    }.items()},
}  # fmt: skip
"""Domain and name of each operator to what writes it."""
for _domain in ("", "com.microsoft"):  # ONNX Runtime puts them into the standard's domain
    OPERATORS[_domain, "SimplifiedLayerNormalization"] = _rms_norm
