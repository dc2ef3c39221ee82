"""Options of the command line made from what is declared: for parameters of commands, and for groups of options.

A command has an option for each parameter whose default is an :func:`~modelexport.core.declared_options.option`; one
that takes a dataclass gets one for each of its fields that is, under the heading of the class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer

from modelexport.cli.overwrite_guard import MARKS
from modelexport.core.declared_options import Declared, declared, heading

_OFF = "no_"


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that it declares as its parameters."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    fields: dict[str, dataclasses.Field[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind, default = parameter.annotation, parameter.default
        if isinstance(default, dataclasses.Field):
            fields[name] = default
            parameters.append(_parameter(name, kind, _declared(default), default.default))
        elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[name] = kind() if default is parameter.empty else default
            parameters += _parameters(groups[name])

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {name: _given(name, field.default, values) for name, field in fields.items()}
        command(**given, **{name: _filled(default, values) for name, default in groups.items()})

    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _declared(field: dataclasses.Field[Any]) -> Declared:
    option = declared(field)
    assert option is not None
    return option


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    for field in dataclasses.fields(group):
        default = getattr(group, field.name)
        if dataclasses.is_dataclass(default):
            yield from _parameters(default)
        elif (option := declared(field)) is not None:
            # Hints are evaluated only where they are text: the others have types that the command line does not import.
            hints = typing.get_type_hints(type(group)) if isinstance(field.type, str) and not option.type else {}
            kind = hints.get(field.name, field.type)
            yield _parameter(field.name, kind, option, default, heading(type(group)))


def _parameter(name: str, kind: Any, option: Declared, default: Any, panel: str | None = None) -> inspect.Parameter:
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
    annotation = Annotated[kind, info, *([MARKS[option.file]] if option.file else [])]
    default = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _filled(group: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass with what the command line gave."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        default = getattr(group, field.name)
        if dataclasses.is_dataclass(default):
            made[field.name] = _filled(default, values)
        elif declared(field) is not None:
            made[field.name] = _given(field.name, default, values)
    return dataclasses.replace(group, **made)


def _given(name: str, default: Any, values: Mapping[str, Any]) -> Any:
    if _OFF + name in values and default is True:
        return not values[_OFF + name]
    given = values[name]
    return default if given is None and isinstance(default, tuple) else given
