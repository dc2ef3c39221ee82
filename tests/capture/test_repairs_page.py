"""Each repair is in the table of docs/repairs.md, with a test that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from modelexport.capture.patches import TABLE
from modelexport.capture.repairs.decompositions import decompositions
from modelexport.capture.repairs.translations import overriding, translations

ROOT = Path(__file__).parents[2]
OPERATORS, PRIVATE = (
    [re.findall(r"`([^`]+)`", line.split(" | ")[0]) for line in part.splitlines() if line.startswith("| `")]
    for part in (ROOT / "docs" / "repairs.md").read_text().split("## ")[1:3]
)


def repaired() -> list[Any]:
    return [key for key in {**decompositions(), **translations(), **overriding()} if str(key).startswith("aten.")]


def test_each_operator_has_one_row() -> None:
    rows = {
        str(key): [name for row in OPERATORS for name in row if str(key) == name or str(key).startswith(f"{name}.")]
        for key in repaired()
    }
    assert {key: found for key, found in rows.items() if len(found) != 1} == {}


def test_each_private_name_has_one_row() -> None:
    assert {name for name in TABLE if sum(row.count(name) for row in PRIVATE) != 1} == set()


def test_each_row_has_a_test() -> None:
    lines = (ROOT / "docs" / "repairs.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `") and "test" not in line.split(" | ")[-1]] == []


def test_the_tests_that_the_page_names_are_there() -> None:
    def is_there(test: str) -> bool:
        file, _, name = test.partition("::")
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "capture" / file
        return f"def {name}(" in path.read_text()

    named = set(re.findall(r"[\w/]+\.py::\w+", (ROOT / "docs/repairs.md").read_text()))
    assert named
    assert {test for test in named if not is_there(test)} == set()
