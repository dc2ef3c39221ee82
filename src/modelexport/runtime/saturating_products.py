"""Integer products that ONNX Runtime computes wrong on x86-64 processors without VNNI, found from the weights alone.

Its kernels multiply uint8 activations with int8 weights two at a time, and add the two products in 16 bits, which
saturate. Processors with VNNI (AVX512-VNNI, AVX-VNNI) add them in 32 bits. Measured with onnxruntime 1.31.1 on a
processor with AVX2:

- The pairs are the weights 0 and 1, 2 and 3, ... along the axis that is summed over; in a convolution this is each
  place of its window, and in it each input channel. A pair saturates if the weights have one sign and their sum is
  above 128 or below -128: 255 * 129 is more than 32,767.
- ``ConvInteger``, convolutions by channel (depthwise), int8 weights that are the first factor, and ``MatMulNBits``
  compute the right numbers, and so do uint8 weights and int8 activations.
- ``DequantizeLinear`` around ``MatMul``, ``Gemm`` and ``Conv`` is fused into such a kernel (from the level
  ``extended`` on): the last only if its result, or that of a ``Relu`` after it, is quantized again.

Weights as uint8 with a zero point that is larger by 128 mean the same numbers: :func:`make_unsigned`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.text import first_few, percent_text
from modelexport.files.map_types import model_of
from modelexport.files.protobuf_writing import to_proto
from modelexport.graph.copies import copy_of
from modelexport.graph.missing_types import infer_shapes
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import nodes_of
from modelexport.graph.unique_names import free_name, names_in
from modelexport.graph.weighted_operators import summed_axis
from modelexport.runtime import CPU

_SMALLEST, _LARGEST = -(2**15), 2**15 - 1
_ACTIVATION = 2**8 - 1
_OFFSET = 2**7


class _Places(NamedTuple):
    """Positions of the inputs of an operator."""

    activations_zero: int | None
    """The zero point of the activations, which has their type; ``None`` if the operator quantizes them to uint8."""
    weight: int
    weight_zero: int


_OPERATORS: Mapping[str, Sequence[_Places]] = {
    "MatMulInteger": [_Places(2, 1, 3)],
    "MatMulIntegerToFloat": [_Places(4, 1, 5)],
    "DynamicQuantizeMatMul": [_Places(None, 1, 3)],
    "QLinearMatMul": [_Places(2, 3, 5)],
    "QLinearConv": [_Places(2, 3, 5)],
    "QGemm": [_Places(2, 3, 5)],
    "QAttention": [_Places(6, 1, 7)],
    "DynamicQuantizeLSTM": [_Places(None, 1, 9), _Places(None, 2, 11)],
}
"""Operators of integers to the places of their activations and weights."""
_IN_8_BITS = (None, ir.DataType.INT8, ir.DataType.UINT8)
_FUSED = ("MatMul", "Gemm", "Conv")
"""Operators that ONNX Runtime fuses with the nodes that dequantize their inputs."""


_PASSED = ("Dropout", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that ONNX Runtime moves dequantizing nodes past, or removes. Not every one that only moves elements is."""


_Stored = tuple[ir.Value, str, tuple[int, ...]]
"""A value, what is added to its name, and the shape of what is stored."""


class _Product(NamedTuple):
    """A product of activations with constant int8 weights."""

    node: ir.Node
    """The node that takes the weight and its zero point: the operator, or what dequantizes its weight."""
    weight: int
    zero: int
    orders: Sequence[Sequence[int] | None] = ()
    """The orders of axes in which a weight is transposed after it was dequantized."""

    @property
    def codes(self) -> Any:
        """The weight as the operator takes it."""
        codes = _codes(self.node.inputs[self.weight])
        for order in self.orders:
            codes = np.transpose(codes, order)
        return codes


def saturating(nodes: Iterable[ir.Node]) -> dict[ir.Node, float]:
    """The nodes whose products can saturate, each to the share of the pairs of its weights that can."""
    shares = {node: max((_share(node, p.codes) for p in _products(node)), default=0.0) for node in nodes}
    return {node: share for node, share in shares.items() if share}


def saturating_modules(nodes: Iterable[ir.Node]) -> dict[str, float]:
    """The addresses of the calls that own nodes whose products can saturate, to the largest share of such pairs."""
    modules: dict[str, float] = {}
    for node, share in saturating(nodes).items():
        owner = owner_of(node)
        for address in [str(call) for call in owner.calls] if owner is not None else ["the model"]:
            modules[address] = max(share, modules.get(address, 0.0))
    return modules


def saturates_here() -> bool:
    """Whether this processor's products saturate: it has no VNNI."""
    import onnxruntime  # loading a file to look at its weights does not need it

    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [value("x", onnx.TensorProto.UINT8, [1, 2])],
        [value("y", onnx.TensorProto.INT32, [1, 1])],
        [onnx.numpy_helper.from_array(np.full((2, 1), _OFFSET - 1, np.int8), "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[CPU])
    (product,) = session.run(None, {"x": np.full((1, 2), _ACTIVATION, np.uint8)})
    return bool(product[0, 0] != 2 * _ACTIVATION * (_OFFSET - 1))


def saturation_notes(nodes: Iterable[ir.Node], path: str | Path) -> list[str]:
    """A line about the modules of a file whose products can saturate, if there are any."""
    return format_saturation(saturating_modules(nodes), path)


def format_saturation(modules: Mapping[str, float], path: str | Path) -> list[str]:
    """What :func:`saturating_modules` found in a file, as a line; none if it found nothing."""
    if not modules:
        return []
    those = "this module" if len(modules) == 1 else f"these {len(modules):,} modules"
    share = percent_text(max(modules.values()))
    return [
        f"{path}: on x86-64 processors without VNNI the int8 products of {those} saturate (up to {share} of their "
        f"pairs of weights): {first_few([name or '.' for name in modules], 3)}; "
        f"`modelexport quantize {path} -o OUT.onnx --to uint8` avoids it"
    ]


def unsigned_copy(model: ir.Model) -> ir.Model | None:
    """A copy of a model changed by :func:`make_unsigned`; ``None`` if nothing in it can saturate."""
    if not saturating(nodes_of(model.graph)):
        return None
    copy = copy_of(model)
    make_unsigned(copy)
    return copy


def make_unsigned(model: ir.Model, nodes: Collection[ir.Node] | None = None) -> bool:
    """Store int8 weights whose products can saturate as uint8, in place; returns whether there were any.

    They mean the same numbers, and the products are exact on every processor.

    Args:
        nodes: Only those of these nodes.
    """
    made, taken = dict[_Stored, ir.Value](), names_in(model)
    products = [p for node in saturating(nodes_of(model.graph) if nodes is None else nodes) for p in _products(node)]
    if any(_input(product.node, product.zero) is None and _zeros_of(product.node) is None for product in products):
        infer_shapes(model)
    for product in products:  # all of a node: an LSTM takes weights of one type
        if _input(product.node, product.zero) is not None or _zeros_of(product.node) is not None:
            _shift(model.graph, product, made, taken)
    return bool(made)


def without_saturation(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model changed by :func:`make_unsigned`; itself if no product can saturate."""
    made = model_of(model)
    return to_proto(made, {}) if make_unsigned(made) else model


def unsigned_inputs(node: onnx.NodeProto, arrays: Sequence[Any]) -> tuple[onnx.NodeProto, list[Any]]:
    """A node and its inputs, with int8 weights as uint8 where its products could saturate; they mean the same."""
    changed, shifted = onnx.NodeProto.FromString(node.SerializeToString()), list(arrays)
    for places in _OPERATORS.get(node.op_type, ()):
        zero = places.activations_zero
        signed = zero is not None and (_is_signed(shifted, zero) or _is_signed(shifted, 0))
        if _is_signed(shifted, places.weight) and not signed:
            shifted += [None] * (places.weight_zero + 1 - len(shifted))
            changed.input.extend([""] * (len(shifted) - len(changed.input)))
            changed.input[places.weight_zero] = changed.input[places.weight_zero] or f"zero of {places.weight}"
            zeros = shifted[places.weight_zero]
            shifted[places.weight_zero] = _unsigned(np.zeros((), np.int8) if zeros is None else zeros)
            shifted[places.weight] = _unsigned(shifted[places.weight])
    return changed, shifted


def _is_signed(arrays: Sequence[Any], place: int) -> bool:
    return place < len(arrays) and getattr(arrays[place], "dtype", None) == np.int8


def _unsigned(codes: Any) -> Any:
    return np.array(codes, order="C").view(np.uint8) ^ np.uint8(_OFFSET)


def _share(node: ir.Node, codes: Any) -> float:
    """The share of neighbouring pairs of the weights of a node whose products can saturate."""
    if node.op_type in ("QLinearConv", "Conv"):
        if codes.shape[1] == 1 and len(codes) == node.attributes.get_int("group", 1):
            return 0.0  # by channel
        rows = np.moveaxis(codes, 1, -1).reshape(len(codes), -1).T
    else:
        axis = summed_axis(node)
        rows = np.moveaxis(codes, axis, 0).reshape(codes.shape[axis], -1)
    count = len(rows) // 2 * 2
    first, second = rows[:count:2].astype(np.int16), rows[1:count:2].astype(np.int16)
    above = np.maximum(first, 0) + np.maximum(second, 0) > _LARGEST // _ACTIVATION
    below = np.minimum(first, 0) + np.minimum(second, 0) < -(-_SMALLEST // _ACTIVATION)
    return float(np.mean(above | below)) if above.size else 0.0


def _products(node: ir.Node) -> Iterator[_Product]:
    """The products of a node with constant int8 weights, if its kernel may add in 16 bits."""
    found = []
    for places in _OPERATORS.get(node.op_type, ()):
        zero = places.activations_zero
        types = (_type(_input(node, zero)), _type(_input(node, 0))) if zero is not None else ()
        if ir.DataType.INT8 not in types:
            found.append(_Product(node, places.weight, places.weight_zero))
    if node.op_type in _FUSED and not node.domain and _is_fused(node):
        activations, weight = node.inputs[:2]
        while activations is not None and (maker := activations.producer()) and maker.op_type in _PASSED:
            activations = maker.inputs[0]
        orders, weight = _transposed(weight)
        source, dequantizer = _dequantizer(activations), _dequantizer(weight)
        in_8_bits = source is not None and _type(source.inputs[0]) in _IN_8_BITS and not _is_in_7_bits(source.inputs[0])
        if in_8_bits and dequantizer is not None:
            found.append(_Product(dequantizer, 0, 2, orders))
    return (product for product in found if _is_int8(_input(product.node, product.weight)))


def _is_in_7_bits(value: ir.Value | None) -> bool:
    """Whether integers are clipped to 127 at most, as training with a reduced range does: their products fit."""
    maker = value.producer() if value is not None else None
    most = _tensor(_input(maker, 2)) if maker is not None and maker.op_type == "Clip" else None
    return most is not None and int(most.numpy()) <= _ACTIVATION // 2


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _transposed(value: ir.Value | None) -> tuple[list[Sequence[int] | None], ir.Value | None]:
    """The orders of axes in which a value is transposed, the first one first, and what it was before."""
    orders: list[Sequence[int] | None] = []
    while value is not None and (maker := value.producer()) and maker.op_type == "Transpose":
        orders.insert(0, maker.attributes.get_ints("perm", None))
        value = maker.inputs[0]
    return orders, value


def _tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    return ir.convenience.get_const_tensor(value) if value is not None else None


def _codes(value: ir.Value | None) -> Any:
    """The array of a constant, or of a transposed one; ``None`` of any other value."""
    orders, value = _transposed(value)
    codes: Any = tensor.numpy() if (tensor := _tensor(value)) is not None else None
    for order in orders if codes is not None else ():
        codes = np.transpose(codes, order)
    return codes


def _is_int8(value: ir.Value | None) -> bool:
    tensor = _tensor(_transposed(value)[1])
    return tensor is not None and tensor.dtype is ir.DataType.INT8 and len(tensor.shape) > 1


def _type(value: ir.Value | None) -> ir.DataType | None:
    """The element type of a value; ``None`` if the file does not tell."""
    if value is None or value.dtype is not None:
        return value.dtype if value is not None else None
    maker = value.producer()
    return _type(_input(maker, 2)) if maker is not None and maker.op_type == "QuantizeLinear" else None


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The node that dequantizes a value, with one scale or one for each channel."""
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "DequantizeLinear" or maker.attributes.get_int("block_size", 0) != 0:
        return None
    return maker


def _is_fused(node: ir.Node) -> bool:
    """Whether ONNX Runtime fuses a node with the nodes that dequantize its inputs."""
    users = list(node.outputs[0].consumers())
    if node.op_type == "Conv" and len(users) == 1 and users[0].op_type == "Relu":
        users = list(users[0].outputs[0].consumers())
    if len(users) == 1 and users[0].op_type == "QuantizeLinear":
        return True
    bias = _input(node, 2) if node.op_type == "Gemm" else None
    return node.op_type != "Conv" and (bias is None or _dequantizer(bias) is not None)


def _shift(graph: ir.Graph, product: _Product, made: dict[_Stored, ir.Value], taken: set[str | None]) -> None:
    """Let a node take a uint8 weight and its zero point instead of an int8 weight."""
    node, weight = product.node, product.node.inputs[product.weight]
    assert weight is not None
    for place in (product.weight, product.zero):
        before = _input(node, place)
        codes = _zeros_of(node) if before is None else _codes(before)
        if codes is None or codes.dtype != np.int8:
            continue  # another product of this node has it
        key = (weight, "zero.", codes.shape) if before is None else (before, "", codes.shape)
        if key not in made:
            name = free_name(f"{key[0].name}.{key[1]}uint8", taken)
            made[key] = value = ir.val(name, const_value=ir.tensor(_unsigned(codes), name=name))
            value.meta.update(before.meta if before is not None else {})
            graph.register_initializer(value)
        node.resize_inputs(max(len(node.inputs), place + 1))
        node.replace_input_with(place, made[key])
        _drop(before, made[key])


def _zeros_of(node: ir.Node) -> Any:
    """The zero points of a node that takes none: those of a scale have its shape; ``None`` if it is not known."""
    scale = node.inputs[1] if node.op_type == "DequantizeLinear" else None
    if scale is None:
        return np.zeros((), np.int8)
    shape = tensor.shape if (tensor := _tensor(scale)) is not None else scale.shape
    sizes = list(shape) if shape is not None else [None]
    return np.zeros(sizes, np.int8) if all(isinstance(size, int) for size in sizes) else None


def _drop(unused: ir.Value | None, instead: ir.Value) -> None:
    """Remove an initializer that nothing uses any more; what is used instead gets its name."""
    if unused is None or unused.graph is None or unused.uses() or unused.is_graph_output() or unused.is_graph_input():
        return
    if unused.producer() is None:
        same_graph, name = unused.graph is instead.graph, unused.name or ""
        unused.graph.initializers.pop(name)
        instead.name = name if same_graph else instead.name
