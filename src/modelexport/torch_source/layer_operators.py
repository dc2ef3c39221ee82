"""Operators of layers, quantized ones and those of ONNX Runtime as expressions of torch; see ``operators.py``."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.torch_source import functions_of_layers as f
from modelexport.torch_source import functions_of_quantized as q
from modelexport.torch_source.attention_pattern import DOMAIN, OPERATOR
from modelexport.torch_source.expressions import ATOM, PRODUCT, SUM, Expression, listed, literal, literal_or_none
from modelexport.torch_source.operation import E, Operation, Text, UnwrittenError, Writer, Written, called, integers_of
from modelexport.torch_source.operators import TENSOR_OPERATORS, text


def _max_pool(o: Operation) -> Written:
    return (called(f.max_pool) if o.outputs_used() == 1 else called(f.max_pool_with_places, count=2))(o)


def _global(method: str) -> Writer:
    return lambda o: E(f"{o.x(0, ATOM)}.{method}({literal_or_none(list(range(2, o.rank())))}, keepdim=True)")


def _batch_norm(o: Operation) -> Written:
    if o.attribute("training_mode", 0) or o.outputs_used() > 1:
        raise UnwrittenError("it is in training mode")
    epsilon = literal(o.attribute("epsilon", 1e-5))
    text = E(f"F.batch_norm({o.x()}, {o.x(3)}, {o.x(4)}, {o.x(1)}, {o.x(2)}, eps={epsilon})")
    return [text] * len(o.node.outputs)


def _layer_norm(o: Operation) -> Written:
    scale = o.value(1)
    shape = integers_of(scale.shape) if scale is not None and scale.shape is not None else None
    if o.outputs_used() > 1 or shape is None or o.attribute("axis", -1) % o.rank() + len(shape) != o.rank():
        return called(f.layer_norm, count=3)(o)
    epsilon = literal(o.attribute("epsilon", 1e-5))
    return E(f"F.layer_norm({o.x()}, {literal_or_none(shape)}, {o.x(1)}, {o.x(2)}, {epsilon})")


def _group_norm(o: Operation) -> Written:
    groups, epsilon = o.attribute("num_groups"), literal(o.attribute("epsilon", 1e-5))
    each = "" if o.version >= 21 else f".repeat_interleave({o.x(0, ATOM)}.shape[1] // {groups})"
    return E(f"F.group_norm({o.x()}, {groups}, {o.x(1, ATOM)}{each}, {o.x(2, ATOM)}{each}, {epsilon})")


_GATES = {"RNN": [["Tanh"], ["Relu"]], "GRU": [["Sigmoid", "Tanh"]], "LSTM": [["Sigmoid", "Tanh", "Tanh"]]}


def _recurrent(o: Operation) -> Written:
    kind = o.node.op_type
    known = _GATES[kind] + [gates * 2 for gates in _GATES[kind]]
    if o.attribute("activations", known[0]) not in known or o.has(7):
        raise UnwrittenError("its activations are not the usual ones, or it has peepholes")
    states = Text(listed([o.x(5)] if kind != "LSTM" else [o.x(5), o.x(6)]))
    inputs = (kind, *(Text(o.x(index)) for index in range(5)), states)
    ignored = ("activations",) if kind != "RNN" else ()
    return called(f.recurrent, inputs=inputs, count=3 if kind == "LSTM" else 2, ignored=ignored)(o)


def _rotary(o: Operation) -> Written:
    if o.rank(1) != 2:
        raise UnwrittenError("its positions are one number")
    return called(f.rotary_embedding, inputs=[Text(o.x(i)) for i in (0, 2, 3, 1)])(o)  # ONNX Runtime's order


_LIMITS = {"UINT8": (0, 255), "INT8": (-128, 127), "UINT16": (0, 65535), "INT16": (-32768, 32767), "INT4": (-8, 7),
           "UINT4": (0, 15), "INT32": (-(2**31), 2**31 - 1)}  # fmt: skip


def _quantize(o: Operation) -> Written:
    dtype = o.dtype(2) or ir.DataType(o.attribute("output_dtype", 0) or ir.DataType.UINT8)
    if dtype.name not in _LIMITS:
        raise UnwrittenError(f"it rounds to {dtype.name.lower()}")
    inputs = (*(Text(o.x(i)) for i in range(3)), _LIMITS[dtype.name], Text(o.type_of(dtype)))
    return called(q.quantize_linear, inputs=inputs, ignored=("output_dtype", "saturate"))(o)


def _dequantize(o: Operation) -> Written:
    result = called(q.dequantize_linear, ignored=("output_dtype",))(o)
    dtype = o.attribute("output_dtype", 0)
    return o.converted(result.text, dtype) if dtype and dtype != o.dtype(1) else result


def _fused_matmul(o: Operation) -> Written:
    if o.attribute("transBatchA", 0) or o.attribute("transBatchB", 0):
        raise UnwrittenError("it transposes batches")
    turned = [".mT" if o.attribute(name, 0) else "" for name in ("transA", "transB")]
    alpha = o.attribute("alpha", 1.0)
    text = f"{o.x(0, ATOM)}{turned[0]} @ {o.x(1, ATOM)}{turned[1]}"
    return E(text if alpha == 1 else f"({text}) * {literal(alpha)}", PRODUCT)


def _fused_conv(o: Operation) -> Written:
    inputs = [Text(o.x(i)) for i in range(3)]
    result = called(f.conv, inputs=inputs, ignored=("activation", "activation_params"))(o)
    assert isinstance(result, Expression)
    text = f"{result.text} + {o.x(3, SUM + 1)}" if o.has(3) else result.text
    numbers = [literal(number) for number in o.attribute("activation_params") or []]
    names = {"": "", "Relu": "torch.relu", "Sigmoid": "torch.sigmoid", "Tanh": "torch.tanh", "Clip": "torch.clamp",
             "LeakyRelu": "F.leaky_relu"}  # fmt: skip
    if o.attribute("activation", "") not in names:
        raise UnwrittenError(f"its activation is {o.attribute('activation')}")
    return E(f"{names[o.attribute('activation', '')]}({', '.join([text, *numbers])})")


def _gelu_of_sum(approximate: str) -> Writer:
    return lambda o: E(f"F.gelu({o.x(0, SUM)}{f' + {o.x(1, SUM + 1)}' if o.has(1) else ''}{approximate})")


def _cross_entropy(o: Operation) -> Written:
    if o.outputs_used() > 1:
        raise UnwrittenError("its second output is used")
    name = "cross_entropy" if o.node.op_type == "SoftmaxCrossEntropyLoss" else "nll_loss"
    how = f"ignore_index={o.attribute('ignore_index', -100)}, reduction={o.attribute('reduction', 'mean')!a}"
    return E(f"F.{name}({o.x()}, {o.x(1)}, {o.x(2)}, {how})")


def _dot_product_attention(o: Operation) -> Written:
    mask = f", {o.x(3)}" if o.has(3) else ""
    scale = f", scale={literal(o.attribute('scale'))}" if o.attribute("scale") else ""
    return E(f"F.scaled_dot_product_attention({o.x()}, {o.x(1)}, {o.x(2)}{mask}{scale})")


_STANDARD: dict[str, Writer] = {
    "SoftmaxCrossEntropyLoss": _cross_entropy, "NegativeLogLikelihoodLoss": _cross_entropy,
    "Conv": called(f.conv), "ConvTranspose": called(f.conv_transpose), "MaxPool": _max_pool,
    "AveragePool": called(f.average_pool), "LpPool": called(f.lp_pool), "GlobalAveragePool": _global("mean"),
    "GlobalMaxPool": _global("amax"), "LRN": called(f.lrn), "BatchNormalization": _batch_norm,
    "InstanceNormalization": called(f.instance_norm), "LayerNormalization": _layer_norm,
    "RMSNormalization": called(f.rms_norm), "GroupNormalization": _group_norm,
    "RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent, "Attention": called(f.attention, count=4),
    "RotaryEmbedding": called(f.rotary_embedding),
    "DequantizeLinear": _dequantize,
    "QuantizeLinear": _quantize, "DynamicQuantizeLinear": called(q.dynamic_quantize, count=3),
    "MatMulInteger": called(q.matmul_integer), "ConvInteger": called(q.conv_integer),
    "QLinearMatMul": called(q.qlinear_matmul), "QLinearConv": called(q.qlinear_conv),
    "SimplifiedLayerNormalization": called(f.rms_norm),  # ONNX Runtime puts it into the standard's domain
}  # fmt: skip
_MICROSOFT: dict[str, Writer] = {
    "DequantizeLinear": _STANDARD["DequantizeLinear"], "QuantizeLinear": _quantize, "FusedMatMul": _fused_matmul,
    "MatMulNBits": called(q.matmul_n_bits), "SkipLayerNormalization": called(q.skip_layer_norm, count=4),
    "SkipSimplifiedLayerNormalization": called(q.skip_rms_norm, count=4), "RotaryEmbedding": _rotary,
    "SimplifiedLayerNormalization": called(f.rms_norm), "Attention": called(q.packed_attention, count=2),
    "MultiHeadAttention": called(q.multi_head_attention, count=3), "FusedConv": _fused_conv,
    "GroupQueryAttention": called(q.group_query_attention, count=3),
    "EmbedLayerNormalization": called(q.embed_layer_norm, count=3, ignored=("mask_index_type",)),
    "BiasGelu": _gelu_of_sum(""), "Gelu": _gelu_of_sum(""), "FastGelu": _gelu_of_sum(", approximate='tanh'"),
    "QuickGelu": text("{a} * torch.sigmoid({alpha} * {a})", PRODUCT, alpha=1.702),
}  # fmt: skip

OPERATORS: dict[tuple[str, str], Writer] = {
    **{("", name): writer for name, writer in {**TENSOR_OPERATORS, **_STANDARD}.items()},
    (DOMAIN, OPERATOR): _dot_product_attention,
    **{("com.microsoft", name): writer for name, writer in _MICROSOFT.items()},
}
"""Domain and name of each operator to what writes it."""
