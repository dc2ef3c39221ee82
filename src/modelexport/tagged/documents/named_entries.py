"""JSON documents that are one object with named entries, one entry on each line, so that diffs are readable."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


def encode_table(entries: Mapping[str, msgspec.Struct]) -> bytes:
    """The entries as a JSON object in UTF-8, in their order, one on each line."""
    encode = msgspec.json.Encoder().encode
    lines = [encode(name) + b": " + encode(entry) for name, entry in entries.items()]
    return b"{\n" + b",\n".join(lines) + b"\n}\n"
