"""The optimisation pipeline: public passes of onnxscript and onnx_ir, without those that merge or compute parameters.

``torch.onnx``'s own optimiser also merges initializers of equal value: fresh biases are all zero, so that one layer's
bias appears under another layer's name. That pass is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from modelexport.rewrite import RewritePass, default_rules


def optimize(model: ir.Model) -> None:
    """Fold constants, apply the default rewrites, remove what is unused and merge equal nodes, in place."""
    ir.passes.Sequential(
        passes.InlinePass(),
        ir.passes.PassManager(
            [
                _FoldConstants(),
                RewritePass(default_rules()),
                passes.RemoveUnusedNodesPass(),
                passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
                passes.RemoveUnusedOpsetsPass(),
            ],
            steps=2,
            early_stop=True,
        ),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.CommonSubexpressionEliminationPass(),
    )(model)


class _FoldConstants(ir.passes.InPlacePass):
    """onnxscript's constant folding, as a pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        result = optimizer.fold_constants_ir(model, onnx_shape_inference=True, should_fold=_should_fold)
        return ir.passes.PassResult(model, result.modified)


def _should_fold(node: ir.Node) -> bool | None:
    """Leave a constant ``Resize`` alone: the evaluator that folds it works element by element in Python."""
    return False if node.op_identifier() == ("", "Resize", "") else None


def finish(model: ir.Model, output_names: Sequence[str]) -> None:
    """Make the outputs of the graph distinct values under the given names, and every other name unique, in place."""
    passes.OutputFixPass()(model)
    taken = {value.name for value in model.graph.inputs}
    for value, name in zip(model.graph.outputs, output_names, strict=True):
        value.name = f"output.{name}" if name in taken else name
    passes.NameFixPass()(model)
