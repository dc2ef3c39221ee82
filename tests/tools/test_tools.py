"""The table of tools: each can be absent, and packages of others add commands and kinds of packages."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from commands import run
from modelexport import tools
from modelexport.cli import command_list
from modelexport.core.declared_options import option
from modelexport.errors import ToolWarning, UsageError
from modelexport.packages import package_kinds

FILE = "tiny-bert.onnx"
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [tool.name for tool in tools.TOOLS])
def test_everything_else_imports_without_a_tool(name: str, other_process: Executor) -> None:
    other_process.submit(import_without, hidden_with(name)).result()


def import_without(hidden: set[str]) -> None:
    """Import all modules of this package but some tools, again: operators are registered twice."""
    import models  # noqa: F401 - makes pillow and torchvision importable

    with without(hidden):
        import modelexport

        for module in pkgutil.walk_packages(modelexport.__path__, "modelexport.", onerror=lambda name: None):
            if module.name.split(".")[1] != "__main__" and not any(
                f"{module.name}.".startswith(f"modelexport.tools.{name}.") for name in hidden
            ):
                importlib.import_module(module.name)


@pytest.mark.parametrize("name", [tool.name for tool in tools.TOOLS])
def test_the_help_and_the_commands_are_those_of_the_tools_that_are_there(name: str, tmp_path: Path) -> None:
    hidden = hidden_with(name)
    gone = {command for tool in tools.TOOLS if tool.name in hidden for command in tool.commands}
    kept = {command for tool in tools.TOOLS if tool.name not in hidden for command in tool.commands}
    with without(hidden):
        from modelexport.cli import command_list

        page = command_list.overview()
        listed = {line.split()[0] for line in page.splitlines() if line.startswith("  ") and len(line) > 20}
        assert listed & (gone | kept) == kept
        assert _runs("example", "tiny-bert.onnx", "-o", tmp_path / "tiny-bert.onnx") == 0
        assert [_runs(command, tmp_path / "tiny-bert.onnx") for command in gone] == [2] * len(gone)


@pytest.mark.parametrize("option", [option for tool in tools.TOOLS for option in tool.options])
def test_the_function_of_an_option_is_there(option: str) -> None:
    assert callable(tools.function_of_option(option))


@pytest.mark.parametrize(
    "given",
    [
        ("figures", "export", "bert-tiny", "-o", "b.onnx", "--no-check", "--report"),
        ("compare", "verify", FILE, "--against", FILE),
        ("devices", "verify", FILE, "--device", "cpu"),
        ("devices", "verify", FILE, "--results", FILE),
    ],
    ids=" ".join,
)
def test_an_option_whose_tool_is_not_there_says_so(
    given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with without(hidden_with(given[0])):
        _runs("example", FILE, "-o", FILE)
        _runs(*given[1:])
    assert f"this needs the tool {given[0]} of modelexport" in capsys.readouterr().err


@contextmanager
def without(hidden: set[str]) -> Iterator[None]:
    """Import this package again, as if tools were not installed; afterwards its modules are those of before."""
    imported = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "modelexport"}
    for module in imported:
        del sys.modules[module]
    is_file = Path.is_file
    away = {Path(tools.__file__).parent / name / "__init__.py" for name in hidden}
    with (
        mock.patch.object(sys, "meta_path", [Hidden(*hidden), *sys.meta_path]),
        mock.patch.object(Path, "is_file", lambda path: path not in away and is_file(path)),
    ):
        try:
            yield
        finally:
            for module in [name for name in sys.modules if name.split(".")[0] == "modelexport"]:
                del sys.modules[module]
            sys.modules.update(imported)


def _runs(*arguments: object) -> int:
    from modelexport.cli.app import main

    with mock.patch.object(sys, "argv", ["modelexport", *map(str, arguments)]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_package_adds_a_command_and_a_kind_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.syspath_prepend(OTHER_PACKAGE)
    monkeypatch.setattr(tools, "installed_tools", functools.cache(tools.installed_tools.__wrapped__))
    monkeypatch.setattr(package_kinds, "package_kinds", functools.cache(package_kinds.package_kinds.__wrapped__))
    monkeypatch.setitem(command_list.COMMANDS, "count", tools.with_commands_of_tools({})["count"])
    assert "  count           count the operators of a file" in command_list.overview()
    done = run("export", "net.py:make", "-o", "package/", "--no-check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Gemm 1" in run("count", "package/decoder.onnx", cwd=tmp_path).stdout
    assert "decoder:\nGemm 1" in run("count", "package/", cwd=tmp_path).stdout
    assert run("verify", "package/", "--model", "net.py:make", cwd=tmp_path).returncode == 0


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


def test_a_command_whose_name_is_taken_is_a_warning_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    other = tools.Tool("other", {"cost": tools.Command("look", "other:cost", "show other costs")})
    monkeypatch.setattr(tools, "installed_tools", lambda: (*tools.TOOLS, other))
    with pytest.warns(ToolWarning, match="the command cost of the tool other is left out"):
        assert "figures" in tools.with_commands_of_tools({})["cost"].function


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("'count'", "is a str, not a modelexport.tools.Tool"),
        ("Tool('wrong', {'count': 'my_package:count'})", "has commands that are not each a modelexport.tools.Command"),
        ("Tool('wrong', kinds=('my_package:KIND'))", "has kinds that are not a tuple"),
        ("Tool('wrong', kinds=(object(),))", "has kinds that are not each a text"),
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


@pytest.mark.parametrize("lacks", ["name", "needs", "accepts"])
def test_a_kind_that_would_take_models_of_others_is_a_warning_and_left_out(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"name": "ranker", "needs": "a ranker", "accepts": lambda self, model: False}
    made = type("RankerKind", (package_kinds.PackageKind,), {name: own[name] for name in own.keys() - {lacks}})()
    monkeypatch.setattr(package_kinds, "kinds_of_tools", lambda: ("ranker:KIND",))
    monkeypatch.setattr(package_kinds, "imported", lambda place: made)
    with pytest.warns(ToolWarning, match=rf"ranker:KIND cannot be used: it has no {lacks} of its own"):
        assert made not in package_kinds.package_kinds.__wrapped__()


def test_a_kind_may_set_its_name_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(package_kinds.PackageKind):
        def __init__(self) -> None:
            self.name, self.needs = "ranker", "a ranker"

        def accepts(self, model: object) -> bool:
            return False

    kind = Made()
    monkeypatch.setattr(package_kinds, "kinds_of_tools", lambda: ("ranker:KIND",))
    monkeypatch.setattr(package_kinds, "imported", lambda place: kind)
    assert kind in package_kinds.package_kinds.__wrapped__()


def test_a_fault_in_a_command_of_another_package_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text("def weigh():\n    return {}['kilograms']\n")
    monkeypatch.syspath_prepend(tmp_path)
    command = tools.Command("look", "faulty:weigh", "weigh a file")
    monkeypatch.setattr(tools, "installed_tools", lambda: (*tools.TOOLS, tools.Tool("faulty", {"weigh": command})))
    monkeypatch.setitem(command_list.COMMANDS, "weigh", command)
    done = run("weigh")
    assert done.stderr.startswith("modelexport: internal error of faulty:2: KeyError: 'kilograms'; report it to its au")
    assert done.returncode == 70


def test_a_fault_of_ours_that_a_command_of_another_package_meets_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calling = "from modelexport.core import text\ndef weigh():\n    return text.{}\n"
    (tmp_path / "calling.py").write_text(calling.format("first_few([1], 'two')"))
    monkeypatch.syspath_prepend(tmp_path)
    command = tools.Command("look", "calling:weigh", "weigh a file")
    monkeypatch.setattr(tools, "installed_tools", lambda: (*tools.TOOLS, tools.Tool("calling", {"weigh": command})))
    monkeypatch.setitem(command_list.COMMANDS, "weigh", command)
    assert run("weigh").stderr.startswith("modelexport: internal error: TypeError: ")


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
    from modelexport.cli import command_parsers

    def undeclared(file: Path) -> None: ...

    monkeypatch.setitem(command_list.COMMANDS, "weigh", tools.Command("weights", "nowhere:weigh", "weigh a file"))
    assert "\n\nWeights\n  weigh           weigh a file\n" in command_list.overview()
    assert "\n  weights  weigh\n" in command_list.introduction()
    with pytest.raises(UsageError, match=r"the command weigh \(nowhere:weigh\) cannot be used: ModuleNotFoundError"):
        command_parsers.load_command("weigh")
    with pytest.raises(TypeError, match=r"file of .*undeclared is not declared"):
        command_parsers.with_declared_options(undeclared)


@pytest.mark.parametrize(
    ("kind", "default", "fits"),
    [(int, 10, True), (int, -1, True), (int, "ten", False), (int, None, False), (int | None, None, True),
     (float, 1, True), (bool, True, True), (str, 1, False), (Sequence[str], (), True), (Path, ..., True)],
)  # fmt: skip
def test_a_default_that_its_annotation_does_not_allow_is_refused(kind: Any, default: Any, fits: bool) -> None:
    from modelexport.cli import command_parsers

    def command(top: int = option(default, "How many.")) -> None: ...

    command.__annotations__["top"] = kind
    with nullcontext() if fits else pytest.raises(TypeError, match=r"the default of top is .*does not allow"):
        command_parsers.with_declared_options(command)
