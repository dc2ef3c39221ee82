"""Replaces attributes of other packages' modules and classes for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NONE = object()


@contextmanager
def attribute_set(target: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute inside the block. Afterwards it is as before, and absent if it was absent."""
    before = vars(target).get(name, _NONE)
    setattr(target, name, value)
    try:
        yield
    finally:
        if before is _NONE:
            delattr(target, name)
        else:
            setattr(target, name, before)
