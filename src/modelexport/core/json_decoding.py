"""Decodes JSON from files into typed values; all ways in which it can be damaged give one error."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Any, TypeVar

import msgspec

from modelexport.errors import FileFormatError

_T = TypeVar("_T")


def decode_json(
    content: bytes | str, kind: type[_T] | Any, *, damaged: str = "", then: str = "export it again"
) -> _T | Any:
    """The value that a JSON document describes.

    Args:
        kind: Its type.
        damaged, then: What to say of a document that cannot be decoded, and what to do then.

    Raises:
        FileFormatError: It cannot be decoded, and ``damaged`` says what that means.
        msgspec.DecodeError, UnicodeError: Kinds of ``ValueError``. It is not JSON, of another type, or nested
            more deeply than Python can read.
    """
    if isinstance(content, bytes):
        content = content.removeprefix(BOM_UTF8)  # some editors write a byte order mark
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if damaged:
            raise FileFormatError(f"{damaged} ({reason}): {then}") from error
        if isinstance(error, RecursionError):
            raise msgspec.DecodeError(reason) from error
        raise
