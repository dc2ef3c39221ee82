"""Each matcher has a case that fails without it: handwritten graphs, small enough to read."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from unittest.mock import Mock

import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes
from modelexport.graph.snapshot import SourceGraph, SourceNode, take_snapshot
from modelexport.lineage.matching import by_inputs_of_fused_nodes
from modelexport.lineage.matching.by_inputs_of_fused_nodes import match_by_fusion
from modelexport.lineage.matching.by_name import match_by_derived_name, match_by_name
from modelexport.lineage.matching.by_parameter import match_by_parameter
from modelexport.lineage.matching.by_position import match_by_position
from modelexport.lineage.matching.by_removed_neighbors import match_by_activation, match_by_folding, match_by_removal
from modelexport.lineage.matching.matching_state import SKIPPED_WHEN_MATCHING, Matching
from modelexport.lineage.matching.original_names import OriginalNames
from modelexport.lineage.owners_by_matching import WALKS, Matcher, Walk, trace_owners

HEADER = '<ir_version: 10, opset_import: ["" : 20, "other" : 1]> g '
MATRICES = "<float[2,2] w = {1.0, 2.0, 3.0, 4.0}, float[2,2] v = {1.0, 2.0, 3.0, 5.0}>"

Found = dict[str, tuple[str, list[str]]]


@dataclass(frozen=True)
class Case:
    """Two graphs, and the expected owners of the nodes of the second, by the names of their outputs."""

    matcher: Matcher
    before: str
    after: str
    owners: dict[str, str]
    expected: Found


CASES = {
    "a node that a tool did not touch keeps owner and evidence": Case(
        match_by_name,
        "(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }",
        "(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }",
        {"t": "a", "y": "b"},
        {"t": ("exact", ["a"]), "y": ("exact", ["b"])},
    ),
    "what quantizes a value belongs to the module that makes the value, not to the one that uses it": Case(
        match_by_derived_name,
        "(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }",
        "(float[2] x) => (float[2] y) { t = Sin(x)  t_quantized = other.Round(t)  y = Cos(t_quantized) }",
        {"t": "a", "y": "b"},
        {"t": ("exact", ["a"]), "t_quantized": ("derived", ["a"]), "y": ("exact", ["b"])},
    ),
    "a name that ends like another value is taken for what it begins with": Case(
        match_by_derived_name,
        "(float[2] x) => (float[2] output) { [node_t] t = Sin(x)  u = Abs(t)  output = Cos(u) }",
        """(float[2] x) => (float[2] output)
            { [node_t_mul] t2scaled_output = other.Wave(x)  u = other.Pos(t2scaled_output)  output = Cos(u) }""",
        {"t": "a", "u": "b", "output": "c"},
        {"t2scaled_output": ("derived", ["a"]), "u": ("derived", ["b"]), "output": ("exact", ["c"])},
    ),
    "a fused node without a known name is known by its weight": Case(
        match_by_parameter,
        f"(float[2,2] x) => (float[2,2] y) {MATRICES} {{ t = MatMul(x, w)  u = Sin(t)  y = MatMul(u, v) }}",
        f"(float[2,2] x) => (float[2,2] y) {MATRICES} {{ n1 = other.Product(x, w)  y = other.Product(n1, v) }}",
        {"t": "a", "u": "b", "y": "c"},
        {"n1": ("derived", ["a"]), "y": ("derived", ["c", "b"])},
    ),
    "a convolution with an activation in an attribute is the activation too": Case(
        match_by_activation,
        "(float[2] x) => (float[2] y) { t = Sin(x)  u = Relu(t)  y = Abs(u) }",
        '(float[2] x) => (float[2] y) { t_nchwc = other.Wave<activation = "Relu">(x)  y = other.Pos(t_nchwc) }',
        {"t": "a", "u": "b", "y": "c"},
        {"t_nchwc": ("derived", ["b", "a"]), "y": ("derived", ["c"])},
    ),
    "equal nodes that became one have the owners of all": Case(
        match_by_position,
        "(float[2] x) => (float[2] y) { t = Sin(x)  u = Sin(x)  y = Sub(t, u) }",
        "(float[2] x) => (float[2] y) { t = Sin(x)  y = Sub(t, t) }",
        {"t": "a", "u": "b", "y": "c"},
        {"t": ("derived", ["a", "b"]), "y": ("exact", ["c"])},
    ),
    "a node whose output was renamed is known by where it is": Case(
        match_by_position,
        "(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }",
        "(float[2] x) => (float[2] y) { n = Sin(x)  y = Cos(n) }",
        {"t": "a", "y": "b"},
        {"n": ("exact", ["a"]), "y": ("exact", ["b"])},
    ),
    "a node that returned what it took was removed, and is not fused into the next": Case(
        match_by_position,
        "(float[2] x) => (float[2] y) { t = Sin(x)  u = Cast<to = 1>(t)  y = Cos(u) }",
        "(float[2] x) => (float[2] y) { t = Sin(x)  y = Cos(t) }",
        {"t": "a", "u": "b", "y": "c"},
        {"t": ("exact", ["a"]), "y": ("exact", ["c"])},
    ),
    "a name that stayed while a parameter of the next node was folded in": Case(
        match_by_folding,
        """(float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}, float[2] v = {3.0, 4.0}>
            { t = Mul(x, w)  u = Mul(t, v)  y = Abs(u) }""",
        "(float[2] x) => (float[2] y) <float[2] n = {3.0, 8.0}> { t = Mul(x, n)  y = other.Abs(t) }",
        {"t": "a", "u": "b", "y": "c"},
        {"t": ("derived", ["b", "a"]), "y": ("derived", ["c"])},
    ),
    "a node that returned its input is gone, and the value before it has its name": Case(
        match_by_removal,
        """(float[2] x) => (float[2] y) { a = Abs(x)  b = Sin(a)  c = Neg(b)  d = Add(b, c)  y = Exp(d) }""",
        """(float[2] x) => (float[2] y) { a = Abs(x)  c = Sin(a)  d = Add(c, c)  y = Exp(d) }""",
        {"a": "a", "b": "b", "c": "c", "d": "d", "y": "e"},
        {"a": ("exact", ["a"]), "c": ("derived", ["c", "b"]), "d": ("exact", ["d"]), "y": ("exact", ["e"])},
    ),
    "of two nodes of one operator the second is gone, and the first gives its value": Case(
        match_by_removal,
        """(float[2] x) => (float[2] y) <float[2] w = {0.0, 0.0}>
            { a = Abs(x)  b = Add(a, x)  c = Add(b, w)  y = Exp(c) }""",
        "(float[2] x) => (float[2] y) { a = Abs(x)  c = Add(a, x)  y = Exp(c) }",
        {"a": "a", "b": "b", "c": "c", "y": "d"},
        {"a": ("exact", ["a"]), "c": ("exact", ["b"]), "y": ("exact", ["d"])},
    ),
    "a fused node takes what the operator in its name took": Case(
        match_by_fusion,
        "(float[2] x) => (float[2] y) { t = Exp(x)  u = Sin(t)  y = Abs(u) }",
        "(float[2] x) => (float[2] y) { n = other.Power(x)  y = other.SinAndAbs(n) }",
        {"t": "a", "u": "b", "y": "c"},
        {"n": ("derived", ["a"]), "y": ("derived", ["c", "b"])},
    ),
}  # fmt: skip


def traced(case: Case, walks: tuple[Walk, ...] = WALKS) -> Found:
    source, changed = (ir.from_proto(onnx.parser.parse_model(HEADER + text)) for text in (case.before, case.after))
    for node in all_nodes(source):
        set_owner(node, Owner((ModuleCall.parse(case.owners[node.outputs[0].name or ""]),), Evidence.EXACT))
    trace_owners(take_snapshot(source), changed, walks)
    return {
        node.outputs[0].name or "": (owner.evidence.value, [str(call) for call in owner.calls])
        for node in all_nodes(changed)
        if (owner := owner_of(node)) is not None
    }


def without(matcher: Matcher) -> tuple[Walk, ...]:
    return tuple(replace(walk, matchers=tuple(m for m in walk.matchers if m is not matcher)) for walk in WALKS)


@pytest.mark.parametrize("name", CASES)
def test_owners_are_found(name: str) -> None:
    assert traced(CASES[name]) == CASES[name].expected


@pytest.mark.parametrize("name", CASES)
def test_without_the_matcher_they_are_not(name: str) -> None:
    assert traced(CASES[name], without(CASES[name].matcher)) != CASES[name].expected


@pytest.mark.parametrize("operator", ["CastLike", "DepthToSpace", "ReverseSequence", "SpaceToDepth"])
def test_operators_that_tools_do_not_remove_are_not_skipped(operator: str) -> None:
    assert operator not in SKIPPED_WHEN_MATCHING


def test_every_matcher_has_a_case() -> None:
    assert {case.matcher for case in CASES.values()} == {matcher for walk in WALKS for matcher in walk.matchers}


NAMES = {
    "linear_3_quantized": ["linear_3"],
    "node_MatMul_46/MatMulAddFusion": ["val_46"],
    "reorder_token_linear_3": ["linear_3"],
    "linear_3": ["linear_3"],
    "linear_77": [],
    "linear_3quant_scaled_output": ["output"],
    "": [],
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_was_made_from(name: str) -> None:
    model = onnx.parser.parse_model(
        HEADER + "(float[2] x) => (float[2] output) { linear = Sin(x)  linear_3 = Sin(linear)"
        "  [node_MatMul_46] val_46 = Abs(linear_3)  output = Sin(val_46) }"
    )
    names = OriginalNames(take_snapshot(ir.from_proto(model)))
    assert list(names.candidates(name)) == NAMES[name]


@given(st.text("ab12_.:\u00e9 /\t", min_size=1, max_size=12))
def test_a_name_may_be_cut_off_before_each_gap_that_a_word_follows(name: str) -> None:
    parts = re.split(r"([^A-Za-z0-9]+)", name)  # words, and the gaps between them
    cuts = ["".join(parts[:gap]) for gap in range(1, len(parts), 2) if parts[gap + 1][:1].isalpha()]
    for known in (cuts[:number] for number in range(1, len(cuts) + 1)):
        source = SourceGraph((), dict.fromkeys(known, 0), {}, frozenset(), {})
        assert OriginalNames(source).find(name) == known[-1]


@pytest.mark.parametrize("name", ["_" * 50_000, "a_" * 100_000])
def test_the_time_for_a_name_is_linear_in_its_length(name: str) -> None:
    source = SourceGraph((), {"a": 0, "y": 0}, {}, frozenset(), {})
    begin = time.process_time()
    OriginalNames(source).find(name)
    assert time.process_time() - begin < 1  # quadratic: minutes


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=3), max_size=6), st.sets(st.integers(0, 5)))
def test_the_users_of_a_value_among_some_nodes(inputs: list[list[str]], among: set[int]) -> None:
    nodes = tuple(SourceNode(("", "Sum", ""), tuple(taken), (), None, {}) for taken in inputs)
    state = Matching(SourceGraph(nodes, {}, {}, frozenset(), {}), ir.Model(ir.Graph([], [], nodes=[]), ir_version=10))
    for name in ("a", "b", "a"):
        expected = [index for index in state.source.users.get(name, ()) if index in among]
        assert sorted(state.users_among(among, name)) == expected


def test_the_standard_operators_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Mock(wraps=onnx.defs.get_all_schemas)
    monkeypatch.setattr(onnx.defs, "get_all_schemas", listing)
    by_inputs_of_fused_nodes._standard_operators.cache_clear()
    assert [
        by_inputs_of_fused_nodes._operators_in(f"Fused{name}Of{len(name)}") for name in ("MatMul", "Conv", "None")
    ] == [
        {"MatMul"},
        {"Conv"},
        set(),
    ]
    assert listing.call_count == 1
