"""The optimization pipeline: public passes of onnxscript and onnx_ir, except those that merge or compute parameters.

``torch.onnx``'s own optimizer also merges initializers of equal value: fresh biases are all zero, so one layer's bias
would appear under another layer's name. That pass is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.core.calls import ROOT, ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.exporting.constant_folding import FoldConstants, FoldParameters
from modelexport.exporting.rewrite_rules import RewritePass, default_rules
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, draws, nested_graphs


def optimize_graph(
    model: ir.Model,
    *,
    parameters: dict[ir.Value, ir.TensorProtocol],
    may_fold: Callable[[ir.Node], bool],
    keep: Collection[str] = (),
) -> None:
    """Fold constants, apply the default rewrites, remove unused nodes and merge equal ones, in place.

    Args:
        parameters: The tensors of parameters, which are not in the graph: a rewrite that depends on values (dropping a
            bias of zeros) would be wrong for other weights, and a tensor computed by a rule would not be a known
            parameter. The tensors of folded parameters are added.
        may_fold: Whether a node of constant inputs may be folded.
        keep: Names of values that no rewrite may remove: those that modules get and return.
    """
    passes.InlinePass()(model)
    nesting = [node for node in all_nodes(model) if nested_graphs(node)]
    ir.passes.Sequential(
        ir.passes.PassManager(
            [
                FoldConstants(may_fold),
                FoldParameters(parameters, may_fold),
                RewritePass(default_rules(), keep),
                passes.RemoveUnusedNodesPass(),
                passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]  # onnx_ir has no annotation here
                passes.RemoveUnusedOpsetsPass(),
            ],
            steps=2,
            early_stop=True,
        ),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        _MergeEqual(),
    )(model)
    _release([node for node in nesting if node.graph is None])
    passes.RemoveUnusedNodesPass()(model)


def _release(removed: Iterable[ir.Node]) -> None:
    """Let the branches and bodies of removed nodes use nothing of the graph, which would keep its constants."""
    for graph in (graph for node in removed for graph in nested_graphs(node)):
        for inner in ir.traversal.RecursiveGraphIterator(graph):
            for position in range(len(inner.inputs)):
                inner.replace_input_with(position, None)


class _MergeEqual(passes.CommonSubexpressionEliminationPass):
    """Merges equal nodes, but for all that draw random numbers: onnx_ir knows only some of these."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        drawing = [node for node in all_nodes(model) if draws(node)]
        for number, node in enumerate(drawing):
            node.attributes.add(ir.AttrInt64("apart", number))
        result = super().call(model)
        for node in drawing:
            node.attributes.pop("apart")
        return result


def finish(model: ir.Model, output_names: Sequence[str], reserved: Collection[str] = ()) -> None:
    """Make the outputs of the graph distinct values under the given names, and every other name unique, in place.

    A node that is added for this belongs to the call that produces the value.

    Args:
        reserved: Names that no output may have: those of parameters, even of ones that the graph no longer has.
    """
    inputs = [value.name for value in model.graph.inputs]
    passes.OutputFixPass()(model)
    for graph_input, name in zip(model.graph.inputs, inputs, strict=True):
        graph_input.name = name  # also of one that is given out as it is
    for index, output in enumerate(model.graph.outputs):
        if output.is_initializer():  # which keeps its parameter's name
            model.graph.outputs[index] = copied_value(model.graph, output, ROOT, f"return_{output.name}")
    for node in all_nodes(model):
        if owner_of(node) is None and node.inputs and (value := node.inputs[0]) is not None:
            producer = value.producer()
            owner = owner_of(producer) if producer is not None else Owner((ROOT,))
            if owner is not None:
                set_owner(node, Owner((owner.call,), Evidence.DERIVED, owner.line))
    for name in {*output_names}.difference(reserved) & {*model.graph.initializers}:  # a constant, not a parameter
        model.graph.initializers[name].name = f"constant.{name}"
    taken = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}.union(reserved)
    for value, name in zip(model.graph.outputs, output_names, strict=True):
        value.name = f"output.{name}" if name in taken else name
    passes.NameFixPass()(model)


def copied_value(graph: ir.Graph, value: ir.Value, call: ModuleCall, name: str) -> ir.Value:
    """A copy of a value, by a new node of a call at the end of the graph; the node and the copy have the name."""
    node = ir.node("Identity", [value], name=name)
    copy = node.outputs[0]
    copy.name, copy.shape, copy.type = name, value.shape, value.type
    set_owner(node, Owner((call,), Evidence.DERIVED))
    graph.append(node)
    return copy
