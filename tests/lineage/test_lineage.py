"""Owners of a changed graph, from a tagged one: the rules one by one, on graphs small enough to read."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import pytest

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.missing_types import fill_types
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes
from modelexport.graph.snapshot import take_snapshot
from modelexport.graph.unique_names import name_values_apart
from modelexport.lineage.owners_after_passes import derive_owners

HEADER = '<ir_version: 10, opset_import: ["" : 20]> g '


def graph(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEADER + text))


def tagged(text: str, **owners: str) -> ir.Model:
    """A graph whose nodes are owned by the modules given for their outputs."""
    model = graph(text)
    for node in all_nodes(model):
        name = node.outputs[0].name
        if name in owners:
            set_owner(node, Owner((ModuleCall.parse(owners[name]),), Evidence.EXACT))
    return model


def found(model: ir.Model) -> dict[str | None, tuple[str, list[str]] | None]:
    """Output name to evidence and addresses."""
    return {
        node.outputs[0].name: (owner.evidence.value, [str(call) for call in owner.calls])
        if (owner := owner_of(node))
        else None
        for node in all_nodes(model)
    }


def derived(before: ir.Model, after: str) -> dict[str | None, tuple[str, list[str]] | None]:
    changed = graph(after)
    derive_owners(take_snapshot(before), changed)
    return found(changed)


def test_a_node_that_is_still_there_keeps_its_owner_and_its_evidence() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }", t="a", y="b")
    after = derived(before, "(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }")
    assert after == {"t": ("exact", ["a"]), "y": ("exact", ["b"])}


def test_a_fused_node_has_the_owners_of_the_nodes_it_replaces_the_producer_of_its_output_first() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  u = Cos(t)  y = Abs(u) }", t="a", u="b", y="c")
    after = derived(before, "(float[2] x) => (float[2] y) { t = Sin(x)  y = Gelu(t) }")
    assert after == {"t": ("exact", ["a"]), "y": ("derived", ["c", "b"])}


def test_a_run_of_new_nodes_belongs_to_the_value_that_it_leads_to() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }", t="a", y="b")
    after = derived(before, "(float[2] x) => (float[2] y) { t = Sin(x)  n = Neg(t)  m = Abs(n)  y = Exp(m) }")
    assert after["n"] == after["m"] == after["y"] == ("derived", ["b"])


def test_a_new_node_that_leads_nowhere_belongs_to_the_value_that_it_comes_from() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }", t="a", y="b")
    after = derived(before, "(float[2] x) => (float[2] y, float[2] z) { t = Sin(x)  y = Cos(t)  z = Neg(t) }")
    assert after["z"] == ("derived", ["a"])


def test_a_node_whose_output_was_renamed_is_known_by_its_position() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }", t="a", y="b")
    after = derived(before, "(float[2] x) => (float[2] y) { renamed = Sin(x)  y = Cos(renamed) }")
    assert after["renamed"] == ("exact", ["a"])


def test_equal_nodes_that_were_merged_have_all_their_owners() -> None:
    text = "(float[2] x) => (float[2] y) { t = Sin(x)  u = Sin(x)  v = Cos(t)  w = Exp(u)  y = Add(v, w) }"
    before = tagged(text, t="a", u="b", v="a", w="b", y="c")
    source = take_snapshot(before)
    passes.CommonSubexpressionEliminationPass()(before)
    derive_owners(source, before)
    assert found(before) == {
        "t": ("derived", ["a", "b"]), "v": ("exact", ["a"]), "w": ("exact", ["b"]), "y": ("exact", ["c"]),
    }  # fmt: skip


def test_equal_chains_that_were_merged_have_all_their_owners_at_every_node() -> None:
    text = "(float[2] x) => (float[2] y) { t = Sin(x)  u = Sin(x)  v = Cos(t)  w = Cos(u)  y = Add(v, w) }"
    before = tagged(text, t="a", u="b", v="a", w="b", y="c")
    source = take_snapshot(before)
    passes.CommonSubexpressionEliminationPass()(before)
    derive_owners(source, before)
    assert found(before)["t"] == found(before)["v"] == ("derived", ["a", "b"])


def test_a_removed_identity_leaves_no_owner_behind() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  u = Identity(t)  y = Cos(u) }", t="a", u="b", y="c")
    after = derived(before, "(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }")
    assert after == {"t": ("exact", ["a"]), "y": ("exact", ["c"])}


def test_what_was_folded_into_a_constant_does_not_own_the_node_that_uses_it() -> None:
    before = tagged(
        "(float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> { t = Neg(w)  y = Add(x, t) }", t="a", y="b"
    )
    after = derived(before, "(float[2] x) => (float[2] y) <float[2] t = {-1.0, -2.0}> { y = Sub(x, t) }")
    assert after == {"y": ("derived", ["b"])}


def test_a_node_of_which_the_exporter_knew_nothing_is_inferred_where_its_neighbours_agree() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  u = Abs(t)  y = Cos(u) }", t="a", y="a")
    assert derived(before, "(float[2] x) => (float[2] y) { t = Sin(x)  u = Abs(t)  y = Cos(u) }")["u"] == (
        "inferred", ["a"],
    )  # fmt: skip


def test_it_stays_unknown_where_they_do_not() -> None:
    before = tagged("(float[2] x) => (float[2] y) { t = Sin(x)  u = Abs(t)  y = Cos(u) }", t="a", y="b")
    assert derived(before, "(float[2] x) => (float[2] y) { t = Sin(x)  u = Abs(t)  y = Cos(u) }")["u"] is None


def test_nodes_of_nested_graphs_count() -> None:
    text = """(bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = one () => (float[2] p) { q = Sin(x)  p = Abs(q) },
                    else_branch = two () => (float[2] r) { r = Cos(x) }> }"""
    before = tagged(text, y="", p="a", q="a", r="b")
    changed = text.replace("q = Sin(x)  p = Abs(q)", "n = Neg(x)  p = Exp(n)")
    after = derived(before, changed)
    assert after["n"] == after["p"] == ("derived", ["a"])
    assert (after["r"], after["y"]) == (("exact", ["b"]), ("exact", ["."]))


@pytest.mark.parametrize("length", [2_000])
def test_a_long_chain_of_lost_values_needs_no_recursion(length: int) -> None:
    names = [f"t{i}" for i in range(length)]
    body = "  ".join(f"{b} = Sin({a})" for a, b in zip(["x", *names], names, strict=False))
    before = tagged(f"(float[2] x) => (float[2] t{length - 1}) {{ {body} }}", **dict.fromkeys(names, "a"))
    after = derived(before, f"(float[2] x) => (float[2] t{length - 1}) {{ t{length - 1} = Cos(x) }}")
    assert after == {f"t{length - 1}": ("derived", ["a"])}


FORMATS: dict[str, Callable[[], Owner]] = {
    "no call": lambda: Owner(()),
    "a call twice": lambda: Owner((ModuleCall("a"), ModuleCall("a"))),
}


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS.keys())
def test_an_owner_has_at_least_one_call_and_none_twice(make: Callable[[], Owner]) -> None:
    with pytest.raises(ValueError, match="at least one call and no call twice"):
        make()


def test_each_value_that_a_loop_carries_has_the_type_of_its_own() -> None:
    model = graph(
        """(int64 n, int64 i, float[2] x) => (int64 j, float[2] y) {
            j, y = Loop (n, , i, x) <body = b (int64 step, bool go, int64 k, float[2] z)
                => (bool again, int64 l, float[2] v) { again = Identity(go) l = Add(k, step) v = Add(z, z) }> }"""
    )
    for value in model.graph.outputs:
        value.type = None
    fill_types(model)
    assert [value.dtype for value in model.graph.outputs] == [ir.DataType.INT64, ir.DataType.FLOAT]


def test_the_bodies_of_an_operator_outside_the_standard_do_not_tell_the_types_of_its_outputs() -> None:
    model = graph(
        """(int32[1, 4] ids) => (int32 found, int32 scores) {
            found, scores = com.microsoft.BeamSearch (ids)
                <decoder = d (float[1] a) => (float[1] b) { b = Identity(a) }> }"""
    )
    for value in model.graph.outputs:
        value.type = None
    fill_types(model)
    assert [value.dtype for value in model.graph.outputs] == [ir.DataType.INT32] * 2


def test_an_operator_that_a_file_has_in_an_older_version_than_the_standard_has_it_gets_a_type() -> None:
    model = graph("(float[2, 4] x, float[4] w) => (float[2, 4] y) { y = LayerNormalization (x, w) }")
    model.opset_imports[""] = 9  # as ONNX Runtime's optimizer writes it
    model.graph.outputs[0].type = None
    fill_types(model)
    assert model.graph.outputs[0].dtype is ir.DataType.FLOAT


def test_a_value_is_renamed_only_if_a_graph_around_it_has_its_name() -> None:
    """Two branches may share names, in nested graphs as well."""
    model = graph(
        """(bool c, float[2] x) => (float[2] y) {
            y = If (c) <then_branch = one () => (float[2] p) { h = Abs(x)  t = Cos(h)  p = Exp(t) },
                        else_branch = two () => (float[2] p) { h = Neg(x)  p = If (c) <
                            then_branch = three () => (float[2] q) { h = Sin(x)  q = Exp(h) },
                            else_branch = four () => (float[2] q) { q = Tan(h) }> }>
            t = Relu(x) }"""
    )
    name_values_apart(model)
    names = [(node.op_type, node.outputs[0].name) for node in all_nodes(model)]
    assert names == [
        ("If", "y"), ("Abs", "h"), ("Cos", "t_2"), ("Exp", "p"),
        ("Neg", "h"), ("If", "p"), ("Sin", "h_2"), ("Exp", "q"), ("Tan", "q"), ("Relu", "t"),
    ]  # fmt: skip
