"""The table of tools: each can be absent, and packages of others add commands and kinds of packages."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from exports import Exporter
from modelexport import tools
from modelexport.errors import ToolWarning, UsageError

OTHER_PACKAGE = Path(__file__).with_name("other_package")


class Hidden(MetaPathFinder):
    """Makes tools look as if they were not installed."""

    def __init__(self, *names: str) -> None:
        self.packages = [f"modelexport.tools.{name}" for name in names]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if any(fullname == package or fullname.startswith(f"{package}.") for package in self.packages):
            raise ModuleNotFoundError(f"no module named {fullname}", name=fullname)
        return None


def hidden_with(name: str) -> set[str]:
    """A tool and those that need it."""
    return {name, *(tool.name for tool in tools.TOOLS if name in tool.needs)}


@pytest.fixture(scope="module")
def other_process() -> Iterator[Executor]:
    """A process that is started, not forked: a forked one has the runtime's sessions without their threads."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.sweep
@pytest.mark.parametrize("name", [tool.name for tool in tools.TOOLS])
def test_everything_else_imports_and_runs_without_a_tool(
    name: str, exported: Exporter, other_process: Executor
) -> None:
    other_process.submit(check_without, hidden_with(name), str(exported("bert").path)).result()


def check_without(hidden: set[str], path: str) -> None:
    """Check that the help and the commands are right without some tools; changes what the process has imported.

    Raises:
        AssertionError: They are not.
    """
    gone = [command for tool in tools.TOOLS if tool.name in hidden for command in tool.commands]
    kept = [command for tool in tools.TOOLS if tool.name not in hidden for command in tool.commands]
    with without(hidden):
        from modelexport.cli import command_list

        page = command_list.overview()
        listed = {line.split()[0] for line in page.splitlines() if line.startswith("  ") and len(line) > 20}
        assert not listed & set(gone), listed & set(gone)
        assert listed >= set(kept), set(kept) - listed
        assert _runs("tree", path) == 0
        assert not gone or _runs(gone[0], path) == 2


def forget() -> None:
    """Let all modules of this package, and the tests' way to its commands, be imported again."""
    for module in [name for name in sys.modules if name.split(".")[0] in ("modelexport", "commands")]:
        del sys.modules[module]


@contextmanager
def without(hidden: set[str]) -> Iterator[None]:
    """Import all modules of this package again, as if tools were not installed."""
    forget()
    is_file = Path.is_file
    away = {Path(tools.__file__).parent / name / "__init__.py" for name in hidden}
    with (
        mock.patch.object(sys, "meta_path", [Hidden(*hidden), *sys.meta_path]),
        mock.patch.object(Path, "is_file", lambda path: path not in away and is_file(path)),
    ):
        import modelexport

        for module in pkgutil.walk_packages(modelexport.__path__, "modelexport.", onerror=lambda name: None):
            if module.name.split(".")[1] != "__main__" and not any(
                f"{module.name}.".startswith(f"modelexport.tools.{name}.") for name in hidden
            ):
                importlib.import_module(module.name)
        yield


def _runs(*arguments: str) -> int:
    from modelexport.cli.app import main

    with mock.patch.object(sys, "argv", ["modelexport", *arguments]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_package_adds_a_command_and_a_kind_of_packages(other_process: Executor, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    shown = other_process.submit(shown_with_other_package, tmp_path).result()
    assert "  count           count the operators of a file" in shown
    assert (tmp_path / "package" / "decoder.onnx").is_file()
    assert "Gemm 1" in shown


def shown_with_other_package(folder: Path) -> str:
    """What commands show where another package adds a tool; changes what the process has imported.

    Raises:
        AssertionError: A command fails.
    """
    shown = ""
    forget()
    with mock.patch.object(sys, "path", [str(OTHER_PACKAGE), *sys.path]):
        from commands import run

        for line in (
            "--help",
            "export net.py:make -o package/ --no-check",
            "count package/encoder.onnx",
            "verify package/ --model net.py:make",
        ):
            done = run(*line.split(), cwd=folder)
            assert done.returncode == 0, done.stderr
            shown += done.stdout
    return shown


MODEL = """
import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)

    def encode(self, x):
        return torch.relu(self.down(x))

    def decode(self, codes):
        return self.up(codes)

    def forward(self, x):
        return self.decode(self.encode(x))


def make():
    return Autoencoder().eval(), {"x": torch.ones(2, 6)}
"""


def test_a_tool_that_cannot_be_imported_is_a_warning_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "broken", "no_such_package:TOOL", monkeypatch)
    with pytest.warns(ToolWarning, match="the tool broken"):
        assert "broken" not in {tool.name for tool in tools.installed_tools.__wrapped__()}


def test_a_warning_names_the_line_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "broken", "no_such_package:TOOL", monkeypatch)
    with pytest.warns(ToolWarning) as warned:
        tools.installed_tools.__wrapped__()
    assert [one.filename for one in warned] == [__file__]


def test_a_tool_that_cannot_be_imported_is_one_line_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "broken", "no_such_package:TOOL", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    ended = subprocess.run([sys.executable, "-m", "modelexport", "--help"], capture_output=True, text=True, check=True)
    assert ended.stderr.startswith("modelexport: warning: the tool broken (no_such_package:TOOL) cannot be imported")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("'count'", "is a str, not a modelexport.tools.Tool"),
        ("Tool('wrong', {'count': 'my_package:count'})", "has commands that are not each a modelexport.tools.Command"),
        ("Tool('wrong', kinds=('my_package:KIND'))", "has kinds that are not a tuple"),
    ],
)
def test_what_is_not_a_tool_is_a_warning_and_left_out(
    made: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_tool.py").write_text(f"from modelexport.tools import Tool\nTOOL = {made}\n")
    _install(tmp_path, "wrong", "wrong_tool:TOOL", monkeypatch)
    monkeypatch.delitem(sys.modules, "wrong_tool", raising=False)
    with pytest.warns(ToolWarning, match=f"the tool wrong .*{said}"):
        assert "wrong" not in {tool.name for tool in tools.installed_tools.__wrapped__()}


def _install(folder: Path, name: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder look like one in which a package with an entry point is installed."""
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[modelexport.tools]\n{name} = {entry}\n")
    monkeypatch.syspath_prepend(folder)


def test_a_command_of_another_package_has_a_heading_of_its_own_and_its_faults_are_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from modelexport.cli import command_list, command_parsers

    def undeclared(file: Path) -> None: ...

    monkeypatch.setitem(command_list.COMMANDS, "weigh", tools.Command("weights", "nowhere:weigh", "weigh a file"))
    assert "\n\nWeights\n  weigh           weigh a file\n" in command_list.overview()
    assert "\n  weights  weigh\n" in command_list.introduction()
    with pytest.raises(UsageError, match=r"the command weigh \(nowhere:weigh\) cannot be used: ModuleNotFoundError"):
        command_parsers.load_command("weigh")
    with pytest.raises(TypeError, match=r"file of .*undeclared is not declared"):
        command_parsers.with_declared_options(undeclared)
