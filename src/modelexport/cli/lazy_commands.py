"""Commands whose code is imported when they are used, and whose help has a section for each group of options."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pkgutil import iter_modules
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from modelexport.cli import commands
from modelexport.cli.command_list import COMMANDS, introduction, overview
from modelexport.cli.options_from_dataclasses import flattened
from modelexport.cli.overwrite_guard import guarded
from modelexport.core.version import __version__


def load_command(name: str) -> Callable[..., None]:
    """The function of a command, as the command line calls it."""
    function = name.replace("-", "_")
    # A file is named after its commands.
    file = next(one.name for one in iter_modules(commands.__path__) if f"_{function}_" in f"_{one.name}_")
    module = importlib.import_module(f"{commands.__name__}.{file}")
    command: Callable[..., None] = guarded(flattened(getattr(module, function)))
    return command


class GroupedCommand(TyperCommand):
    """A command whose help lists its choices, in the sections that the options belong to."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                argument = param.param_type_name == "argument"
                title = "Arguments" if argument else getattr(param, "rich_help_panel", None) or "Options"
                sections.setdefault(title, []).append(record)
        for title, records in (one for one in sections.items() if one[1]):
            with formatter.section(title):
                formatter.write_dl(records)


class _Commands(Mapping[str, Any]):
    """Name of a command to its parser, which is made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in COMMANDS:
                raise KeyError(name)
            only = typer.Typer(add_completion=False, rich_markup_mode=None)
            only.command(name, cls=GroupedCommand)(load_command(name))
            self._made[name] = typer.main.get_command(only)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """All commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]  # no command is added

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(overview() + "\n")


app = typer.Typer(cls=LazyGroup, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if version:
        print(__version__)
    elif ctx.invoked_subcommand is None:
        print(introduction())
    if version or ctx.invoked_subcommand is None:
        raise typer.Exit
