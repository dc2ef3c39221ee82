"""``verify A --against B``: a loss is a number only where the numbers of both files are finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from graph_texts import written
from modelexport import verify_against
from modelexport.errors import UsageError

SCALED = """g (float[2,2] x) => (float[2,2] y) <float[2] w = {1, 1}, float[2] s = {1, %s}>
    { ["/a/Mul"] h = Mul(x, w) ["/b/Mul"] i = Mul(h, s) ["/b/Mul_1"] y = Mul(i, s) }"""


def test_an_output_with_one_infinite_element_is_within_no_bound(tmp_path: Path) -> None:
    right, wrong = (written(tmp_path / f"{factor}.onnx", SCALED % factor) for factor in ("1", "1e38"))
    report = verify_against(right, wrong, bound=0.05)
    assert (report.verdict, report.outputs[0].norm, report.first_beyond) == ("differ", None, "b")


@pytest.mark.parametrize(("factor", "status"), [("1", "agree"), ("2", "differ")])
def test_a_call_has_the_loss_of_its_own_output_behind_one_that_is_a_sequence(
    tmp_path: Path, factor: str, status: str
) -> None:
    text = """g (float[2,2] x) => (seq(float[2,2]) z, float[2,2] y) <float s = {%s}>
        { ["/a/SequenceConstruct"] z = SequenceConstruct(x, x, x) ["/b/Mul"] y = Mul(x, s) }"""
    first, second = (written(tmp_path / f"{name}.onnx", text % name) for name in ("1", factor))
    assert verify_against(first, second)["b"].status == status


@pytest.mark.parametrize("bound", [float("nan"), -1, float("inf")])
def test_what_is_not_a_bound_is_refused(tmp_path: Path, bound: float) -> None:
    file = written(tmp_path / "file.onnx", SCALED % "1")
    with pytest.raises(UsageError, match="is not a bound: give a share"):
        verify_against(file, file, bound=bound)
