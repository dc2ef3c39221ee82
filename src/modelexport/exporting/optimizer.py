"""The optimisation pipeline: public passes of onnxscript and onnx_ir, without those that merge or compute parameters.

``torch.onnx``'s own optimiser also merges initializers of equal value: fresh biases are all zero, so that one layer's
bias appears under another layer's name. That pass is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from modelexport.core.calls import ROOT
from modelexport.core.owners import Evidence, Owner
from modelexport.exporting.rewrite import RewritePass, default_rules
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.owners import OWNER, owner_of


def optimize_graph(
    model: ir.Model,
    *,
    is_parameter: Callable[[str | None], bool],
    may_fold: Callable[[ir.Node], bool],
    keep: Collection[str] = (),
) -> None:
    """Fold constants, apply the default rewrites, remove what is unused and merge equal nodes, in place.

    Args:
        is_parameter: Whether the value of a name is a parameter or computed from parameters: rewrites do not see its
            elements.
        may_fold: Whether a node of constant inputs may be folded.
        keep: Names of values that no rewrite may remove: what modules get and return.
    """
    ir.passes.Sequential(
        passes.InlinePass(),
        ir.passes.PassManager(
            [
                _FoldConstants(may_fold),
                _Rewrite(is_parameter, keep),
                passes.RemoveUnusedNodesPass(),
                # Its constructor has no annotations.
                passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
                passes.RemoveUnusedOpsetsPass(),
            ],
            steps=2,
            early_stop=True,
        ),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
    )(model)


class _FoldConstants(ir.passes.InPlacePass):
    """onnxscript's constant folding, as a pass."""

    def __init__(self, may_fold: Callable[[ir.Node], bool]) -> None:
        super().__init__()
        self._may_fold = may_fold

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        result = optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=self._should_fold)
        return ir.passes.PassResult(model, result.modified)

    def _should_fold(self, node: ir.Node) -> bool | None:
        """Leave a constant ``Resize`` alone: the evaluator that folds it works element by element in Python."""
        return None if node.op_identifier() != ("", "Resize", "") and self._may_fold(node) else False


class _Rewrite(ir.passes.InPlacePass):
    """The default rewrites, which do not see the elements of parameters.

    What a rule does because a parameter has certain values (drop a bias that is zero, fold a multiplication by one)
    would be wrong for other weights, and what it computes from parameters would be no parameter's.
    """

    def __init__(self, is_parameter: Callable[[str | None], bool], keep: Collection[str]) -> None:
        super().__init__()
        self._is_parameter = is_parameter
        self._rules = RewritePass(default_rules(), keep)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        hidden = {value: value.const_value for value in initializers(model) if self._is_parameter(value.name)}
        try:
            for value in hidden:
                value.const_value = None
            return self._rules(model)
        finally:
            for value, tensor in hidden.items():
                value.const_value = tensor


def finish(model: ir.Model, output_names: Sequence[str], reserved: Collection[str] = ()) -> None:
    """Make the outputs of the graph distinct values under the given names, and every other name unique, in place.

    A node that this needs belongs to the call whose value it passes on.

    Args:
        reserved: Names that no output may have: those of parameters, also where the graph has none of that name now.
    """
    passes.OutputFixPass()(model)
    _compute_outputs(model.graph)
    for node in all_nodes(model):
        if owner_of(node) is None and node.inputs and (value := node.inputs[0]) is not None:
            producer = value.producer()
            owner = owner_of(producer) if producer is not None else Owner((ROOT,))
            if owner is not None:
                node.meta[OWNER] = Owner((owner.call,), Evidence.DERIVED)
    taken = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}.union(reserved)
    for value, name in zip(model.graph.outputs, output_names, strict=True):
        value.name = f"output.{name}" if name in taken else name
    passes.NameFixPass()(model)


def _compute_outputs(graph: ir.Graph) -> None:
    """Put a node before each output that is an initializer, which has a name of its own: that of its parameter."""
    for index, value in enumerate(graph.outputs):
        if value.is_initializer():
            node = ir.node("Identity", [value], name=f"return_{value.name}")
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            node.meta[OWNER] = Owner((ROOT,), Evidence.DERIVED)
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
