"""Checks arguments against annotations, so that a misspelled choice, or a text for several, is not used silently."""

from __future__ import annotations

import builtins
import functools
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from modelexport.core.text import shortened
from modelexport.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_TAKEN: Mapping[Any, type] = {int: Integral, float: Real, Path: os.PathLike, Sequence: Collection}
"""Annotations to the wider type that is accepted for them: NumPy's numbers, all path-like objects, tensors."""


@functools.cache
def with_checked_arguments(function: _Function) -> _Function:
    """A function that raises ``UsageError`` for an argument that its annotation does not allow, or below zero.

    Types whose names are imported for type checkers alone are not checked.
    """
    signature = inspect.signature(function)
    names = defaultdict(lambda: Any, vars(builtins) | vars(sys.modules[function.__module__]))
    hints = {name: _resolved(parameter.annotation, names) for name, parameter in signature.parameters.items()}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            given = {}  # the function says what it takes, which may be more than it shows
        for name, value in given.items():
            if not fits(value, hints[name]):
                text = re.sub(r"(collections\.abc|pathlib|typing)\.", "", inspect.formatannotation(hints[name]))
                wanted = re.sub(r"\bint\b", "int of 0 or more", text)
                shown = shortened(" ".join(repr(value).split()), 80)
                raise UsageError(f"{function.__name__}: {name} takes {wanted}, not {shown}")
        return function(*args, **kwargs)

    checked.__module__ = __name__.partition(".")[0]  # where pickle finds it
    return checked  # type: ignore[return-value]  # as functools.wraps cannot say


def _resolved(annotation: Any, names: Mapping[str, Any]) -> Any:
    try:
        # `typing.get_type_hints` copies the names into a plain dictionary from Python 3.14 on, which has no defaults.
        return eval(annotation, {}, names) if isinstance(annotation, str) else annotation
    except (AttributeError, TypeError):  # of a module that is missing, or of the name of a type
        return Any


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value; whole numbers below zero are never allowed."""
    kind, inside = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return any(isinstance(value, type(choice)) and value == choice for choice in inside)
    if kind in (Union, UnionType):
        return any(fits(value, choice) for choice in inside)
    if not isinstance(kind, type) or kind is Any:
        return True
    if not isinstance(value, _TAKEN.get(kind, kind)) or (isinstance(value, str | bytes) and inside):
        return False
    if not isinstance(value, Collection):
        return kind is not int or cast(int, value) >= 0
    parts = zip((value, value.values()) if isinstance(value, Mapping) else (value,), inside, strict=False)
    return all(kind_inside is Any or all(fits(each, kind_inside) for each in part) for part, kind_inside in parts)
