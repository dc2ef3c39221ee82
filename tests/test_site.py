"""The site: its reference is that of the code, it builds, and its readers of the format read what we read."""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import modelexport
from browser import MISSING, browser
from exports import Exporter
from modelexport.cli.command_list import COMMANDS

ROOT = Path(__file__).parent.parent
READERS = ROOT / "docs" / "readers"
NODE = shutil.which("node")


def of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(file: Path) -> list[list[str]]:
    """Address, tag, operators and entries of each call, as ``modelexport`` reads them."""
    tagged = modelexport.load(file)
    first = {}
    for view in tagged.values():
        own = [node for node in view.own_nodes if node.metadata_props["modelexport.call"] == view.call.address]
        keys = dict.fromkeys(
            key
            for node in own
            for value in node.inputs
            for key, same in view.parameters.items()
            if value is not None and same.name == value.name
        )
        first[view.address] = [view.address, view.tag, " ".join(node.op_type for node in own), " ".join(keys)]
    return list(first.values())


def printed(*command: str | Path) -> list[list[str]]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.parametrize("model", [pytest.param("bert", marks=pytest.mark.slow), "condition"])
def test_a_reader_of_40_lines_reads_the_tags(
    exported: Exporter, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = exported(model).path
    monkeypatch.setattr(sys, "argv", ["read_tags.py", str(file)])
    runpy.run_path(str(READERS / "read_tags.py"), run_name="__main__")
    assert [line.split("\t") for line in capsys.readouterr().out.splitlines()] == expected(file)


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize("model", [pytest.param("bert", marks=pytest.mark.slow), "condition"])
def test_the_reader_in_javascript_reads_the_same(exported: Exporter, model: str) -> None:
    file = exported(model).path
    assert printed(str(NODE), READERS / "read_tags.js", file) == expected(file)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_reader_in_a_browser_reads_the_same(exported: Exporter) -> None:
    file = exported("blocks").path
    with browser() as window:
        window.open(READERS / "reader.html")
        window.run("show(new Uint8Array(arguments[0]))", list(file.read_bytes()))
        rows = window.run("return [...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.textContent))")
        assert rows == expected(file)
        assert window.complaints() == []


def test_the_reference_has_every_command_option_and_public_name() -> None:
    pages = of_file(ROOT / "scripts" / "site_pages.py")
    commands, python = pages.commands(), pages.python()
    assert [name for name in COMMANDS if f"### {name}\n" not in commands] == []
    assert all(option in commands for option in ("--verify", "--keep-torch-metadata", "--rule", "--as-inputs"))
    assert [name for name in modelexport.__all__ if f".{name}\n" not in python] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs: make docs")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "https://" not in (tmp_path / "site" / "index.html").read_text().replace("https://squidfunk", "")
