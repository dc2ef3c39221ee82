"""Traces of files: walked, matched and given PyTorch's numbers, on small graphs and without torch."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest

from modelexport import traces
from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.errors import UsageError
from modelexport.format.documents import TransformStep
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.node_owners import set_owner
from modelexport.graph.parameter_plans import record_plan
from modelexport.traces.array_differences import compare_arrays, compare_outputs, relative_error
from modelexport.traces.file_run import FileRun
from modelexport.traces.file_trace import exact_constants, is_moved_parameter, measure_noise, trace_file
from modelexport.traces.fingerprints import fingerprint_of
from modelexport.traces.node_computation import NodeError, nudge
from modelexport.traces.numpy_kernels import erf
from modelexport.traces.tied_indices import chosen_axis, is_tie
from modelexport.traces.trace import Choice, Index, Trace

NUMBERS = np.random.default_rng(0).standard_normal((3, 5))


def graph(text: str) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')


def value_named(model: ir.Model, name: str) -> ir.Value:
    return next(value for node in model.graph.all_nodes() for value in node.outputs if value.name == name)


@pytest.mark.parametrize(
    ("operator", "is_moved"),
    [("Reshape", True), ("Flatten", True), ("Expand", True), ("Gather", True), ("Cast", False), ("Mul", False)],
)
def test_a_constant_has_the_numbers_of_a_parameter_if_only_its_elements_are_moved(
    operator: str, is_moved: bool
) -> None:
    value = ir.val("w", const_value=ir.tensor(NUMBERS))
    record_plan(value, ParameterPlan(["w"], [TransformStep("Constant"), TransformStep(operator, ["w", "%0"], {}, 13)]))
    assert is_moved_parameter(value) is is_moved


# --- a file is run ----------------------------------------------------------------------------------------------------


def test_a_wide_run_computes_in_float64_from_the_numbers_of_the_file() -> None:
    model = graph("g (float[2] x) => (float[2] y) <float[2] w = {0.1, 3}> { z = Cast <to = 1> (x)  y = Mul (z, w) }")
    x = np.array([1 / 3, 2], np.float32)
    y = FileRun(model, in_float64_for="float32").run({"x": x})["y"]
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, x.astype(np.float64) * np.array([0.1, 3], np.float32).astype(np.float64))


def test_a_conversion_to_a_narrower_type_rounds() -> None:
    model = graph("g (float[1] x) => (float[1] y) { h = Cast <to = 10> (x)  y = Cast <to = 1> (h) }")
    y = FileRun(model, in_float64_for="float32").run({"x": np.array([0.1], np.float32)})["y"]
    assert y == np.float64(np.float16(0.1))


@pytest.mark.parametrize("positive", [True, False])
def test_both_branches_are_seen_and_one_is_taken(positive: bool) -> None:
    model = graph(
        "g (float[2] x, bool c) => (float[2] y) { y = If (c) <"
        "then_branch = t () => (float[2] a) { a = Neg (x) }, else_branch = e () => (float[2] b) { b = Abs (x) }> }"
    )
    x, seen = np.array([1.5, -2.5], np.float32), []

    def watch(node: ir.Node, given: Any, value: ir.Value, array: Any) -> Any:
        seen.append(value.name)
        return array

    run = FileRun(model, in_float64_for="float32").run({"x": x, "c": np.array(positive)}, watch)
    np.testing.assert_array_equal(run["y"], -x if positive else np.abs(x))
    assert sorted(seen) == ["a", "b", "y"]


def test_a_loop_is_walked_and_each_iteration_is_seen() -> None:
    model = graph(
        "g (float[2] x, int64 n) => (float[2] y, float[k, 2] all) <bool go = {1}> { y, all = Loop (n, go, x) <"
        "body = b (int64 i, bool c, float[2] h) => (bool d, float[2] k, float[2] each) "
        "{ d = Identity (c)  k = Add (h, x)  each = Neg (k) }> }"
    )
    x = np.array([0.5, 1.25])
    trace = trace_file(FileRun(model, in_float64_for="float32"), {"x": x, "n": np.array(3)}, Trace())
    np.testing.assert_array_equal(trace.outputs["y"], 4 * x)
    np.testing.assert_array_equal(trace.outputs["all"], [-2 * x, -3 * x, -4 * x])
    prints = trace.prints[value_named(model, "k")]
    assert [one.equal_in_order(fingerprint_of(n * x)) for one, n in zip(prints, (2, 3, 4), strict=True)] == [True] * 3


def test_a_value_that_only_a_loop_uses_is_there_in_each_iteration() -> None:
    model = graph(
        "g (float[2] x, int64 n) => (float[2] y) <bool go = {1}> { a = Mul (x, x)  y = Loop (n, go, x) <"
        "body = b (int64 i, bool c, float[2] h) => (bool d, float[2] k) { d = Identity (c)  k = Add (h, a) }> }"
    )
    x = np.array([0.5, 1.25])
    found = FileRun(model, in_float64_for="float32").run({"x": x, "n": np.array(3)})
    np.testing.assert_array_equal(found["y"], x + 3 * x * x)


def test_a_scan_is_walked_in_both_directions() -> None:
    model = graph(
        "g (float[2] s, float[3, 2] x) => (float[2] t, float[3, 2] y) { t, y = Scan "
        "<num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1], "
        "body = b (float[2] h, float[2] one) => (float[2] k, float[2] each) "
        "{ k = Add (h, one)  each = Identity (k) }> (s, x) }"
    )
    x = np.arange(6.0).reshape(3, 2)
    found = FileRun(model, in_float64_for="float32").run({"s": np.zeros(2), "x": x})
    np.testing.assert_array_equal(found["t"], x.sum(0))
    np.testing.assert_array_equal(found["y"], np.cumsum(x[::-1], 0)[::-1])


def test_some_values_are_computed_from_others() -> None:
    model = graph("g (float[2] x) => (float[2] y) { a = Neg (x)  b = Exp (a)  y = Add (b, a) }")
    a, b, y = (value_named(model, name) for name in "aby")
    found = FileRun(model, in_float64_for="float32").values([b, y], {a: np.zeros(2), b: np.full(2, 5.0)})
    np.testing.assert_array_equal(found, [[1, 1], [5, 5]])


def test_a_node_that_cannot_be_computed_ends_a_trace_and_is_named() -> None:
    model = graph("g (float[2] x) => (float[2] y) <float[3] w = {1, 2, 3}> { y = Add (x, w) }")
    trace = trace_file(FileRun(model, in_float64_for="float32"), {"x": np.zeros(2)}, Trace())
    assert isinstance(trace.failed, NodeError)
    assert trace.failed.node.op_type == "Add"


def test_an_input_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="input x"):
        FileRun(graph("g (float[2] x) => (float[2] y) { y = Neg (x) }"), in_float64_for="float32").run({})


def test_an_operator_of_a_runtime_is_run_by_it_in_float64_if_it_can_be() -> None:
    model = graph(
        "g (float[2, 4] x, float[4] b) => (float[2, 4] y, float[2, 4] z) "
        "{ y = com.microsoft.QuickGelu (x)  z = com.microsoft.BiasGelu (x, b) }"
    )
    model.opset_imports["com.microsoft"] = 1
    run = FileRun(model, in_float64_for="float32")
    x = NUMBERS[:2, :4]
    found = run.run({"x": x, "b": np.zeros(4)})
    assert relative_error(x / (1 + np.exp(-float(np.float32(1.702)) * x)), found["y"]) < 1e-14
    assert relative_error(x * (0.5 + 0.5 * erf(x * 0.5**0.5)), found["z"]) < 1e-6
    assert run.nodes.by_runtime == {"BiasGelu", "QuickGelu"}  # a function, whose numbers inside are rounded


def test_a_node_that_nothing_computes_says_nothing_about_the_file() -> None:
    """ONNX Runtime computes what onnx does not: scalars of rank 0, negative pads. What neither does is not compared."""
    model = graph(
        "g (float[1, 3, 4] boxes, float[1, 1, 3] scores) => (int64[n, 3] y, float[1, 1, 2] z, float[1, 1, 2] w) "
        "<int64 k = {3}, float t = {0.5}, int64[6] p = {0, 0, -1, 0, 0, 0}> "
        "{ y = NonMaxSuppression (boxes, scores, k, t)  z = Pad (scores, p)  w = com.microsoft.Nothing (z) }"
    )
    model.opset_imports["com.microsoft"] = 1
    boxes = np.array([[[0.0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]]])
    trace = trace_file(
        FileRun(model, in_float64_for="float32"), {"boxes": boxes, "scores": NUMBERS[:1, None, :3]}, Trace()
    )
    assert [value.name for value in trace.prints] == ["boxes", "scores", "y", "z"]
    assert trace.failed is not None
    assert trace.failed.of_evaluator


# --- arrays are told apart --------------------------------------------------------------------------------------------


def test_long_arrays_are_told_apart_by_their_order() -> None:
    long = np.random.default_rng(1).standard_normal(200_001)
    its = fingerprint_of(long)
    assert its.equal_in_order(fingerprint_of(long * (1 + 1e-12)))
    for other in (np.roll(long, 1), np.roll(long, 1 << 16), long[::-1]):
        assert its.equal_in_any_order(fingerprint_of(other))
        assert not its.equal_in_order(fingerprint_of(other))
    apart = fingerprint_of(long + 0.1 * np.random.default_rng(2).standard_normal(long.size)).distance(its)
    assert 0.01 < apart < 1


# --- values are replaced ----------------------------------------------------------------------------------------------


def test_what_follows_a_replaced_value_is_computed_from_the_right_one() -> None:
    model = graph("g (float[2] x) => (float[2] y) { a = Neg (x)  y = Exp (a) }")
    a, x = value_named(model, "a"), np.array([1.0, 2.0])
    trace = trace_file(FileRun(model, in_float64_for="float32"), {"x": x}, Trace(), replace={a: 2 * x})
    np.testing.assert_array_equal(trace.outputs["y"], np.exp(2 * x))
    assert trace.replaced == {a: 1.5}
    assert trace.prints[a][0].equal_in_order(fingerprint_of(-x))


TOP = "g (float[4] x) => (float[2] v, int64[2] i) <int64[1] k = {2}> { v, i = TopK (x, k) }"


def test_among_equal_scores_a_file_gets_the_choice_of_the_model() -> None:
    model, x = graph(TOP), np.array([0.5, 0.25, 0.5, 0.5])
    truth = Trace(choices=[Choice(x, np.array([3, 2]))])
    trace = trace_file(FileRun(model, in_float64_for="float32"), {"x": x}, truth)
    np.testing.assert_array_equal(trace.outputs["i"], [3, 2])
    assert [node.op_type for node in trace.ties] == ["TopK"]


def test_a_choice_of_lower_scores_is_not_a_tie() -> None:
    model, x = graph(TOP), np.array([0.5, 0.25, 0.5, 0.75])
    trace = trace_file(FileRun(model, in_float64_for="float32"), {"x": x}, Trace(choices=[Choice(x, np.array([3, 1]))]))
    np.testing.assert_array_equal(trace.outputs["i"], [3, 0])
    assert not trace.ties


def test_ties_are_of_any_axis_and_in_the_order_of_the_scores() -> None:
    scores = np.array([[1.0, 3, 3, 2], [5, 5, 5, 5]])
    assert chosen_axis(scores, np.array([[1, 2], [0, 1]])) == 1
    assert chosen_axis(scores, np.array([1, 1, 1, 1])) == 0
    assert chosen_axis(scores, np.array([[1, 3], [0, 1]])) is None
    assert is_tie(scores, scores, np.array([[1, 2], [0, 1]]), np.array([[2, 1], [3, 2]]))
    assert not is_tie(scores, scores, np.array([[1, 2], [0, 1]]), np.array([[1, 3], [0, 1]]))
    assert not is_tie(scores, scores, np.array([[1, 2], [0, 1]]), np.array([[1, 1], [0, 1]]))


def test_random_numbers_are_those_of_the_model() -> None:
    model = graph("g (float[3] x) => (float[3] y) { r = RandomNormalLike (x)  y = Add (x, r) }")
    for node in model.graph:
        set_owner(node, Owner((ModuleCall("a", 0),)))
    x, drawn = np.zeros(3), np.array([0.5, 1.5, 2.5])
    with_numbers = trace_file(
        FileRun(model, in_float64_for="float32"), {"x": x}, Trace(random_numbers=[(ModuleCall("a", 0), drawn)])
    )
    np.testing.assert_array_equal(with_numbers.outputs["y"], drawn)
    assert not with_numbers.random
    others = trace_file(
        FileRun(model, in_float64_for="float32"), {"x": x}, Trace(random_numbers=[(ModuleCall("b", 0), drawn)])
    )
    assert {value.name for value in others.random} == {"r", "y"}


# --- constants are rounded --------------------------------------------------------------------------------------------


def computed_in(truth: Trace, array: Any) -> None:
    truth.contents.add(array, keep=True).computed[ModuleCall("b", 0)] = None


def test_a_constant_that_is_a_rounded_result_is_replaced_by_it() -> None:
    model = graph("g (float[2] x) => (float[2] y) { w = Constant <value = float[2] {0.1, 0.7}> ()  y = Mul (x, w) }")
    truth, exact = Trace(), np.array([0.1, 0.7])
    computed_in(truth, exact)
    run = FileRun(model, in_float64_for="float32")
    (found,) = exact_constants(run, truth, {}).items()
    assert found[0].name == "w"
    np.testing.assert_array_equal(found[1], exact)


def test_a_small_element_may_be_rounded_as_the_large_ones_are() -> None:
    """A sine near zero is as exact as its angle."""
    model = graph(
        "g (float[2] x) => (float[2] y) { w = Constant <value = float[2] {1.0, -8.7e-8}> ()  y = Mul (x, w) }"
    )
    truth, exact = Trace(), np.array([1.0, 1.2e-16])
    computed_in(truth, exact)
    (found,) = exact_constants(FileRun(model, in_float64_for="float32"), truth, {}).values()
    np.testing.assert_array_equal(found, exact)


def test_a_constant_computed_from_a_parameter_and_a_rounded_result_is_replaced() -> None:
    model = graph("g (float[2] x) => (float[2] y) <float[2] w = {9, 9}> { y = Mul (x, w) }")
    truth, exact = Trace(), np.array([0.1, 0.7])
    truth.contents.add(exact * (1 + 2.0**-24), keep=True)  # an input, as the weight of a fresh weight normalization
    computed_in(truth, exact)
    run = FileRun(model, in_float64_for="float32")
    computed = {model.graph.initializers["w"]: exact.astype(np.float32).astype(np.float64)}
    (found,) = exact_constants(run, truth, computed).values()
    np.testing.assert_array_equal(found, exact)


def test_noise_is_what_rounding_constants_otherwise_changes() -> None:
    model = graph("g (float[2] x) => (float[2] y) <float[2] w = {0.1, 0.7}> { z = Exp (x)  y = Mul (z, w) }")
    run, x = FileRun(model, in_float64_for="float32"), np.array([0.3, 0.4])
    noise, _ = measure_noise(run, {"x": x}, Trace(), trace_file(run, {"x": x}, Trace()), constants={})
    assert noise[value_named(model, "z")] == 0
    assert 2.0**-28 < noise[value_named(model, "y")] < 2.0**-22


def test_numbers_of_few_digits_are_not_nudged() -> None:
    array = np.array([3.0, 0.5, 0.1, -np.inf, 0.0])
    nudged = nudge(array, 2.0**-20, np.random.default_rng(0))
    assert (nudged != array).tolist() == [False, False, True, False, False]
    assert nudged[2] == pytest.approx(0.1, rel=2e-6)


def test_a_small_number_of_float16_is_nudged_by_its_rounding() -> None:
    small = np.array([1e-5], np.float16).astype(np.float64)  # five digits of two are left of it
    assert nudge(small, 2.0**-11, np.random.default_rng(0)) == small
    nudged = nudge(small, 2.0**-11, np.random.default_rng(0), smallest=2.0**-14)
    assert 2.0**-26 <= abs(nudged - small)[0] <= 2.0**-25


# --- contents are found -----------------------------------------------------------------------------------------------


def test_an_array_is_the_same_in_any_shape_and_alike_in_any_order() -> None:
    one = fingerprint_of(NUMBERS)
    assert one.equal_in_order(fingerprint_of(NUMBERS.reshape(-1, 1)))
    assert one.equal_in_order(fingerprint_of(NUMBERS * (1 + 1e-11)))
    assert not one.equal_in_order(fingerprint_of(NUMBERS.T))
    assert one.equal_in_any_order(fingerprint_of(NUMBERS.T))


@pytest.mark.parametrize(
    "other",
    [NUMBERS * (1 + 1e-7), -NUMBERS, NUMBERS[:2], NUMBERS + 1e-7, np.where(NUMBERS > 1, np.nan, NUMBERS)],
    ids=["scaled", "negated", "fewer", "moved", "NaN"],
)
def test_another_array_is_neither(other: Any) -> None:
    assert not fingerprint_of(NUMBERS).equal_in_any_order(fingerprint_of(other))


def test_one_element_of_many_is_not_overlooked() -> None:
    array = np.random.default_rng(1).standard_normal(100_000)
    other = array.copy()
    other[77] += 1e-3
    assert not fingerprint_of(array).equal_in_order(fingerprint_of(other))


def test_infinities_and_the_numbers_of_a_mask_are_the_same() -> None:
    masks = [np.array([0.5, -np.inf]), np.array([0.5, -3.4e38]), np.array([0.5, -1.7e308])]
    assert all(fingerprint_of(masks[0]).equal_in_order(fingerprint_of(one)) for one in masks)
    assert not fingerprint_of(masks[0]).equal_in_order(fingerprint_of(-masks[0]))


def test_whole_numbers_do_not_tell_arrays_apart() -> None:
    assert not fingerprint_of(np.array([1.0, 2.0])).telling
    assert not fingerprint_of(np.array([1, 2])).telling
    assert not fingerprint_of(np.zeros((0, 3))).telling
    assert fingerprint_of(np.array([1.0, 2.5])).telling


def test_an_index_finds_what_one_by_one_finds() -> None:
    generator, index = np.random.default_rng(2), Index()
    arrays = [generator.standard_normal(4) for _ in range(40)]
    contents = [index.add(one) for one in arrays]
    assert index.add(arrays[3].reshape(2, 2)) is contents[3]
    for array, content in zip(arrays, contents, strict=True):
        assert index.equal_in_order(fingerprint_of(array * (1 + 1e-12))) == [content]
        assert index.equal_in_any_order(fingerprint_of(array[::-1])) == [content]
        assert not index.equal_in_order(fingerprint_of(array[::-1]))
        assert index.equal_in_order(fingerprint_of(array * 1.001), 1e-2) == [
            one for one in contents if one.fingerprint.equal_in_order(fingerprint_of(array * 1.001), 1e-2)
        ]


def test_an_index_keeps_copies_of_arrays_that_it_is_asked_to_keep() -> None:
    index, array = Index(), NUMBERS.copy()
    assert index.add(array).array is None
    content = index.add(array, keep=True)
    array[0, 0] = 7
    np.testing.assert_array_equal(content.array, NUMBERS)


# --- arrays are compared ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "found", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([3e-20, 4e-20], [3e-20, 4.5e-20], 0.1),
        ([3.0, 4.0, -np.inf], [3.0, 4.5, -3.4e38], 0.1),
        ([1.0, np.inf], [1.0, -np.inf], np.inf),
        ([1.0, np.inf], [1.0, 2.0], np.inf),
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1.0, 2.0], [1.0, np.nan], np.inf),
        ([0.0, 0.0], [0.0, 1e-30], np.inf),
        ([1.0, 2.0], [[1.0, 2.0]], np.inf),
    ],
)
def test_the_error_is_relative_to_the_size_and_nothing_hides(right: Any, found: Any, error: float) -> None:
    assert relative_error(np.array(right), np.array(found)) == pytest.approx(error)


def test_other_types_shapes_and_counts_are_differences() -> None:
    array = np.ones((2, 3), np.float32)
    assert compare_arrays("y", array, array).status == "agree"
    assert "float64" in compare_arrays("y", array, array.astype(np.float64)).reason
    assert "[3, 2]" in compare_arrays("y", array, array.T).reason
    assert compare_arrays("y", array, array * np.nan).nans == 6
    assert compare_arrays("y", np.array([1, 2]), np.array([1, 3])).reason == "1 of 2 elements differ"
    assert [one.status for one in compare_outputs(["a"], [array], [array, array])] == ["agree", "differ"]
    assert [one.status for one in compare_outputs(["a"], [array, array], [array])] == ["agree", "differ"]
    assert [one.status for one in compare_outputs(["a"], [array, array[:0]], [array])] == ["agree"]


def test_a_type_with_fewer_digits_may_be_off_by_more() -> None:
    for dtype, agrees in (("float64", False), ("float32", False), ("float16", True)):
        right = NUMBERS.astype(dtype)
        assert (compare_arrays("y", right, (right * 1.004).astype(dtype)).status == "agree") is agrees


def test_traces_of_files_and_updates_of_weights_need_no_torch() -> None:
    names = [module.name for module in pkgutil.iter_modules(traces.__path__)]
    assert "file_run" in names
    modules = [f"modelexport.{name}" for name in ("weights.weight_updates", *(f"traces.{name}" for name in names))]
    for module in modules:
        importlib.import_module(module)  # libraries are not imported anew
    others = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "modelexport"}
    with mock.patch.dict(sys.modules, {**others, "torch": None}, clear=True):  # importing torch fails
        for module in modules:
            importlib.import_module(module)
