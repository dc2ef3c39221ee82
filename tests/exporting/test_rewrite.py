"""The default rules looked up by operator do what a rule set does; canaries for the two private names they need."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnxscript import rewriter
from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter._pattern_ir import Constant

from modelexport.exporting.rewrite_rules import RewritePass, default_rules, root_operator, shared_inputs


def test_onnxscript_still_has_its_tuple_of_default_rules() -> None:
    rules = rewriter._DEFAULT_REWRITE_RULES
    assert len(rules) > 20
    assert all(isinstance(rule, RewriteRule) for rule in rules)


def test_the_pattern_of_a_rule_still_knows_the_operator_it_ends_in() -> None:
    rule = RewriteRule(lambda op, x: op.Relu(op.Identity(x)), lambda op, x: op.Relu(x))
    assert root_operator(rule) == ("", "Relu", "")


def test_no_default_rule_computes_weights() -> None:
    assert len(rewriter._DEFAULT_REWRITE_RULES) - len(default_rules()) == 3


GRAPHS = {
    "a chain of reshapes": """
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 6] x) => (float[12] y)
        <int64[2] a = {3, 4}, int64[1] b = {12}> { t = Reshape(x, a)  y = Reshape(t, b) }""",
    "two transposes that cancel": """
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 3] x) => (float[2, 3] y)
        { t = Transpose <perm = [1, 0]> (x)  u = Transpose <perm = [1, 0]> (t)  y = Relu(u) }""",
    "clips and relus": """
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 3] x) => (float[2, 3] y)
        { t = Relu(x)  u = Relu(t)  v = Relu(u)  y = Identity(v) }""",
    "nothing to do": """
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 3] x) => (float[2, 3] y)
        { t = Sin(x)  y = Add(t, x) }""",
}


@pytest.mark.parametrize("text", GRAPHS.values(), ids=GRAPHS.keys())
def test_the_graph_is_the_one_that_a_rule_set_makes(text: str) -> None:
    import onnx

    ours, theirs = (ir.from_proto(onnx.parser.parse_model(text)) for _ in range(2))
    RewritePass(default_rules())(ours)
    RewriteRuleSet(default_rules()).apply_to_model(theirs)
    assert [node.op_type for node in ours.graph] == [node.op_type for node in theirs.graph]


def test_what_two_rewrites_add_under_one_name_is_kept_apart() -> None:
    import onnx

    # Both rules name the shape that they add `v/shape`.
    model = ir.from_proto(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 6] x) => (float[12, 1] y)
        <int64[2] a = {3, 4}, int64[3] b = {12, 1, 1}>
        { t = Reshape(x, a)  v = Reshape(t, b)  w = Flatten(v)  y = Relu(w) }""")
    )
    RewritePass(default_rules(), keep=("v",))(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Reshape", "Relu"]
    used = {value for node in model.graph for value in node.inputs if value.producer() is None}
    assert used <= {*model.graph.inputs, *model.graph.initializers.values()}


ADDED = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}


def _operators_left(operator: str, constant: float) -> list[str]:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3]))
    number = ir.Value(name="c", const_value=ir.tensor(constant, dtype=ir.DataType.FLOAT, name="c"), shape=ir.Shape([]))
    node = ir.node(operator, [x, number])
    last = ir.node("Relu", node.outputs)
    graph = ir.Graph([x], last.outputs, nodes=[node, last], initializers=[number], opset_imports={"": 20})
    model = ir.Model(graph, ir_version=10)
    RewritePass(default_rules())(model)
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("operator", ADDED)
def test_a_constant_that_does_nothing_goes(operator: str) -> None:
    assert operator not in _operators_left(operator, ADDED[operator])


@pytest.mark.parametrize("operator", ADDED)
@pytest.mark.parametrize("away", [1e-9, 1e-12, 9e-6, -9e-6])
def test_a_constant_that_does_little_stays(operator: str, away: float) -> None:
    constant = ADDED[operator] + away
    if ir.tensor(constant, dtype=ir.DataType.FLOAT).numpy() != ADDED[operator]:
        assert operator in _operators_left(operator, constant)


def test_the_rules_of_others_keep_their_tolerances() -> None:
    default_rules()
    constants = [
        value
        for rule in rewriter._DEFAULT_REWRITE_RULES
        for node in rule._target_pattern
        for value in node.inputs
        if isinstance(value, Constant)
    ]
    assert constants
    assert all(constant._rel_tol == 1e-5 and constant._abs_tol == 1e-8 for constant in constants)


SLICES = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[2, 8] x, float[2, 8] w) => (float[2, 4] y, float[2, 4] z)
    <int64[1] zero = {0}, int64[1] four = {4}, int64[1] eight = {8}, int64[1] one = {1}> {
        a = Slice(x, zero, four, one)
        c = Slice(w, four, eight, one)
        b = Slice(x, four, eight, one)
        d = Slice(w, zero, four, one)
        e = Slice(x, four, eight, one)
        f = Mul(a, b)
        y = Add(f, e)
        z = Mul(c, d)
    }"""


def test_a_pattern_of_two_results_is_tried_with_the_users_of_its_value() -> None:
    import onnx

    ours, theirs = (ir.from_proto(onnx.parser.parse_model(SLICES)) for _ in range(2))
    RewritePass(default_rules())(ours)
    RewriteRuleSet(default_rules()).apply_to_model(theirs)
    made = [[(node.op_type, [v.name for v in node.inputs]) for node in model.graph] for model in (ours, theirs)]
    assert made[0] == made[1]
    assert [name for name, _ in made[0]].count("Split") == 1


def test_the_pattern_of_two_slices_still_has_its_value_in_both() -> None:
    rules = {rule.name: rule for rule in default_rules()}
    assert [name for name, rule in rules.items() if not rule._target_pattern.has_single_output_node] == ["SlicesSplit"]
    assert shared_inputs(rules["SlicesSplit"]) == [0]
