"""Owners of files that other tools changed: the rules one by one, on graphs small enough to read."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes
from modelexport.graph.snapshot import take_snapshot
from modelexport.lineage.owners_by_matching import Descent, trace_owners

HEADER = '<ir_version: 10, opset_import: ["" : 20, "other" : 1]> g '


def graph(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEADER + text))


def derived(before: str, after: str, **owners: str) -> tuple[dict[str | None, tuple[str, list[str]] | None], Descent]:
    """Output name to evidence and addresses of the changed graph; the owners are those of the source's outputs."""
    source, changed = graph(before), graph(after)
    for node in all_nodes(source):
        name = node.outputs[0].name or ""
        set_owner(node, Owner((ModuleCall.parse(owners[name]),), Evidence.EXACT))
    descent = trace_owners(take_snapshot(source), changed)
    found = {
        node.outputs[0].name: (owner.evidence.value, [str(call) for call in owner.calls])
        if (owner := owner_of(node))
        else None
        for node in all_nodes(changed)
    }
    return found, descent


CHAIN = "(float[2] x) => (float[2] y) { t = Sin(x)  u = Cos(t)  y = Abs(u) }"
OWNERS = {"t": "a", "u": "b", "y": "c"}


def test_a_node_is_exact_where_nothing_before_it_was_lost() -> None:
    found, _ = derived(CHAIN, "(float[2] x) => (float[2] y) { t = Sin(x)  u = Cos(t)  y = Abs(u) }", **OWNERS)
    assert found == {"t": ("exact", ["a"]), "u": ("exact", ["b"]), "y": ("exact", ["c"])}


def test_the_same_operator_that_fused_another_is_not_exact() -> None:
    before = """(float[2] x) => (float[2] y) <float[2] v = {1.0, 1.0}, float[2] w = {2.0, 2.0}>
        { t = Add(x, v)  y = Add(t, w) }"""
    found, _ = derived(before, "(float[2] x) => (float[2] y) <float[2] z = {3.0, 3.0}> { y = Add(x, z) }", t="a", y="b")
    assert found == {"y": ("derived", ["b", "a"])}


def test_a_node_named_after_a_value_produces_a_variant_of_it() -> None:
    after = (
        "(float[2] x) => (float[2] y) { t_quantized = Neg(x)  u_quantized = Neg(t_quantized)  y = Exp(u_quantized) }"
    )
    found, _ = derived(CHAIN, after, **OWNERS)
    assert found == {"t_quantized": ("derived", ["a"]), "u_quantized": ("derived", ["b"]), "y": ("derived", ["c"])}


def test_a_name_is_ignored_if_the_node_uses_nothing_that_the_value_is_computed_from() -> None:
    before = """(float[2] x, float[2] z) => (float[2] y, float[2] w)
        { t = Sin(x)  y = Cos(t)  s = Sin(z)  w = Exp(s) }"""
    after = """(float[2] x, float[2] z) => (float[2] y, float[2] w)
        { t = Sin(x)  y = Cos(t)  t_copy = Neg(z)  w = Abs(t_copy) }"""
    found, _ = derived(before, after, t="a", y="b", s="c", w="d")
    assert found["t_copy"] == ("derived", ["d"])
    assert found["w"] == ("derived", ["d", "c"])


def test_a_number_behind_a_name_makes_it_another_name() -> None:
    found, _ = derived(CHAIN, "(float[2] x) => (float[2] y) { t_7 = Neg(x)  y = Exp(t_7) }", **OWNERS)
    assert found == {"t_7": ("derived", ["c"]), "y": ("derived", ["c", "b", "a"])}


LINEAR = """(float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1.0, 2.0, 3.0, 4.0}, float[2,2] v = {1.0, 2.0, 3.0, 5.0}>
    { t = MatMul(x, w)  u = Sin(t)  s = MatMul(u, v)  y = Abs(s) }"""


def test_a_node_without_names_is_known_by_the_parameter_that_it_takes() -> None:
    after = """(float[2,2] x) => (float[2,2] y)
        <float[2,2] w = {1.0, 2.0, 3.0, 4.0}, float[2,2] v = {1.0, 2.0, 3.0, 5.0}>
        { n1 = other.Product(x, w)  n2 = other.Wave(n1)  n3 = other.Product(n2, v)  y = other.Positive(n3) }"""
    found, _ = derived(LINEAR, after, t="a", u="b", s="c", y="d")
    assert found["n1"] == ("derived", ["a"])
    assert found["n3"] == ("derived", ["c"])
    assert found["y"] == ("derived", ["d"])
    assert found["n2"] == ("derived", ["b"]), "the product has the same inputs as before"


def test_calls_of_one_module_are_distinguished_by_position() -> None:
    before = """(float[2,2] x) => (float[2,2] y) <float[2,2] w = {1.0, 2.0, 3.0, 4.0}>
        { t = MatMul(x, w)  u = Sin(t)  s = MatMul(u, w)  y = Sin(s) }"""
    after = """(float[2,2] x) => (float[2,2] y) <float[2,2] w = {1.0, 2.0, 3.0, 4.0}>
        { n1 = other.Product(x, w)  u = Sin(n1)  n2 = other.Product(u, w)  y = Sin(n2) }"""
    found, _ = derived(before, after, t="m", u="a", s="m@1", y="b")
    assert (found["n1"], found["n2"]) == (("derived", ["m"]), ("derived", ["m@1"]))


def test_an_activation_that_an_attribute_names_was_fused() -> None:
    before = "(float[2] x) => (float[2] y) { t = Sin(x)  u = Relu(t)  y = Abs(u) }"
    after = '(float[2] x) => (float[2] y) { t_fused = other.Wave<activation = "Relu">(x)  y = Abs(t_fused) }'
    found, _ = derived(before, after, t="a", u="b", y="c")
    assert found == {"t_fused": ("derived", ["b", "a"]), "y": ("exact", ["c"])}


def test_a_fused_node_takes_what_the_operator_in_its_name_took() -> None:
    before = "(float[2] x) => (float[2] y) { t = Exp(x)  u = Sin(t)  y = Abs(u) }"
    after = "(float[2] x) => (float[2] y) { n = other.Power(x)  y = other.SinAndAbs(n) }"
    found, _ = derived(before, after, t="a", u="b", y="c")
    assert found == {"n": ("derived", ["a"]), "y": ("derived", ["c", "b"])}


def test_what_passes_a_value_on_leads_to_the_node_that_made_it() -> None:
    after = "(float[2] x) => (float[2] y) { t = Sin(x)  u = Cos(t)  n = Abs(u)  y = other.Move(n) }"
    found, _ = derived(CHAIN, after, **OWNERS)
    assert (found["n"], found["y"]) == (("derived", ["c"]), ("derived", ["c"]))


def test_a_name_that_stayed_while_the_next_node_was_folded_in() -> None:
    before = """(float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}, float[2] v = {3.0, 4.0}>
        { t = Mul(x, w)  u = Mul(t, v)  y = Abs(u) }"""
    after = "(float[2] x) => (float[2] y) <float[2] n = {3.0, 8.0}> { t = Mul(x, n)  y = Abs(t) }"
    found, descent = derived(before, after, t="a", u="b", y="c")
    assert found == {"t": ("derived", ["b", "a"]), "y": ("exact", ["c"])}
    assert {name: value.name for name, value in descent.values.items() if name in "tu"} == {"u": "t"}


def test_equal_initializers_that_were_merged_have_the_entries_of_all() -> None:
    before = """(float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}, float[2] v = {1.0, 2.0}>
        { t = Mul(x, w)  y = Sub(t, v) }"""
    after = "(float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> { t = Mul(x, w)  y = Sub(t, w) }"
    found, descent = derived(before, after, t="a", y="b")
    assert found == {"t": ("exact", ["a"]), "y": ("exact", ["b"])}
    assert {value.name: names for value, names in descent.merged.items()} == {"w": ["v"]}


def test_an_initializer_without_a_telling_name_may_come_from_what_was_lost_there() -> None:
    before = """(float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}, float[2] v = {1.0, 3.0}>
        { t = Mul(x, w)  y = Mul(t, v) }"""
    after = "(float[2] x) => (float[2] y) <float[2] n = {1.0, 6.0}> { y = Mul(x, n) }"
    _, descent = derived(before, after, t="a", y="b")
    assert [(value.name, descent.names[value], names) for value, names in descent.lost.items()] == [("n", "v", ["w"])]


def test_a_new_node_between_several_calls_is_told() -> None:
    before = "(float[2] x) => (float[2] y, float[2] z) { t = Sin(x)  y = Cos(t)  z = Abs(t) }"
    after = (
        "(float[2] x) => (float[2] y, float[2] z) { t = Sin(x)  n = other.Round(t)  y = other.A(n)  z = other.B(n) }"
    )
    found, descent = derived(before, after, t="a", y="b", z="c")
    assert found["n"] == ("derived", ["b", "c"])
    assert list(descent.several.values()) == ["between"]


def test_nodes_of_nested_graphs_count() -> None:
    text = """(bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = one () => (float[2] p) { q = Sin(x)  p = Abs(q) },
                    else_branch = two () => (float[2] r) { r = Cos(x) }> }"""
    changed = text.replace("q = Sin(x)  p = Abs(q)", "q_cast = Neg(x)  p = Exp(q_cast)")
    found, _ = derived(text, changed, y="", p="b", q="a", r="c")
    assert (found["q_cast"], found["p"]) == (("derived", ["a"]), ("derived", ["b"]))
    assert (found["r"], found["y"]) == (("exact", ["c"]), ("exact", ["."]))


@pytest.mark.parametrize("length", [3_000])
def test_long_chains_of_lost_values_need_no_recursion(length: int) -> None:
    names = [f"v{i}x" for i in range(length)]
    body = "  ".join(f"{b} = Sin({a})" for a, b in zip(["x", *names], names, strict=False))
    before = f"(float[2] x) => (float[2] {names[-1]}) {{ {body} }}"
    found, _ = derived(before, f"(float[2] x) => (float[2] {names[-1]}) {{ {names[-1]} = Cos(x) }}",
                       **dict.fromkeys(names, "a"))  # fmt: skip
    assert found == {names[-1]: ("derived", ["a"])}
