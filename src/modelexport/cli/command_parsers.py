"""Commands whose code is imported when they are used, with options made from what is declared.

A command has an option for each parameter whose default is an :func:`~modelexport.core.declared_options.option`; one
that takes a dataclass gets one for each of its fields that is, under the heading of the class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from modelexport.cli.command_list import COMMANDS, introduction, overview
from modelexport.cli.overwrite_guard import FOLLOW, MARKS, ReadMark, WrittenMark, check_read_paths, guarded
from modelexport.core.checked_arguments import fits
from modelexport.core.declared_options import Declared, declared, heading
from modelexport.core.missing_extras import missing_extra
from modelexport.core.text import error_line
from modelexport.core.version import __version__
from modelexport.errors import UsageError
from modelexport.tools import imported

_OFF = "no_"


def with_declared_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that it declares as its parameters, and guarded outputs if it writes any."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    fields: dict[str, dataclasses.Field[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind, default = parameter.annotation, parameter.default
        if isinstance(default, dataclasses.Field):
            fields[name] = default
            parameters.append(_typer_parameter(name, kind, declared(default), default.default))
        elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[name] = kind() if default is parameter.empty else default
            parameters += _typer_parameters(groups[name])
        else:
            where = f"{command.__module__}:{command.__name__}"
            raise TypeError(f"{name} of {where} is not declared: give it option() of modelexport.core.declared_options")

    named = ((parameter.name, mark) for parameter in parameters for mark in get_args(parameter.annotation)[1:])
    marks = {name: mark for name, mark in named if isinstance(mark, ReadMark | WrittenMark)}
    writes = any(isinstance(mark, WrittenMark) for mark in marks.values())
    parameters += [FOLLOW] if writes else []

    @functools.wraps(command)
    def run(**values: Any) -> None:
        check_read_paths(marks, values)
        with guarded(marks, values) if writes else contextlib.nullcontext():
            arguments = {name: _value_of_option(name, field.default, values) for name, field in fields.items()}
            command(**arguments, **{name: _group_of_values(default, values) for name, default in groups.items()})

    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _typer_parameters(group: Any) -> Iterator[inspect.Parameter]:
    for field in dataclasses.fields(group):
        default = getattr(group, field.name)
        if dataclasses.is_dataclass(default):
            yield from _typer_parameters(default)
        elif (option := declared(field)) is not None and not option.only_python:
            # Hints are evaluated only where they are text: the others have types that the command line does not import.
            hints = typing.get_type_hints(type(group)) if isinstance(field.type, str) and not option.type else {}
            kind = hints.get(field.name, field.type)
            yield _typer_parameter(field.name, kind, option, default, heading(type(group)))


def _typer_parameter(
    name: str, kind: Any, option: Declared | None, default: Any, panel: str | None = None
) -> inspect.Parameter:
    assert option is not None, f"{name} is not declared"
    known = abs(default) if type(default) is int else default  # it may be below zero
    if known is not ... and not any(fits(known, each) for each in (kind, option.type or kind)):
        raise TypeError(f"the default of {name} is {default!r}, which its annotation {kind} does not allow")
    kind, word = option.type or kind, name.replace("_", "-")
    flags = (option.flag or f"--{word}").split()
    if default is True:  # an option that turns it off
        name, default = _OFF + name, False
        flags = [option.flag or f"--no-{word}"]
    elif get_origin(kind) in (Collection, Sequence):
        inside: Any = types.GenericAlias(list, get_args(kind)[:1])
        kind, default = (inside, default) if default is ... else (inside | None, default or None)
    info: Any = (
        typer.Argument(help=option.help, metavar=option.metavar)
        if option.argument
        else typer.Option(*flags, help=option.help, metavar=option.metavar, min=option.least, rich_help_panel=panel)
    )
    mark = MARKS.get(option.file)
    if isinstance(mark, WrittenMark) and mark.folder:  # a Path would lose the slash at its end
        kind = str if default is ... else str | None
    if isinstance(mark, WrittenMark) and mark.alone:
        mark = dataclasses.replace(mark, suffix=Path(option.metavar or "").suffix)
    annotation = Annotated[kind, info, *([mark] if mark is not None else [])]
    default = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _group_of_values(group: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass with what the command line gave."""
    values_of_fields: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        default = getattr(group, field.name)
        if dataclasses.is_dataclass(default):
            values_of_fields[field.name] = _group_of_values(default, values)
        elif (option := declared(field)) is not None and not option.only_python:
            values_of_fields[field.name] = _value_of_option(field.name, default, values)
    return dataclasses.replace(group, **values_of_fields)


def _value_of_option(name: str, default: Any, values: Mapping[str, Any]) -> Any:
    if _OFF + name in values and default is True:
        return not values[_OFF + name]
    value = values[name]
    return default if value is None and isinstance(default, tuple) else value


def load_command(name: str) -> Callable[..., None]:
    """The function of a command, as the command line calls it."""
    place = COMMANDS[name].function
    try:
        return with_declared_options(imported(place))
    except Exception as error:  # code of another package; if a library is missing, our own line names it
        if place.startswith("modelexport.") or (isinstance(error, ImportError) and missing_extra(error)):
            raise
        raise UsageError(f"the command {name} ({place}) cannot be used: {error_line(error)}") from error


class GroupedCommand(TyperCommand):
    """A command whose help lists its choices, in the sections that the options belong to."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                argument = param.param_type_name == "argument"
                title = "Arguments" if argument else getattr(param, "rich_help_panel", None) or "Options"
                sections.setdefault(title, []).append(record)
        for title, records in (section for section in sections.items() if section[1]):
            with formatter.section(title):
                formatter.write_dl(records)


class _Commands(Mapping[str, Any]):
    """Name of a command to its parser, which is made when it is asked for."""

    def __init__(self) -> None:
        self._parsers: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._parsers:
            if name not in COMMANDS:
                raise KeyError(name)
            only = typer.Typer(add_completion=False, rich_markup_mode=None)
            only.command(name, cls=GroupedCommand)(load_command(name))
            self._parsers[name] = typer.main.get_command(only)
        return self._parsers[name]

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
