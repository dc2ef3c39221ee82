"""`scripts/versions`: which combinations of versions it runs the tests with."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def versions() -> Any:
    loader = SourceFileLoader("scripts_versions", str(ROOT / "scripts" / "versions"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def test_the_last_release_of_each_minor_version_in_a_range_counts(versions: Any) -> None:
    found = ["2.16.0", "2.15.0", "2.15.0rc1", "2.14.1", "2.14.0", "2.13.0+cpu", "2.13.0", "2.12.1"]
    assert versions.within(found, ">=2.13,<2.16") == ["2.13.0", "2.14.1", "2.15.0"]
    with pytest.raises(SystemExit, match="pip knows no version"):
        versions.within(found, ">=3,<4")


def test_the_ends_of_every_range_and_every_python_have_a_row(versions: Any) -> None:
    pinned = versions.pinned()
    names = ["torch", "transformers", "onnxscript", "onnxruntime"]
    available = {name: [pinned[name], "98.0", "99.0"] for name in names}
    rows = versions.rows(["3.11", "3.14"], available)
    newest = dict.fromkeys(names, "99.0")
    assert rows[0] == versions.Row("3.11", {name: pinned[name] for name in names})
    assert {row.python for row in rows if row.versions == newest} == {"3.11", "3.14"}
    for name in names:
        assert versions.Row("3.11", newest | {name: pinned[name]}) in rows
    assert versions.Row("3.11", newest | {"torch": "98.0"}) in rows
    assert len({str(row) for row in rows}) == len(rows)


def test_the_tested_ranges_contain_the_pinned_versions(versions: Any) -> None:
    for package, limits in versions.tested().items():
        assert versions.within([versions.pinned()[package]], limits)


def test_the_folders_of_tests_exist(versions: Any) -> None:
    assert all((ROOT / folder).is_dir() for folder in versions.TESTS)
