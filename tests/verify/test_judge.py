"""The basic claims, checked by a judge that shares no code with the project."""

from __future__ import annotations

import pytest

import judge
import models
from exports import Exporter

QUICK = ("blocks", "equal-values", "unet", "bert", "albert", "vit", "resnet")
NOT_JUDGED = {
    "condition": "its calls inside branches cannot be watched",
    "nested-branches": "its calls inside branches cannot be watched",
    "loop": "its calls inside the loop cannot be watched",
    "nested-structures": "its inputs are nested",
}
ALL = [case.name for case in models.CASES if case.name not in NOT_JUDGED]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL])
def test_outputs_parameters_and_tags_are_right_to_a_judge_of_their_own(name: str, exported: Exporter) -> None:
    export = exported(name)
    case = export.case
    assert judge.judge_outputs(case.build(), case.inputs(), export.path) > 0
    assert judge.judge_parameters(case.build(), export.path) > 0
    assert judge.judge_tags(case.build(), case.inputs(), export.path) > 0
