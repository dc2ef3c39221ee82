"""Options declared once, for Python and for the command line: a field of a dataclass with what a person has to know.

The class is the group of the option: the first line of its docstring is the heading in ``--help``. The default of a
parameter of a command may be such a field, too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal, TypeVar

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What the command line needs besides the name, the type and the default of a field."""

    help: str
    flag: str = ""
    """The name of the option if it is not that of the field: ``--constant`` for ``constants``, ``--a/--no-a``."""
    metavar: str | None = None
    least: int | None = None
    type: Any = None
    """The type on the command line if Python takes more, or has another word for it."""
    file: Literal["", "read", "read file", "model", "libraries", "written", "written alone", "written folder"] = ""
    """How the command uses the file or folder that it names: see ``cli/overwrite_guard.py``; empty for other values."""
    argument: bool = False
    """Whether it is given by its position."""
    only_python: bool = False
    """Whether it is a keyword of Python alone."""


def option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002 - the word of every library for it
    """A field that is an option of the command line.

    Args:
        default: ``...`` if it has to be given.
        more: The fields of :class:`Declared`.
    """
    return dataclasses.field(default=default, metadata={_KEY: Declared(help=help, **more)})


def argument(default: Any, help: str, **more: Any) -> Any:  # noqa: A002 - as above
    """A field that is given by its position on the command line, with the arguments of :func:`option`."""
    return option(default, help, argument=True, **more)


def declared(field: dataclasses.Field[Any]) -> Declared | None:
    """The declaration of a field; ``None`` if only Python has the option."""
    return field.metadata.get(_KEY)


def heading(group: type) -> str:
    """The heading of a group of options."""
    return (group.__doc__ or "").strip().splitlines()[0].rstrip(".")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_keywords_of(*groups: Any, only_python: bool = False) -> Callable[[_Function], _Function]:
    """Decorate a function that takes options as ``**keywords``: ``help`` and editors then show each of them.

    Args:
        groups: Dataclasses of options, or of groups of options, with their defaults. Fields that only the code of this
            package sets, without a declaration, are not shown.
        only_python: Also show the keywords of Python alone.
    """

    fields = [
        (field, default)
        for group in groups
        for field, default in _declared_fields(group)
        if only_python or not field.metadata[_KEY].only_python
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        named = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        keywords = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)
            for field, default in fields
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *keywords])
        before, section, after = inspect.cleandoc(function.__doc__ or "").partition("\n\nRaises:")
        lines = [_described(field, default) for field, default in fields]
        function.__doc__ = "\n".join([before, *lines]) + section + after
        return function

    return decorate


def _declared_fields(options: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The declared fields of a dataclass and of the dataclasses in it, with their defaults."""
    for field in dataclasses.fields(options):
        default = getattr(options, field.name)
        if dataclasses.is_dataclass(default):
            yield from _declared_fields(default)
        elif declared(field) is not None:
            yield field, default


def _described(field: dataclasses.Field[Any], default: Any) -> str:
    """An entry of the section "Args" of a docstring."""
    declaration = declared(field)
    text = declaration.help if declaration is not None else ""
    if default is True:  # the help of a command line is that of the option that turns it off
        text = f"``False``: {text[0].lower()}{text[1:]}"
    return fill(f"{field.name}: {text}", 110, initial_indent="    ", subsequent_indent="        ")
