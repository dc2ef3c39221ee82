"""Recipes as files: which modules get which method. ``quantize`` and ``compare`` read them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from modelexport.core.limits import SETTINGS_BYTES
from modelexport.core.text import reason_of
from modelexport.errors import UsageError
from modelexport.files.regular_files import read_regular
from modelexport.files.replaceable_files import signed


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The modules that selectors pick get a method, or are kept, or nodes in them are changed."""

    select: str | tuple[str, ...]
    """One selector, or several, which are a union; ``!`` takes away."""
    method: str
    """A method with its options, ``keep``, or a change (``modelexport.tools.quantize.changes_for_devices.CHANGES``)."""
    nodes: tuple[str, ...] = ()
    """For a change: names of nodes in the modules; without any, all of their nodes."""

    def __post_init__(self) -> None:
        if self.select == ():
            raise UsageError("a rule picks nothing: its list of selectors is empty")

    @property
    def selectors(self) -> tuple[str, ...]:
        return (self.select,) if isinstance(self.select, str) else self.select


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules, of which the first with a method that picks a call counts; a call that none picks is kept.

    Changes are made after that, each for all that it picks.
    """

    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()
    """What made it, for people."""
    error_bound: float | None = None
    """The bound on the error of the output, as a share of its norm, within which the rules were chosen."""


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML or JSON.

    Raises:
        FileFormatError: It cannot be read.
        UsageError: It is not a recipe; the message names the field.
    """
    data = read_regular(path, SETTINGS_BYTES)
    try:
        return msgspec.yaml.decode(data, type=Recipe)  # JSON is YAML
    except (UsageError, msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise UsageError(
            f"{path} is not a recipe ({reason_of(error)}): write 'rules:' and lines '- {{select: ..., method: ...}}'"
        ) from error


def encode_recipe(recipe: Recipe) -> bytes:
    """A recipe as YAML."""
    return signed(msgspec.yaml.encode(recipe))
