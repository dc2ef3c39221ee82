"""Tools: what people do with models and files. Each is a folder with its commands, options, output and logic.

``TOOLS`` is the table of all tools of this package: the program and the export of packages ask it, and know no tool
by name. Another package adds tools by entry points of the group ``modelexport.tools``, each of them a :class:`Tool`:

    [project.entry-points."modelexport.tools"]
    quiet = "my_package.tool:TOOL"
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

GROUP = "modelexport.tools"
"""The group of entry points by which other packages add tools."""


@dataclass(frozen=True)
class Command:
    """A command, before its code is imported."""

    group: str
    """The heading of ``modelexport --help`` under which it stands: export, look, check, change or package."""
    function: str
    """Where it is: ``package.module:function``."""
    help: str
    runs_model: bool = False
    """Whether it may run a model."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A row of the table."""

    name: str
    """The name of its folder in ``modelexport/tools``, or of the package that adds it."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """Its commands by name."""
    kinds: tuple[str, ...] = ()
    """The kinds of packages that it makes: ``package.module:name`` of instances of
    :class:`~modelexport.packages.package_kinds.PackageKind`, in the order in which they are asked about a model."""


TOOLS = (
    Tool(name="pipelines", kinds=("modelexport.tools.pipelines.pipeline_kind:KIND",)),
    Tool(name="sentences", kinds=("modelexport.tools.sentences.sentence_kind:KIND",)),
    Tool(name="generate", kinds=("modelexport.tools.generate.generation_kind:KIND",)),
)


@functools.cache
def installed_tools() -> tuple[Tool, ...]:
    """The tools of this package whose folders are there, then those that other packages add.

    A tool of another package that cannot be imported, or is not a :class:`Tool`, is left out: a warning says so.
    """
    here = [tool for tool in TOOLS if (Path(__file__).parent / tool.name / "__init__.py").is_file()]
    return (*here, *_tools_of_others())


def _tools_of_others() -> Iterator[Tool]:
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            tool = entry.load()
        except Exception as error:  # code of another package, which must not end our commands
            _warn(f"the tool {entry.name} ({entry.value}) cannot be imported: {type(error).__name__}: {error}")
            continue
        if isinstance(tool, Tool):
            yield tool
        else:
            _warn(f"the tool {entry.name} ({entry.value}) is a {type(tool).__name__}, not a modelexport.tools.Tool")


def _warn(problem: str) -> None:
    import warnings

    from modelexport.errors import ToolWarning

    warnings.warn(problem, ToolWarning, stacklevel=2)


def commands_of_tools() -> dict[str, Command]:
    """The commands of all installed tools by name. The first tool that has a name keeps it."""
    commands: dict[str, Command] = {}
    for tool in installed_tools():
        for name, command in tool.commands.items():
            commands.setdefault(name, command)
    return commands


def kinds_of_tools() -> tuple[str, ...]:
    """The kinds of packages of all installed tools, in the order in which they are asked."""
    return tuple(kind for tool in installed_tools() for kind in tool.kinds)
