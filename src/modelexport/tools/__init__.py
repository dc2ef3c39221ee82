"""Tools: what people do with models and files. Each is a folder with its commands, options, output and logic.

``TOOLS`` is the table of all tools of this package: the program and the export of packages ask it. Another package adds
tools by entry points of the group ``modelexport.tools``, each of them a :class:`Tool`:

    [project.entry-points."modelexport.tools"]
    quiet = "my_package.tool:TOOL"
"""

from __future__ import annotations

import functools
import importlib.metadata
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

GROUP = "modelexport.tools"
"""The group of entry points by which other packages add tools."""


class Command(NamedTuple):
    """A command, before its code is imported."""

    group: str
    """The heading of ``modelexport --help`` under which it stands: export, look, check, change or package; any other
    text is a heading of its own, after these."""
    function: str
    """Where it is: ``package.module:function``. Each of its parameters is declared by ``argument()`` or ``option()`` of
    :mod:`modelexport.core.declared_options`; those that commands share are in
    :mod:`modelexport.terminal.shared_options`."""
    help: str
    runs_model: bool = False
    """Whether it may run a model."""


class Tool(NamedTuple):
    """A row of the table."""

    name: str
    """The name of its folder in ``modelexport/tools``, or of the package that adds it."""
    commands: Mapping[str, Command] = MappingProxyType({})
    """Its commands by name."""
    needs: tuple[str, ...] = ()
    """The tools of this package that it imports; without one of them, it is not installed either."""
    kinds: tuple[str, ...] = ()
    """The kinds of packages that it makes: ``package.module:name`` of instances of
    :class:`~modelexport.packages.package_kinds.PackageKind`, in the order in which they are asked about a model."""
    options: Mapping[str, str] = MappingProxyType({})
    """Options of commands that are not its own, such as ``verify --device``, to the functions that these call for
    them. Only tools of this package have such."""


def _command(tool: str, name: str, group: str, help_line: str, *, runs_model: bool = False) -> Command:
    """A command of a tool of this package: a function in a file of the tool's folder."""
    function = name.replace("-", "_")
    return Command(group, f"modelexport.tools.{tool}.{function}_command:{function}", help_line, runs_model)


def _tool(
    name: str,
    *commands: tuple[str, str, str],
    runs_model: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    kind: str = "",
    options: Mapping[str, str] = MappingProxyType({}),
) -> Tool:
    made = {each[0]: _command(name, *each, runs_model=each[0] in runs_model) for each in commands}
    kinds = (f"modelexport.tools.{name}.{kind}",) if kind else ()
    functions = {option: f"modelexport.tools.{name}.{function}" for option, function in options.items()}
    return Tool(name=name, commands=made, needs=needs, kinds=kinds, options=functions)


TOOLS = (
    _tool(
        "figures",
        ("cost", "look", "show parameters, operations and memory of each module"),
        ("profile", "look", "run a file, and show the time of each module"),
        ("values", "look", "run a file, and show the range of each module's values and the first NaN"),
        ("report", "look", "write tree, cost and verification to an HTML page"),
        runs_model=("profile", "values"),
        options={"export --report": "report_page:write_report_page"},
    ),
    _tool(
        "compare",
        ("compare", "check", "show how two files differ, module by module"),
        options={
            "report --against": "against_file:verify_against",
            "verify --against": "compare_command:compare_as_verify",
        },
    ),
    _tool(
        "cut",
        ("extract", "change", "write modules as separate models"),
        ("replace", "change", "replace modules by a model, an operator or nothing"),
        ("rename", "change", "name nodes after their modules"),
        ("split", "package", "cut a file into stages that run in sequence"),
    ),
    _tool("adapters", ("update-weights", "change", "replace the weights of a file, or add LoRA adapters")),
    _tool(
        "quantize",
        ("quantize", "change", "quantize modules, and keep others bit for bit"),
        ("sensitivity", "look", "show how much quantizing each module changes the output"),
        ("select", "look", "list nodes of modules in the form that another tool takes"),
    ),
    _tool("optimizers", ("optimize", "change", "run another package's optimizer, and restore the tags")),
    _tool("to_torch", ("to-torch", "change", "write a file as a module of PyTorch, with its weights")),
    _tool(
        "devices",
        ("devices", "check", "show the devices of this machine"),
        ("kit", "package", "write a folder that runs modules on another machine"),
        ("place", "package", "assign modules to devices"),
        needs=("quantize",),
        options={
            "profile --device": "times_alone:time_calls_alone",
            "verify --device": "device_verification:verify_with_table",
        },
    ),
    _tool("pipelines", kind="pipeline_kind:KIND"),
    _tool("sentences", kind="sentence_kind:KIND"),
    _tool("generate", kind="generation_kind:KIND"),
    _tool("named_parts", kind="named_parts_kind:KIND"),
)


@functools.cache
def installed_tools() -> tuple[Tool, ...]:
    """The tools of this package whose folders are there, then those that other packages add.

    A tool of another package that cannot be imported, or is not a :class:`Tool` of commands and kinds, is left out: a
    warning says so.
    """
    folders = {tool.name for tool in TOOLS if (Path(__file__).parent / tool.name / "__init__.py").is_file()}
    here = [tool for tool in TOOLS if folders.issuperset((tool.name, *tool.needs))]
    return (*here, *_tools_of_others())


def _tools_of_others() -> Iterator[Tool]:
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            tool = entry.load()
        except Exception as error:  # code of another package, which must not end our commands
            _warn(f"the tool {entry.name} ({entry.value}) cannot be imported: {type(error).__name__}: {error}")
            continue
        if problem := _wrong_in(tool):
            _warn(f"the tool {entry.name} ({entry.value}) {problem}")
        else:
            yield tool


def _wrong_in(tool: object) -> str:
    """Why this is not a tool; empty if it is one."""
    if not isinstance(tool, Tool):
        return f"is a {type(tool).__name__}, not a modelexport.tools.Tool"
    are_commands = isinstance(tool.commands, Mapping) and all(isinstance(it, Command) for it in tool.commands.values())
    if not are_commands:
        return "has commands that are not each a modelexport.tools.Command by its name"
    if not isinstance(tool.kinds, tuple):
        return "has kinds that are not a tuple, which a comma makes of one kind"
    are_places = all(isinstance(kind, str) for kind in tool.kinds)
    return "" if are_places else "has kinds that are not each a text, package.module:name of a PackageKind"


def _warn(problem: str) -> None:
    from modelexport.core.warned_callers import warn_caller
    from modelexport.errors import ToolWarning

    warn_caller(problem, ToolWarning)


def with_commands_of_tools(core: Mapping[str, Command]) -> dict[str, Command]:
    """Commands and those of all installed tools by name. The first that has a name keeps it; a warning says so."""
    commands = {**core}
    for tool in installed_tools():
        for name, command in tool.commands.items():
            if commands.setdefault(name, command) is not command:
                _warn(f"the command {name} of the tool {tool.name} is left out: there is another {name}")
    return commands


def line_of_another_package(error: BaseException) -> str:
    """The innermost line of a tool of another package that an exception passed, as ``module:line``; empty if there is
    none, or if that line called code of this package, which failed.
    """
    others = (tool for tool in installed_tools() if tool not in TOOLS)
    places = [place for tool in others for place in (*tool.kinds, *(it.function for it in tool.commands.values()))]
    packages = {place.partition(":")[0].partition(".")[0] for place in places}
    passed = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = __name__.partition(".")[0]
    for name, line in reversed(passed):
        if (package := name.partition(".")[0]) in (ours, *packages):
            return "" if package == ours else f"{name}:{line}"
    return ""


def imported(place: str) -> Any:
    """What is at ``package.module:name``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def function_of_option(option: str) -> Callable[..., Any]:
    """What an option of another command calls.

    Raises:
        ImportError: Its tool is not installed.
    """
    return imported(next(tool.options[option] for tool in TOOLS if option in tool.options))


def kinds_of_tools() -> tuple[str, ...]:
    """The kinds of packages of all installed tools, in the order in which they are asked."""
    return tuple(kind for tool in installed_tools() for kind in tool.kinds)
