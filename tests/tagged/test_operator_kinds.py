"""What the sets of operators say is true of each of them, in onnx's reference implementation and its own test cases."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import onnx.defs
import onnx.parser
import pytest
from onnx.backend.test.case import node
from onnx.reference import ReferenceEvaluator

from modelexport.graph.operator_kinds import CASTS, KEEPS_ORDER, MOVES_ELEMENTS, QUANTIZERS, SELECTS_ELEMENTS

DATA = np.arange(1, 65, dtype=np.float32).reshape(1, 4, 4, 4)
EXAMPLES = {
    "Compress": "Compress<axis=1>(x, two)",
    "Concat": "Concat<axis=2>(x, x)",
    "DepthToSpace": "DepthToSpace<blocksize=2>(x)",
    "Expand": "Expand(x, sizes)",
    "Flatten": "Flatten<axis=2>(x)",
    "Gather": "Gather<axis=1>(x, places)",
    "GatherElements": "GatherElements<axis=1>(x, each)",
    "GatherND": "GatherND(x, pairs)",
    "Identity": "Identity(x)",
    "Reshape": "Reshape(x, shape)",
    "ReverseSequence": "ReverseSequence<batch_axis=1, time_axis=2>(x, lengths)",
    "Slice": "Slice(x, starts, ends, axes, steps)",
    "SpaceToDepth": "SpaceToDepth<blocksize=2>(x)",
    "Split": "Split<axis=1, num_outputs=2>(x)",
    "Squeeze": "Squeeze(x, first)",
    "Tile": "Tile(x, sizes)",
    "Transpose": "Transpose<perm=[3, 1, 0, 2]>(x)",
    "Unsqueeze": "Unsqueeze(x, first)",
}
CONSTANTS = f"""
    bool[4] two = {{1, 0, 1, 0}}, int64[4] sizes = {{2, 1, 1, 1}}, int64[3] places = {{3, 0, 0}},
    int64[1, 2, 4, 4] each = {{{", ".join("2" * 32)}}}, int64[2, 2] pairs = {{0, 1, 0, 3}},
    int64[2] shape = {{8, 8}}, int64[4] lengths = {{1, 2, 3, 4}}, int64[1] starts = {{3}}, int64[1] ends = {{-5}},
    int64[1] axes = {{1}}, int64[1] steps = {{-2}}, int64[1] first = {{0}}
"""


def elements(operator: str) -> list[float]:
    """The elements of the first result of an operator, in their order."""
    header = '<ir_version: 10, opset_import: ["": 21]> example (float[1, 4, 4, 4] x) => (float[] y)'
    results = "y, rest" if operator == "Split" else "y"
    model = onnx.parser.parse_model(f"{header} <{CONSTANTS}> {{ {results} = {EXAMPLES[operator]} }}")
    (array,) = ReferenceEvaluator(model).run(None, {"x": DATA})
    return np.asarray(array).reshape(-1).tolist()


@pytest.mark.parametrize("operator", sorted(SELECTS_ELEMENTS))
def test_results_have_elements_of_the_input_alone(operator: str) -> None:
    assert set(elements(operator)) <= set(DATA.reshape(-1).tolist())


@pytest.mark.parametrize("operator", sorted(MOVES_ELEMENTS))
def test_a_result_has_each_element_of_the_input_once(operator: str) -> None:
    assert sorted(elements(operator)) == sorted(DATA.reshape(-1).tolist())


@pytest.mark.parametrize("operator", sorted(KEEPS_ORDER))
def test_a_result_has_the_elements_in_their_order(operator: str) -> None:
    assert elements(operator) == DATA.reshape(-1).tolist()


@pytest.mark.parametrize("operator", sorted(MOVES_ELEMENTS - KEEPS_ORDER))
def test_an_operator_outside_of_those_that_keep_it_changes_the_order(operator: str) -> None:
    assert elements(operator) != DATA.reshape(-1).tolist()


@pytest.mark.parametrize("operator", sorted(SELECTS_ELEMENTS - MOVES_ELEMENTS))
def test_an_operator_outside_of_those_that_move_elements_leaves_out_or_repeats_some(operator: str) -> None:
    assert sorted(elements(operator)) != sorted(DATA.reshape(-1).tolist())


@pytest.mark.parametrize("operator", sorted(SELECTS_ELEMENTS | CASTS | QUANTIZERS))
def test_the_standard_has_each_operator(operator: str) -> None:
    assert onnx.defs.has(operator)


@pytest.mark.slow
def test_no_other_operator_of_the_standard_gives_each_element_once() -> None:
    moves: dict[str, list[bool]] = defaultdict(list)
    with warnings.catch_warnings(action="ignore"):
        cases = node.collect_testcases()
    for case in cases:
        nodes = [*case.model.graph.node] if case.model is not None else []
        for inputs, outputs in (case.data_sets or ()) if len(nodes) == 1 else ():
            arrays: list[Any] = [*inputs[:1], *outputs]
            if inputs and all(isinstance(array, np.ndarray) for array in arrays):
                first, *results = (sorted(map(repr, array.reshape(-1).tolist())) for array in arrays)
                moves[nodes[0].op_type].append(all(result == first for result in results))
    moves.pop("OptionalGetElement")  # what an optional holds, or the tensor itself
    assert len(moves) > 150
    assert {operator for operator, shown in moves.items() if all(shown)} == MOVES_ELEMENTS
