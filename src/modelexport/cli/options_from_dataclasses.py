"""Options of the command line made from dataclasses: those of the program and those that several commands share.

A command that takes such a dataclass as a parameter gets each of its fields as an option, under the heading of the
class. A field is declared with :func:`~modelexport.core.declared_options.option`, or annotated for Typer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import ParameterInfo

from modelexport.cli.read_and_written import WRITTEN_FOLDER
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
    title = heading(type(group))
    for field, default in _fields(group):
        if dataclasses.is_dataclass(default):
            yield from _parameters(default)
        elif (option := declared(field)) is not None:
            yield _parameter(field, option, default, title)
        else:
            yield _keyword(field.name, _under(_hints(type(group))[field.name], title), default)


def _fields(group: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields that are options, or groups of them, with their defaults."""
    all_fields = [(field, getattr(group, field.name)) for field in dataclasses.fields(group)]
    marked = [(field, default) for field, default in all_fields if declared(field) or dataclasses.is_dataclass(default)]
    return iter(marked or all_fields)  # every field of a group of the command line alone is annotated


def _hints(group: type) -> Mapping[str, Any]:
    return typing.get_type_hints(group, include_extras=True)


def _parameter(field: dataclasses.Field[Any], option: Declared, default: Any, title: str) -> inspect.Parameter:
    kind = option.type or field.type
    flag = option.flag or f"--{field.name.replace('_', '-')}"
    name = field.name
    if default is True:  # an option that turns it off
        name, default = _OFF + name, False
        flag = option.flag or f"--no-{field.name.replace('_', '-')}"
    elif get_origin(kind) is Collection:
        kind, default = list[get_args(kind)[0]] | None, default or None  # type: ignore[misc]
    info = typer.Option(flag, help=option.help, metavar=option.metavar, min=option.least, rich_help_panel=title)
    marks = [WRITTEN_FOLDER] if option.folder else []
    return _keyword(name, Annotated[kind, info, *marks], default)


def _under(annotation: Any, title: str) -> Any:
    """The annotation of an option, under a heading."""
    kind, *rest = get_args(annotation)
    infos = [copy(one) if isinstance(one, ParameterInfo) else one for one in rest]
    for info in infos:
        if isinstance(info, ParameterInfo):
            info.rich_help_panel = title
    return Annotated[kind, *infos]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _filled(group: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass with what the command line gave."""
    made: dict[str, Any] = {}
    for field, default in _fields(group):
        if dataclasses.is_dataclass(default):
            made[field.name] = _filled(default, values)
        elif _OFF + field.name in values:
            made[field.name] = not values[_OFF + field.name]
        elif field.name in values:
            given = values[field.name]
            made[field.name] = default if given is None and isinstance(default, tuple) else given
    return dataclasses.replace(group, **made)
