"""Options declared once, for Python and for the command line: a field of a dataclass with what a person has to know.

The class is the group of the option: the first line of its docstring is the heading in ``--help``. The default of a
parameter of a command may be such a field, too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

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
    file: Literal["", "read", "model", "libraries", "written", "written alone", "written folder"] = ""
    """What it names, if that is a file or a folder: see ``cli/overwrite_guard.py``."""
    argument: bool = False
    """Whether it is given by its position."""


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
    found: Declared | None = field.metadata.get(_KEY)
    return found


def heading(group: type) -> str:
    """The heading of a group of options."""
    return (group.__doc__ or "").strip().splitlines()[0].rstrip(".")
