"""onnxscript's default rewrite rules, looked up by operator, without those that compute new weights.

What is not onnxscript's way:

- Only rules whose pattern ends in the node's operator are tried. The others were 40 % of an export of 24 layers.
- The rules that fold a BatchNormalization into the weights before it are left out: they replace five parameters with a
  tensor that is not a parameter, and runtimes do the same when they load the file.
- Constants match exactly. With its tolerances patterns drop the epsilon of ``x * log(x + 1e-9)`` and the factor of
  ``x * 1.000009``.
- For the second result of a pattern (two slices of one value) the nodes that use the same value are tried, and not
  every node of the graph, which takes a time that grows with the square of the depth.

`tests/exporting/test_rewrite.py` fails when one of the private names of onnxscript changes that this file uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from onnxscript import rewriter
from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter._pattern_ir import Constant
from onnxscript.rewriter.rules import common

_COMPUTES_WEIGHTS = (
    common.fuse_batchnorm_into_conv_rule,
    common.fuse_batchnorm_into_conv_transpose_rule,
    common.fuse_batchnorm_into_gemm_rule,
)


def default_rules() -> list[RewriteRule]:
    """The rules that ``torch.onnx``'s optimizer applies, in its order, except those that compute weights."""
    return [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule not in _COMPUTES_WEIGHTS]


def shared_inputs(rule: RewriteRule) -> list[int]:
    """Of a pattern with several results: for each but the first, an input of the first that it has as well.

    Empty for a pattern with a single result, and if one of its results has no input in common with the first.
    """
    first, *others = rule._target_pattern.output_nodes
    positions_by_node = [
        [first.inputs.index(value) for value in node.inputs if value in first.inputs] for node in others
    ]
    return [positions[0] for positions in positions_by_node if positions] if all(positions_by_node) else []


@contextmanager
def matched_exactly(rules: Iterable[RewriteRule]) -> Iterator[None]:
    """Make the constants in the patterns of rules match only exactly equal constants, inside the block.

    The rules are shared by the whole process, and copying one would copy everything that it refers to.
    """
    constants = {
        value for rule in rules for node in rule._target_pattern for value in node.inputs if isinstance(value, Constant)
    }
    before = [(value, value._rel_tol, value._abs_tol) for value in constants]
    try:
        for value in constants:
            value._rel_tol = value._abs_tol = 0.0
        yield
    finally:
        for value, relative, absolute in before:
            value._rel_tol, value._abs_tol = relative, absolute


def root_operator(rule: RewriteRule) -> Any:
    """The identifier of the operator that a rule's pattern ends in; ``None`` if that may be any operator."""
    return rule._target_pattern.output_nodes[0].op_identifier()


class RewritePass(ir.passes.InPlacePass):
    """Applies rules to every node, each rule only where its pattern can end; constants match exactly.

    Args:
        keep: Names of values that no rewrite may remove.
    """

    def __init__(self, rules: Sequence[RewriteRule], keep: Collection[str] = ()) -> None:
        super().__init__()
        self._patterns = tuple(rules)
        self._rules = RewriteRuleSet([_Dispatch(rules, frozenset(keep))])
        self._rules.remove_unused_nodes = any(not rule.remove_nodes for rule in rules)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        with matched_exactly(self._patterns):
            return ir.passes.PassResult(model, bool(self._rules.apply_to_model(model)))


class _Dispatch:
    """Combines many rules in one."""

    def __init__(self, rules: Sequence[RewriteRule], keep: frozenset[str]) -> None:
        self._rules = rules
        self._keep = keep
        self._by_operator: dict[ir.OperatorIdentifier, list[RewriteRule]] = defaultdict(list)
        operators = {operator for rule in rules if (operator := root_operator(rule)) is not None}
        for rule in rules:
            operator = root_operator(rule)
            for target in operators if operator is None else (operator,):
                self._by_operator[target].append(rule)
        self._open = [rule for rule in rules if root_operator(rule) is None]
        self._shared = {rule: shared for rule in rules if (shared := shared_inputs(rule))}
        self._order: dict[ir.Node, int] = {}
        self._applied = rules[0]

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        for rule in self._by_operator.get(node.op_identifier(), self._open):
            place = self._users(graph, node, self._shared[rule]) if rule in self._shared else graph
            replacement = rule.try_rewrite(model, place, node, **options)
            if replacement is not None and not self._removes_kept(replacement.match):
                self._applied = rule
                _name_apart(replacement.new_initializers, graph)
                return replacement
        return None

    def _removes_kept(self, match: Any) -> bool:
        inner = {value.name for node in match.nodes for value in node.outputs if value not in match.outputs}
        return not self._keep.isdisjoint(inner)

    def _users(self, graph: Any, node: ir.Node, shared: Sequence[int]) -> Any:
        """The nodes that may make the other results of a rule whose first result is that of a node, as a graph."""
        values = [node.inputs[position] if position < len(node.inputs) else None for position in shared]
        shared_values = [value for value in values if value is not None]
        users = {user for value in shared_values for user in value.consumers() if user.graph is node.graph}
        if not self._order:
            self._order = {graph_node: index for index, graph_node in enumerate(graph)}
        if len(shared_values) < len(values) or not users <= self._order.keys():  # new nodes have no place in the order
            return graph
        return _Part(graph, sorted(users, key=self._order.__getitem__))

    def graph_pre_visitor(self) -> None:
        self._order = {}
        for rule in self._rules:
            if rule.graph_pre_visitor:
                rule.graph_pre_visitor()

    def graph_post_visitor(self) -> None:
        for rule in self._rules:
            if rule.graph_post_visitor:
                rule.graph_post_visitor()

    def __getattr__(self, name: str) -> Any:
        """The name and the flags of the rule that was applied last."""
        return getattr(self._applied, name)


class _Part:
    """Some nodes of a graph, in its order, for a matcher."""

    def __init__(self, graph: ir.Graph | ir.Function, nodes: Sequence[ir.Node]) -> None:
        self.graph = graph.graph if isinstance(graph, ir.Function) else graph
        self.opset_imports = graph.opset_imports
        self._nodes = nodes

    def __iter__(self) -> Iterator[ir.Node]:
        return iter(self._nodes)


def _name_apart(new: Sequence[ir.Value], graph: ir.Graph | ir.Function) -> None:
    """Make the names of new initializers unique: rules name them after a value, and two may choose the same name."""
    taken = graph.initializers if isinstance(graph, ir.Graph) else {}
    for value in new:
        base, count = value.name, 0
        while value.name in taken:
            count += 1
            value.name = f"{base}_{count}"
