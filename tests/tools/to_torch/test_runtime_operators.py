"""Operators of ONNX Runtime's own compute what it does, and gradients are those of the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

from modelexport import to_torch
from modelexport.tools.to_torch.layer_operators import OPERATORS

GENERATOR = np.random.default_rng(0)


def numbers(*shape: int) -> Any:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def lengths(*values: int) -> Any:
    return np.array(values, np.int32)


HIDDEN, PAST, ANGLES = numbers(2, 5, 16), numbers(2, 2, 3, 8), numbers(32, 8)
KEYS, VALUES = numbers(2, 2, 3, 16), numbers(2, 2, 3, 16)
CODES = GENERATOR.integers(0, 256, (6, 2, 8)).astype(np.uint8)
BYTES, POINTS = GENERATOR.integers(0, 256, (2, 3, 8, 8)).astype(np.uint8), np.uint8(120)
# the operator, its inputs, its attributes, and how many outputs are compared
CASES: dict[str, tuple[str, list[Any], dict[str, Any], int]] = {
    "MatMulNBits": (
        "MatMulNBits", [numbers(2, 32), CODES, numbers(12)], {"K": 32, "N": 6, "bits": 4, "block_size": 16}, 1),
    "MatMulNBits with zeros": (
        "MatMulNBits", [numbers(2, 32), CODES, numbers(12), GENERATOR.integers(0, 256, 6).astype(np.uint8)],
        {"K": 32, "N": 6, "bits": 4, "block_size": 16}, 1),
    "MatMulNBits of bytes": (
        "MatMulNBits", [numbers(2, 32), np.concatenate([CODES, CODES], 2), numbers(12)],
        {"K": 32, "N": 6, "bits": 8, "block_size": 16}, 1),
    "SkipLayerNormalization": (
        "SkipLayerNormalization", [HIDDEN, HIDDEN[::-1], numbers(16), numbers(16), numbers(16)], {"epsilon": 1e-5}, 1),
    "SkipSimplifiedLayerNormalization": (
        "SkipSimplifiedLayerNormalization", [HIDDEN, HIDDEN[::-1], numbers(16), numbers(16)], {"epsilon": 1e-5}, 1),
    "GroupQueryAttention": (
        "GroupQueryAttention",
        [numbers(2, 5, 32), HIDDEN, HIDDEN[::-1], None, None, lengths(4, 4), np.int32(5)],
        {"num_heads": 2, "kv_num_heads": 1}, 3),
    "GroupQueryAttention, turned and packed, with a past and a window": (
        "GroupQueryAttention",
        [numbers(2, 1, 96), None, None, KEYS, VALUES, lengths(3, 3), np.int32(4), ANGLES, ANGLES],
        {"num_heads": 2, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 2, "rotary_interleaved": 1}, 3),
    "MultiHeadAttention": (
        "MultiHeadAttention", [HIDDEN, HIDDEN, HIDDEN, numbers(48), lengths(3, 5)], {"num_heads": 2}, 1),
    "MultiHeadAttention with a past": (
        "MultiHeadAttention", [HIDDEN, HIDDEN, HIDDEN, None, None, numbers(2, 2, 5, 8), PAST, PAST[::-1]],
        {"num_heads": 2, "scale": 0.3}, 3),
    "Attention": (
        "Attention", [HIDDEN, numbers(16, 48), numbers(48), lengths(5, 3)], {"num_heads": 2, "unidirectional": 1}, 1),
    "EmbedLayerNormalization": (
        "EmbedLayerNormalization",
        [lengths(1, 2, 3, 4).reshape(2, 2), lengths(0, 0, 1, 1).reshape(2, 2), numbers(9, 8), numbers(4, 8),
         numbers(2, 8), numbers(8), numbers(8)], {"epsilon": 1e-5}, 2),
    "RotaryEmbedding": (
        "RotaryEmbedding", [numbers(2, 2, 5, 8), np.arange(10).reshape(2, 5), ANGLES[:, :4], ANGLES[:, 4:]], {}, 1),
    "FusedMatMul": ("FusedMatMul", [numbers(2, 3, 4), numbers(2, 5, 4)], {"transB": 1, "alpha": 0.5}, 1),
    "FusedConv": ("FusedConv", [numbers(1, 3, 8, 8), numbers(4, 3, 3, 3), numbers(4)], {"activation": "Relu"}, 1),
    "BiasGelu": ("BiasGelu", [HIDDEN, numbers(16)], {}, 1), "QuickGelu": ("QuickGelu", [HIDDEN], {"alpha": 1.5}, 1),
    "FastGelu": ("FastGelu", [HIDDEN, numbers(16)], {}, 1),
    "QuantizeLinear": ("QuantizeLinear", [HIDDEN, np.float32(0.02), POINTS], {}, 1),
    "DequantizeLinear": ("DequantizeLinear", [BYTES, numbers(3), np.full(3, 9, np.uint8)], {"axis": 1}, 1),
    "ConvInteger": (".ConvInteger", [BYTES, BYTES[:, :, :3, :3], POINTS, POINTS], {"pads": [1, 1, 1, 1]}, 1),
    "MatMulInteger": (".MatMulInteger", [BYTES, BYTES[::-1], POINTS, POINTS], {}, 1),
    "QLinearMatMul": (
        ".QLinearMatMul", [BYTES, np.float32(0.02), POINTS, BYTES[::-1], np.float32(0.03), POINTS,
                           np.float32(0.5), POINTS],
        {}, 1),
    "QLinearConv": (
        ".QLinearConv", [BYTES, np.float32(0.02), POINTS, BYTES[:, :, :3, :3], np.full(2, 0.03, np.float32),
                         np.full(2, 120, np.uint8), np.float32(0.5), POINTS, lengths(100, -100)],
        {"strides": [2, 2]}, 1),
    "DynamicQuantizeLinear": (".DynamicQuantizeLinear", [HIDDEN], {}, 3),
    "DynamicQuantizeLSTM": (
        "DynamicQuantizeLSTM",
        [numbers(1, 1, 4), *(GENERATOR.integers(90, 160, (2, size, 12)).astype(np.uint8) for size in (4, 3)),
         numbers(2, 24), None, numbers(2, 1, 3), numbers(2, 1, 3), None, np.full(2, 0.02, np.float32),
         np.full(2, 120, np.uint8), np.full(2, 0.01, np.float32), np.full(2, 128, np.uint8)],
        {"hidden_size": 3, "direction": "bidirectional"}, 3),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_the_runtime_does(name: str, tmp_path: Any) -> None:
    """The first operand is an input, the others are in the file."""
    operator, arrays, attributes, count = CASES[name]
    domain, kind = ("", operator[1:]) if operator.startswith(".") else ("com.microsoft", operator)
    assert (domain, kind) in OPERATORS
    names = ["" if array is None else f"i{place}" for place, array in enumerate(arrays)]
    outputs = [f"o{place}" for place in range(count)]
    node = helper.make_node(kind, names, outputs, domain=domain, **attributes)
    first = np.asarray(arrays[0])
    given = helper.make_tensor_value_info("i0", helper.np_dtype_to_tensor_dtype(first.dtype), first.shape)
    weights = [numpy_helper.from_array(np.ascontiguousarray(array), key)
               for key, array in zip(names[1:], arrays[1:], strict=True) if array is not None]  # fmt: skip
    results = [onnx.ValueInfoProto(name=key) for key in outputs]
    graph = helper.make_graph([node], "g", [given], results, weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "x.onnx")
    expected = onnxruntime.InferenceSession(tmp_path / "x.onnx").run(None, {"i0": first})
    with torch.no_grad():
        found = to_torch(tmp_path / "x.onnx")(torch.tensor(first))
    for right, tensor in zip(expected, found.values(), strict=True):
        np.testing.assert_allclose(tensor.detach().numpy(), right, rtol=1e-4, atol=1e-4)


WEIGHT, ROW, IMAGE = numbers(6, 6), numbers(6), numbers(4, 6, 3)
LEARNS: dict[str, list[Any]] = {
    **{name: [] for name in ("Sigmoid", "Tanh", "Erf", "Exp", "Sin", "Softplus", "Softsign", "Mish", "Gelu", "Elu",
                             "Celu", "Selu", "Softmax", "LogSoftmax", "ReduceMean", "ReduceLogSumExp", "ReduceL2",
                             "Neg", "Transpose", "GlobalAveragePool")},
    "Add": [ROW], "Mul": [ROW], "Div": [ROW], "MatMul": [WEIGHT],
    "Gemm": [WEIGHT, ROW], "LayerNormalization": [ROW, ROW],
    "InstanceNormalization": [ROW[:3], ROW[3:]], "BatchNormalization": [ROW[:3], ROW[:3], ROW[:3], ROW[:3] ** 2],
    "Where": [ROW], "Conv": [numbers(4, 3, 3), ROW[:4]], "ConvTranspose": [numbers(3, 2, 3)],
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("operator", LEARNS)
def test_gradients_are_right(operator: str) -> None:
    """Of the input and of every entry, against differences in float64."""
    flat = operator in ("Gemm", "Where")
    x = numbers(2, 6) if flat else numbers(2, 3, 6)
    names = [f"w{place}" for place in range(len(LEARNS[operator]))]
    inputs = ["seen", "x", *names] if operator == "Where" else ["x", *names]
    weights = [numpy_helper.from_array(array, name) for name, array in zip(names, LEARNS[operator], strict=True)]
    weights += [numpy_helper.from_array(ROW > 0, "seen")] if operator == "Where" else []
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, ["output"])], "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)], [onnx.ValueInfoProto(name="output")],
        weights,
    )  # fmt: skip
    model = to_torch(
        ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)),
        dtype="float64",
    )
    given = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    entries = dict(model.named_parameters())

    def computed(given: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        found = torch.func.functional_call(model, dict(zip(entries, values, strict=True)), (given,))
        return found if isinstance(found, torch.Tensor) else next(iter(found.values()))

    assert torch.autograd.gradcheck(computed, (given, *entries.values()))
