"""Options of the command line made from dataclasses: those of the program and those that several commands share.

A command that takes such a dataclass as a parameter gets an option for each field that is declared with
:func:`~modelexport.core.declared_options.option`, under the heading of the class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer

from modelexport.cli.read_and_written import MARKS
from modelexport.core.declared_options import Declared, declared, heading

_OFF = "no_"


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each field of the dataclasses that it takes; itself if it takes none."""
    signature = inspect.signature(command, eval_str=True)
    groups = {
        name: parameter.annotation() if parameter.default is parameter.empty else parameter.default
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type)
    }
    if not groups:
        return command

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {name: _filled(default, values) for name, default in groups.items()}
        command(**{name: value for name, value in values.items() if name in signature.parameters}, **given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    for field in dataclasses.fields(group):
        default = getattr(group, field.name)
        if dataclasses.is_dataclass(default):
            yield from _parameters(default)
        elif (option := declared(field)) is not None:
            yield _parameter(type(group), field, option, default)


def _parameter(group: type, field: dataclasses.Field[Any], option: Declared, default: Any) -> inspect.Parameter:
    # Hints are evaluated only where they are text: the others have types that the command line does not import.
    kind: Any = option.type or (typing.get_type_hints(group)[field.name] if isinstance(field.type, str) else field.type)
    name, flag = field.name, option.flag or f"--{field.name.replace('_', '-')}"
    if default is True:  # an option that turns it off
        name, default = _OFF + name, False
        flag = option.flag or f"--no-{field.name.replace('_', '-')}"
    elif get_origin(kind) in (Collection, Sequence):
        kind, default = list[get_args(kind)[0]] | None, default or None  # type: ignore[misc]
    info = typer.Option(
        flag, help=option.help, metavar=option.metavar, min=option.least, rich_help_panel=heading(group)
    )
    annotation = Annotated[kind, info, *([MARKS[option.file]] if option.file else [])]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _filled(group: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass with what the command line gave."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        default = getattr(group, field.name)
        if dataclasses.is_dataclass(default):
            made[field.name] = _filled(default, values)
        elif _OFF + field.name in values:
            made[field.name] = not values[_OFF + field.name]
        elif field.name in values:
            given = values[field.name]
            made[field.name] = default if given is None and isinstance(default, tuple) else given
    return dataclasses.replace(group, **made)
