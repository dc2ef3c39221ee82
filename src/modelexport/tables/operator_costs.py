"""The work of a node: multiply-adds and floating-point operations, by its operator and the shapes of its values.

A multiply-add counts as two operations. Arithmetic and activations count as one operation for each element of the
output, reductions as one for each element of the input, and composite operators (softmax, normalization) as many as
their definition has. Moving and reshaping data is not counted. Operators of ONNX Runtime's optimizer are counted like
those that they replace.

To add an operator, add its name to one of the lists, or a rule to ``_RULES``, which returns its multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import onnx_ir as ir

from modelexport.graph.operator_kinds import CASTS, POOLS, READ_SIZES_ONLY, RECURRENT, SELECTS_ELEMENTS
from modelexport.graph.weighted_operators import WEIGHTED, row_of
from modelexport.runtime.shapes import Shapes, elements

Shape = tuple[int, ...]


class Work(NamedTuple):
    """The work of one node in one run."""

    macs: int
    """Multiply-adds of matrix multiplications and convolutions."""
    flops: int
    """All operations, two for a multiply-add."""


def words(text: str) -> list[str]:
    """The words of a text: a readable way to write a long list of operators."""
    return text.split()


WITHOUT_ARITHMETIC = (SELECTS_ELEMENTS | CASTS | READ_SIZES_ONLY).union(
    words("""
    ConcatFromSequence Constant ConstantOfShape EmbedLayerNormalization EyeLike GatherBlockQuantized If Loop
    MemcpyFromHost MemcpyToHost NonZero OneHot Pad Range ReorderInput ReorderOutput Scan Scatter ScatterElements
    ScatterND SequenceAt SequenceConstruct SequenceEmpty SequenceInsert SplitToSequence Trilu Where Unique TopK
    """)
)
"""Operators that move or select data, or that have nested graphs, whose nodes are counted themselves."""

ELEMENTWISE = frozenset(
    words("""
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Clip Cos
    Cosh Div Elu Equal Erf Exp FastGelu Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu
    Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow QuickGelu Reciprocal Relu Round Selu Shrink
    Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Xor Swish BiasAdd BiasGelu
    BiasSplitGelu QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu Dropout BiasDropout CumSum DequantizeLinear
    QuantizeLinear DynamicQuantizeLinear RotaryEmbedding
    """)
)

REDUCTIONS = frozenset(
    words("""
    ArgMax ArgMin GlobalAveragePool GlobalLpPool GlobalMaxPool QLinearGlobalAveragePool ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
    """)
)

COMPOSITES = {
    "Softmax": 5,
    "LogSoftmax": 6,
    "Hardmax": 2,
    "BatchNormalization": 4,
    "LayerNormalization": 7,
    "SkipLayerNormalization": 8,
    "SimplifiedLayerNormalization": 4,
    "SkipSimplifiedLayerNormalization": 5,
    "RMSNormalization": 4,
    "InstanceNormalization": 7,
    "GroupNormalization": 7,
    "GroupNorm": 7,
    "SkipGroupNorm": 8,
    "LpNormalization": 4,
    "MeanVarianceNormalization": 6,
    "LRN": 5,
    "BiasSoftmax": 6,
    "QLinearSoftmax": 5,
}
"""Operations for each element of the first output."""


def work_of(node: ir.Node, shapes: Shapes) -> Work | None:
    """What a node computes; ``None`` for an operator without a rule, or where a shape that it needs is not known."""
    try:
        return _work_of(node, shapes)
    except (LookupError, TypeError, ValueError, ArithmeticError):  # its inputs or attributes are not the operator's
        return None


def _work_of(node: ir.Node, shapes: Shapes) -> Work | None:
    rule = _RULES.get(node.op_type)
    out = shapes.of(node.outputs[0]) if node.outputs else ()
    if rule is not None:
        ins = [shapes.of(value) for value in node.inputs]
        if out is None or not ins or ins[0] is None:
            return None
        kept = node.outputs[1:2] if rule in _READ_CACHE else ()  # with the past, if there is one
        totals = [shape[-2] for value in kept if (shape := shapes.of(value)) is not None]
        if node.op_type == "GroupQueryAttention" and len(node.inputs) > 6 and node.inputs[6] is not None:
            total = ir.convenience.get_const_tensor(node.inputs[6])  # fewer than the cache has places, if it is static
            totals = totals if total is None else [int(total.numpy().item())]
        macs = rule(node, ins, out, *totals)
        return None if macs is None else Work(macs, 2 * macs + _added(node, out))
    if node.op_type in WITHOUT_ARITHMETIC:
        return Work(0, 0)
    factor: int | None
    if node.op_type in REDUCTIONS:
        factor, out = 1, shapes.of(node.inputs[0])
    elif node.op_type in POOLS | {"QLinearAveragePool"}:
        factor = elements(node.attributes.get_ints("kernel_shape", ()))
    elif node.op_type == "Resize":
        factor = 0 if node.attributes.get_string("mode", "nearest") == "nearest" else 8
    else:
        factor = 1 if node.op_type in ELEMENTWISE else COMPOSITES.get(node.op_type)
    return None if out is None or factor is None else Work(0, factor * elements(out))


def _matmul(node: ir.Node, ins: list[Shape | None], out: Shape) -> int | None:
    first = ins[0]
    assert first is not None
    inner = first[-2] if node.attributes.get_int("transA", 0) and len(first) > 1 else first[-1]
    return elements(out) * inner if first else None


def _conv(node: ir.Node, ins: list[Shape | None], out: Shape) -> int | None:
    weight = ins[3] if node.op_type == "QLinearConv" else ins[1]
    if weight is None:
        return None
    # The weight is (out, in / groups, *kernel); each output element uses all axes except the first.
    return elements(out) * elements(weight[1:])


def _conv_transpose(node: ir.Node, ins: list[Shape | None], out: Shape) -> int | None:
    before, weight = ins[0], ins[1]
    if before is None or weight is None:
        return None
    # The weight is (in, out / groups, *kernel); each input element is multiplied with all axes except the first.
    return elements(before) * elements(weight[1:])


def _einsum(node: ir.Node, ins: list[Shape | None], out: Shape) -> int | None:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if "." in equation or any(shape is None for shape in ins):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, ins, strict=True):
        sizes.update(zip(term, shape or (), strict=True))
    return elements(sizes.values()) if len(terms) > 1 else 0


def _recurrent(node: ir.Node, ins: list[Shape | None], out: Shape) -> int | None:
    steps, weights, states = ins[0], ins[1], ins[2]
    if steps is None or weights is None or states is None:
        return None
    # Both weights are (directions, gates * hidden, inputs): each is used in each step for each row of the batch.
    return steps[0] * steps[1] * (elements(weights) + elements(states))


def _attention(node: ir.Node, ins: list[Shape | None], out: Shape, total: int = 0) -> int | None:
    """``MultiHeadAttention``, ``GroupQueryAttention`` and ONNX's ``Attention``: separate queries, keys and values.

    Args:
        total: How many keys there are with those of the past; those that it takes, if it has no past.
    """
    query, key, value = ins[0], ins[1] if len(ins) > 1 else None, ins[2] if len(ins) > 2 else None
    if query is None or key is None or value is None:
        return None
    if len(query) == 4:  # batch, heads, length, width of a head
        return elements(query[:3]) * (total or key[2]) * (query[3] + value[3])
    length = total or key[-2]
    width = out[-1]
    if len(key) == 4:
        width = query[-1]
    return query[0] * query[1] * length * (query[-1] + width)


def _packed_attention(node: ir.Node, ins: list[Shape | None], out: Shape, total: int = 0) -> int | None:
    """ONNX Runtime's ``Attention``, which projects one input to queries, keys and values itself."""
    first, weight = ins[0], ins[1] if len(ins) > 1 else None
    if first is None or weight is None or len(weight) != 2 or len(first) != 3:
        return _attention(node, ins, out, total)
    return elements(first) * weight[1] + first[0] * first[1] * (total or first[1]) * 2 * out[-1]


def _bits(node: ir.Node, ins: list[Shape | None], out: Shape) -> int | None:
    """``MatMulNBits``, whose weight is packed: its sizes are attributes."""
    return elements(out) * node.attributes.get_int("K", 0)


_READ_CACHE = (_attention, _packed_attention)
_RULES: Mapping[str, Callable[..., int | None]] = {
    **dict.fromkeys(
        words("""
        MatMul Gemm FusedMatMul FusedGemm FusedMatMulActivation MatMulInteger MatMulIntegerToFloat QLinearMatMul QGemm
        DynamicQuantizeMatMul GemmFloat8 TransposeMatMul
        """),
        _matmul,
    ),
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger", "QLinearConv", "NhwcConv", "NhwcFusedConv"), _conv),
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    **dict.fromkeys(RECURRENT | {"DynamicQuantizeLSTM"}, _recurrent),
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention"), _attention),
    **dict.fromkeys(("Attention", "QAttention"), _packed_attention),
    "MatMulNBits": _bits,
}


def _added(node: ir.Node, out: Shape) -> int:
    """Operations besides the multiply-adds: one for each output element if there is a bias or activation."""
    row = row_of(node) or WEIGHTED.get(("", node.op_type.removeprefix("Nhwc").removeprefix("Fused")))
    index = row.bias if row is not None else None
    bias = index is not None and len(node.inputs) > index and node.inputs[index] is not None
    activation = node.op_type.startswith("Fused") and "activation" in node.attributes
    return elements(out) * (int(bias) + int(activation))
