"""Constant folding: onnxscript's for constants, and our own for values computed from parameters.

Parameters have no tensors while a graph is optimized, so that neither rewrites nor onnxscript's folding can depend on
their elements. This module folds values that are computed only from parameters, such as a transposed weight; the
result has no tensor in the graph either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from modelexport.capture.patches import replaced
from modelexport.graph.nodes import all_nodes, draws, nested_graphs
from modelexport.graph.operator_kinds import MOVES_ELEMENTS
from modelexport.regions.region import drop_unused
from modelexport.weights.entries_of_initializers import Computed
from modelexport.weights.packed import repacking as packed
from modelexport.weights.recorded_transforms import compute_planned, run_operator, since_version, tensor_attributes

_LARGEST_INPUT, _LARGEST_OUTPUT = 8_192, 512 * 512
"""Elements: the limits of onnxscript's folding, so that parameters are folded when the bare exporter folds them."""


class FoldConstants(ir.passes.InPlacePass):
    """onnxscript's constant folding, as a pass."""

    def __init__(self, may_fold: Callable[[ir.Node], bool]) -> None:
        super().__init__()
        self._may_fold = may_fold

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        with replaced({"inference": _where_unknown}):
            result = optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=self._should_fold)
        return ir.passes.PassResult(model, result.modified)

    def _should_fold(self, node: ir.Node) -> bool | None:
        """Do not fold a constant ``Resize``, whose evaluator works element by element in Python, and random numbers."""
        folds = node.op_identifier() != ("", "Resize", "") and not draws(node) and self._may_fold(node)
        return None if folds else False


def _where_unknown(infer: Callable[[Any, ir.Node], None]) -> Callable[[Any, ir.Node], None]:
    """The inference of a node's types and sizes, skipped for nodes of which all are known: it would not change them."""

    def infer_unknown(folding: Any, node: ir.Node) -> None:
        if any(value.type is None or value.shape is None or value.shape.is_dynamic() for value in node.outputs):
            infer(folding, node)

    return infer_unknown


def fold_packed(model: ir.Model, tensors: dict[ir.Value, ir.TensorProtocol]) -> None:
    """Replace the operators that unpack weights by initializers, each of which is computed when it is written.

    Args:
        tensors: The tensors of parameters. Those of the new initializers are added.
    """
    for node in [node for node in all_nodes(model) if node.domain == packed.DOMAIN]:
        inputs = [value for value in node.inputs if value is not None]
        output = node.outputs[0]
        tensor = _unpacked(node, [tensors[value] for value in inputs])
        folded = ir.Value(name=output.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
        tensors[folded] = tensor
        model.graph.initializers.add(folded)
        assert isinstance(node.graph, ir.Graph)
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], [], node.outputs, [folded])
    model.opset_imports.pop(packed.DOMAIN, None)


def _unpacked(node: ir.Node, inputs: Sequence[ir.TensorProtocol]) -> ir.TensorProtocol:
    """The result of an operator that unpacks a weight: the same bytes of a file, or computed on access."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    wanted = msgspec.convert(attributes, packed.Packing, strict=False)
    dtype, shape = packed.result_type(node.op_type, wanted)
    name, first = node.outputs[0].name, inputs[0]
    if isinstance(first, ir.ExternalTensor) and packed.is_unchanged(node.op_type, wanted, first.dtype):
        return ir.ExternalTensor(first.path, first.offset, first.length, dtype, shape=ir.Shape(shape), name=name or "")

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(packed.run(node.op_type, attributes, [tensor.numpy() for tensor in inputs]), dtype=dtype)

    return ir.LazyTensor(compute, dtype=dtype, shape=ir.Shape(shape), name=name)


def fold_quantized(model: ir.Model, tensors: dict[ir.Value, ir.TensorProtocol], computed: Computed) -> None:
    """Replace the integers of weights that a model quantizes itself by initializers, and their scales and zero points.

    Args:
        tensors: The tensors of parameters. Those of the new initializers are added.
    """
    values: dict[ir.Value, None] = {}
    for node in [node for node in model.graph if node.op_type in ("QuantizeLinear", "DequantizeLinear")]:
        values.update(dict.fromkeys(value for value in node.inputs[1:] if value is not None))
        integers = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if integers is not None and _is_quantized(integers):
            values[integers] = None
    entries = {key: tensor for value, tensor in tensors.items() for key in computed.names.get(value.name or "", ())}
    for value in values:
        maker = value.producer()
        plan = computed.plan_if_small(value.name or "") if maker is not None and computed.depends(value.name) else None
        if maker is None or plan is None:
            continue
        array = compute_planned(plan, {key: entries[key].numpy() for key in plan.inputs()})
        tensor = ir.tensor(array, name=value.name)
        folded = ir.Value(name=value.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
        tensors[folded] = tensor
        model.graph.initializers.add(folded)
        ir.convenience.replace_nodes_and_values(model.graph, maker, [maker], [], maker.outputs, [folded])
    if values:
        passes.RemoveUnusedNodesPass()(model)


def _is_quantized(value: ir.Value) -> bool:
    """Whether a value was rounded to integers, and perhaps clamped or moved after that."""
    node = value.producer()
    while node is not None and node.op_type in MOVES_ELEMENTS | {"Clip"} and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "QuantizeLinear"


class FoldParameters(ir.passes.InPlacePass):
    """Folds nodes whose inputs are parameters and constants.

    Args:
        tensors: The tensors of parameters, which are not in the graph. The results are added.
        may_fold: Whether a node with such inputs may be folded.
    """

    def __init__(self, tensors: dict[ir.Value, ir.TensorProtocol], may_fold: Callable[[ir.Node], bool]) -> None:
        super().__init__()
        self._tensors = tensors
        self._may_fold = may_fold

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for graph in model.graphs() for node in graph if not nested_graphs(node)]
        return ir.passes.PassResult(model, sum(self._fold(model, node) for node in nodes) > 0)

    def _fold(self, model: ir.Model, node: ir.Node) -> bool:
        inputs = [value for value in node.inputs if value is not None]
        output = node.outputs[0]
        if not any(value in self._tensors for value in inputs) or len(node.outputs) > 1:
            return False
        if any(value.is_graph_input() or self._tensor(value) is None for value in inputs):
            return False
        if output.name in model.graph.initializers or not self._is_small(node) or not self._may_fold(node):
            return False
        result = self._run(node, model.opset_imports)
        if result is None or not isinstance(node.graph, ir.Graph):
            return False
        tensor = ir.tensor(result, name=output.name)
        folded = ir.Value(name=output.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(result.shape))
        self._tensors[folded] = tensor
        model.graph.initializers.add(folded)
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], [], node.outputs, [folded])
        drop_unused(value for value in inputs if value.is_initializer())
        return True

    def _tensor(self, value: ir.Value | None) -> ir.TensorProtocol | None:
        return None if value is None else self._tensors.get(value, value.const_value)

    def _is_small(self, node: ir.Node) -> bool:
        """Whether no input is large, or the node transposes one that nothing else uses, which adds no bytes."""
        tensors = {value: self._tensor(value) for value in node.inputs if value is not None}
        large = [value for value, tensor in tensors.items() if tensor is not None and tensor.size > _LARGEST_INPUT]
        alone = node.op_identifier() == ("", "Transpose", "") and all(len(value.consumers()) == 1 for value in large)
        return not large or alone

    def _run(self, node: ir.Node, opsets: dict[str, int]) -> np.ndarray | None:
        """The result; ``None`` if it cannot be computed, or is larger than the tensors that it replaces."""
        version = since_version(node.op_identifier(), opsets)
        if version is None:
            return None
        tensors = [self._tensor(value) for value in node.inputs]
        arrays = [None if tensor is None else tensor.numpy() for tensor in tensors]
        attributes = tensor_attributes(node.attributes)
        try:
            results = run_operator(node.domain, node.op_type, version, arrays, attributes)
        except Exception:  # the node is wrong, or unknown to onnx's implementation: the check of the file says which
            return None
        if len(results) != 1 or not isinstance(results[0], np.ndarray):
            return None
        freed = sum(
            tensor.size
            for value, tensor in zip(node.inputs, tensors, strict=True)
            if tensor is not None and value is not None and len(value.uses()) == 1
        )
        return None if results[0].size > max(_LARGEST_OUTPUT, freed) else results[0]
