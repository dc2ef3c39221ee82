"""Selectors pick module calls: addresses, globs, tags, classes, their union, and exclusions."""

from __future__ import annotations

import pytest

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.selectors import Selection, find_call, nearest_selectors, select_calls
from modelexport.errors import UsageError

CALLS = {
    "": ("", "/Net"),
    "embed": ("", "/Net/Embedding"),
    "encoder": ("", "/Net/Encoder"),
    **{f"encoder.layer.{i}": ("encoder", f"/Net/Encoder/Layer.{i}") for i in range(12)},
    **{f"encoder.layer.{i}.mlp": (f"encoder.layer.{i}", f"/Net/Encoder/Layer.{i}/Mlp") for i in range(12)},
    **{
        f"encoder.layer.{i}.mlp.down_proj": (f"encoder.layer.{i}.mlp", f"/Net/Encoder/Layer.{i}/Mlp/Linear")
        for i in range(12)
    },
    "shared": ("", "/Net/Block"),
    "shared@1": ("", "/Net/Block@1"),
    "head": ("", "/Net/Head"),
    "head.down_proj": ("head", "/Net/Head/Linear"),
}


def tree() -> tuple[CallTree, dict[ModuleCall, str]]:
    calls: list[TracedCall] = []

    def add(address: str, depth: int) -> None:
        parent = None if address == "" else ModuleCall.parse(CALLS[address][0])
        calls.append(TracedCall(ModuleCall.parse(address), parent, depth, None, None))
        for below, (above, _) in CALLS.items():
            if below and above == address:
                add(below, depth + 1)

    add("", 0)
    return CallTree(tuple(calls)), {ModuleCall.parse(address): tag for address, (_, tag) in CALLS.items()}


def select(*selectors: str) -> Selection:
    return select_calls(selectors, *tree(), where="net.onnx")


def named(*selectors: str) -> set[str]:
    return {str(call) for call in select(*selectors).calls}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (".", {"."}),
        ("encoder.layer.3", {"encoder.layer.3"}),
        ("encoder.layer.[0-3]", {f"encoder.layer.{i}" for i in range(4)}),
        ("encoder.layer.[9-11]", {f"encoder.layer.{i}" for i in (9, 10, 11)}),
        ("encoder.layer.[!0-8]", {"encoder.layer.9"}),
        ("encoder.layer.?", {f"encoder.layer.{i}" for i in range(10)}),
        ("encoder.layer.1*", {f"encoder.layer.{i}" for i in (1, 10, 11)}),
        ("encoder.*", set()),
        ("encoder.layer.[2-3].*", {"encoder.layer.2.mlp", "encoder.layer.3.mlp"}),
        ("encoder.layer.2.**", {"encoder.layer.2.mlp", "encoder.layer.2.mlp.down_proj"}),
        ("encoder.**.down_proj", {f"encoder.layer.{i}.mlp.down_proj" for i in range(12)}),
        ("*.down_proj", {f"encoder.layer.{i}.mlp.down_proj" for i in range(12)} | {"head.down_proj"}),
        ("*", {"embed", "encoder", "shared", "shared@1", "head"}),
        ("shared", {"shared"}),
        ("shared@1", {"shared@1"}),
        ("share*", {"shared", "shared@1"}),
        ("shared@*", {"shared", "shared@1"}),
        ("shared@[1-5]", {"shared@1"}),
        ("/Net/Head", {"head"}),
        ("/Net/Encoder/Layer.[0-1]", {"encoder.layer.0", "encoder.layer.1"}),
        ("/Net/**/Linear", {f"encoder.layer.{i}.mlp.down_proj" for i in range(12)} | {"head.down_proj"}),
        ("class:Layer", {f"encoder.layer.{i}" for i in range(12)}),
        ("class:H*", {"head"}),
        ("layer.3", {"encoder.layer.3"}),
        ("Head", {"head"}),
    ],
)
def test_one_selector(selector: str, expected: set[str]) -> None:
    if expected:
        assert named(selector) == expected
    else:
        with pytest.raises(UsageError, match=r"no module call of net\.onnx matches"):
            select(selector)


def test_several_are_a_union_in_the_order_of_the_calls() -> None:
    assert [str(call) for call in select("head", "embed", "class:Embedding").calls] == ["embed", "head"]


def test_a_module_includes_everything_inside() -> None:
    assert {str(call) for call in select("encoder.layer.0").inside} == {
        "encoder.layer.0",
        "encoder.layer.0.mlp",
        "encoder.layer.0.mlp.down_proj",
    }


def test_an_exclamation_mark_removes_calls_in_any_position() -> None:
    assert named("!encoder.layer.0", "encoder.layer.[0-1]") == {"encoder.layer.1"}
    without = select("encoder.layer.0", "!*.mlp")
    assert {str(call) for call in without.calls} == {"encoder.layer.0"} == {str(call) for call in without.inside}
    assert ModuleCall("encoder.layer.0.mlp") not in without


def test_without_selectors_or_with_exclamation_marks_only_it_begins_with_all() -> None:
    calls, _ = tree()
    assert select().inside == {traced.call for traced in calls}
    assert {str(call) for call in select("!encoder", "!head").inside} == {".", "embed", "shared", "shared@1"}


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("encoder.layers.3", "did you mean encoder.layer.3"),
        ("/Net/Heads", "did you mean /Net/Head"),
        ("class:Embeding", "net.onnx has no class 'Embeding'; did you mean Embedding"),
        ("encoder.layers.*", "no module call of net.onnx matches 'encoder.layers.*'; did you mean encoder.layer"),
        ("!encoder.layers.3", "did you mean encoder.layer.3"),
        ("*.layer.99", r"did you mean \*\.layer\.\d"),
        ("Layer", "'Layer' is ambiguous in net.onnx: it could be encoder.layer.0, .* and 7 more; give one of these"),
        ("encoder.layer.[3-1]", "is not a range"),
        ("encoder.layer.[z-a]", "is not a glob: bad character range"),
        ("shared@2", "did you mean shared@1"),
        ("", "a selector is empty"),
        ("!", "a selector is empty"),
    ],
)
def test_what_matches_nothing_is_an_error_that_offers_near_names(selector: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(selector)


def test_what_was_given_is_not_offered() -> None:
    assert nearest_selectors("**", {"."}) == ""
    known = {"0.model.encoder.layer.5", "0.model.encoder.layer.5.dense"}
    assert nearest_selectors("layer.9", known) == "; did you mean *.layer.5?"


def test_removing_everything_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"leaves no module of net\.onnx"):
        select("embed", "!embed")


def test_a_key_with_the_letters_of_a_glob_is_found_by_its_address() -> None:
    root, odd = ModuleCall(""), ModuleCall("blocks.a*[1]")
    calls = CallTree((TracedCall(root, None, 0, None, None), TracedCall(odd, root, 1, None, None)))
    tags = {root: "/Net", odd: "/Net/Block"}
    assert select_calls(["blocks.a*[1]"], calls, tags).calls == (odd,)
    assert find_call("Block", tags) == odd
