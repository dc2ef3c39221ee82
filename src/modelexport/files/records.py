"""What a model records of the files that hold its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from modelexport.core.decoding import decode_json
from modelexport.errors import FileFormatError

T = TypeVar("T")


def recorded_files(properties: Mapping[str, str], key: str, kind: type[T]) -> dict[str, T]:
    """The records of a model's weights files in its properties, by location.

    Args:
        key: The property, :data:`keys.WEIGHTS` or :data:`keys.DATA`.
        kind: What it holds of each file.

    Raises:
        FileFormatError: It is damaged.
    """
    try:
        text = properties.get(key, "{}")
        return decode_json(text, kind=dict[str, kind])  # type: ignore[valid-type]  # a variable, for msgspec
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FileFormatError(f"the property {key} is damaged ({error}): export it again") from error
