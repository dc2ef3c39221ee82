"""Each repair is in the table of docs/repairs.md, with a test that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("key", repaired(), ids=str)
def test_an_operator_has_one_row(key: Any) -> None:
    found = [name for row in OPERATORS for name in row if str(key) == name or str(key).startswith(f"{name}.")]
    assert len(found) == 1


@pytest.mark.parametrize("name", TABLE)
def test_a_private_name_has_one_row(name: str) -> None:
    assert sum(row.count(name) for row in PRIVATE) == 1


@pytest.mark.parametrize("test", sorted(set(re.findall(r"[\w/]+\.py::\w+", (ROOT / "docs/repairs.md").read_text()))))
def test_a_test_that_the_page_names_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "capture" / file
    assert f"def {name}(" in path.read_text()
