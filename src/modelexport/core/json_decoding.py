"""JSON from files, whatever is wrong with it."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_json(content: bytes | str, kind: type[_T] | Any) -> _T | Any:
    """The value that a JSON document describes.

    Args:
        kind: Its type.

    Raises:
        msgspec.DecodeError, UnicodeError: Values of :class:`ValueError`. It is not JSON, of another type, or nested
            more deeply than Python can read.
    """
    try:
        return _decoder(kind).decode(content)  # type: ignore[arg-type]  # types are hashable
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
