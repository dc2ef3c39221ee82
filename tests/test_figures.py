"""The tables of figures in the documentation are made by scripts, and the page says by which."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)
FIGURE = re.compile(r"[\d.,]+(e-?\d+)?( ?(%|s|ms|MB|GB))?")
DEFINED = (
    "| type | unit | tolerance |",
    "| Python | torch | transformers | ONNX Runtime | what was run |",
)
"""Heads of tables whose figures are not measured."""


def load_tables() -> Any:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load_tables()
by_page = pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)


def of_figures(table: str) -> bool:
    """Whether at least half of the rows have two figures."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return sum(sum(bool(FIGURE.fullmatch(cell)) for cell in row) >= 2 for row in rows) * 2 >= len(rows) > 0


def unmarked(text: str) -> list[str]:
    """The heads of tables of figures that no script makes."""
    heads = [table.splitlines()[0] for table in TABLE.findall(tables.MARKED.sub("", text)) if of_figures(table)]
    return [head for head in heads if head not in DEFINED]


@by_page
def test_every_marker_names_a_script_and_holds_a_table(page: Path) -> None:
    text = page.read_text()
    found = list(tables.MARKED.finditer(text))
    assert len(found) == text.count("<!-- figures:") == text.count("<!-- end -->")
    for marked in found:
        assert (ROOT / "benchmarks" / marked["command"].split()[0]).is_file()
        assert TABLE.match(marked["table"].strip() + "\n"), marked["command"]


@by_page
def test_no_table_of_figures_is_without_a_script(page: Path) -> None:
    assert unmarked(page.read_text()) == []


def test_a_table_of_figures_is_seen() -> None:
    assert unmarked("| model | seconds | MB |\n|---|---|---|\n| bert | 1.2 | 3,400 |\n") == ["| model | seconds | MB |"]


def test_make_bench_runs_every_script_of_a_table() -> None:
    bench = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    scripts = {command[0] for page in tables.PAGES for command in tables.commands_of(page.read_text())}
    assert scripts <= {Path(word).name for word in bench.split()}


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda script: script.name)
def test_a_script_imports_what_there_is(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("modelexport"):
            module = importlib.import_module(str(node.module))
            assert [one.name for one in node.names if not has(module, one.name)] == []


def has(module: Any, name: str) -> bool:
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def test_a_table_takes_the_place_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("import sys\nprint('| a |\\n|---|\\n|', *sys.argv[1:], '|')\n")
    (tmp_path / "two.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    page = "x\n\n<!-- figures: {} -->\n\n| old |\n|---|\n| 1 |\n\n<!-- end -->\n\ny\n"
    new = page.replace("| old |\n|---|\n| 1 |", "| a |\n|---|\n| --fast |")
    assert tables.rewritten(page.format("one.py --fast"), ()) == new.format("one.py --fast")
    assert tables.rewritten(page.format("one.py"), {"two"}) == page.format("one.py")
    with pytest.raises(SystemExit, match="ended with status 1"):
        tables.rewritten(page.format("two.py"), {"two"})
