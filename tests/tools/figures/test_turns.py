"""Two files in turns: what the noise allows to say."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import pytest

from modelexport.tables.profiles import time_in_turns
from modelexport.tables.turns import compare_turns, median_interval, run_in_turns, turns_line


def test_functions_run_in_turns_and_every_other_round_in_the_opposite_order() -> None:
    calls: list[str] = []

    def called(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    taken = run_in_turns([called("a"), called("b")], range(3))
    assert "".join(calls) == "abbaab"
    assert [len(times) for times in taken] == [3, 3]


def test_a_difference_beyond_the_noise_is_one_and_others_are_not() -> None:
    first = [100, 110, 90, 105, 95, 100, 120, 98, 101, 99]
    assert compare_turns(first, [taken * 2 for taken in first]).slower
    assert compare_turns(first, [taken // 2 for taken in first]).faster
    noisy = compare_turns(first, [90, 120, 100, 90, 120, 90, 110, 120, 90, 110])
    assert not noisy.faster
    assert not noisy.slower


def test_what_slows_both_files_down_does_not_count() -> None:
    """Half of the turns ran beside another program, three times as slow."""
    first = [100, 300, 101, 303, 99, 297, 100, 300, 102, 306]
    turns = compare_turns(first, [taken * 9 // 10 for taken in first])
    assert turns.faster
    assert turns.ratio == pytest.approx(0.9, abs=0.01)


def test_an_interval_of_the_median_contains_it_as_often_as_is_said() -> None:
    draw = random.Random(0)
    samples = [[draw.lognormvariate(0, 1) for _ in range(10)] for _ in range(2000)]
    found = [median_interval(values) for values in samples]
    contained = [least <= 1 <= most for least, most in (interval for interval in found if interval is not None)]
    # Ten values: between the second and the ninth, for which the binomial distribution gives 97.9 %.
    assert statistics.mean(contained) == pytest.approx(1 - 22 / 1024, abs=0.01)


@pytest.mark.parametrize(("count", "known"), [(1, False), (5, False), (6, True)])
def test_fewer_than_six_turns_rank_nothing(count: int, known: bool) -> None:
    turns = compare_turns([1] * count, [9] * count)
    assert turns.slower == known
    assert turns_line(turns, "a", "b").startswith("too few turns to rank" if not known else "b takes 9 times as long")


def test_a_line_says_which_file_is_slower_or_that_the_noise_does_not_allow_to(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["": 17]> g (float[100,100] x) => (float[100,100] y)'
    steps = "".join(f"s{step + 1} = MatMul (s{step}, x) " for step in range(60))
    for name, body in {"a": "{ y = MatMul (x, x) }", "b": f"{{ s0 = Relu (x) {steps} y = Relu (s60) }}"}.items():
        onnx.save(onnx.parser.parse_model(f"{header} {body}"), tmp_path / f"{name}.onnx")
    slow = time_in_turns(tmp_path / "a.onnx", tmp_path / "b.onnx", runs=20)
    assert slow.slower
    assert turns_line(slow, "a", "b").startswith("b takes ")
    same = compare_turns([100, 101] * 5, [101, 100] * 5)
    assert turns_line(same, "a", "b").startswith("too noisy to rank: b takes 1 times as long")
