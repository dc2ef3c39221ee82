"""JSON Schemas of the documents, made from their types. ``python -m modelexport.format.schemas`` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from modelexport.format import documents, keys
from modelexport.format.versions import FORMAT_VERSION

DIRECTORY = Path(__file__).parent / "json_schemas"

DOCUMENTS: dict[str, tuple[str, Any]] = {
    "hierarchy": ("NAME.hierarchy.json, the sidecar.", documents.Hierarchy),
    "dag": ("NAME.dag.json: the tag of each module call to its operations.", dict[str, documents.Dag]),
    "operations": ("NAME.operations.json: operations and initializers by name.", dict[str, documents.Operation]),
    "call_tree": (f"The model property {keys.CALL_TREE}.", list[documents.CallTreeEntry]),
    "adopted": (f"The model property {keys.ADOPTED}.", dict[str, int]),
    "state_dict": (f"The model property {keys.STATE_DICT}.", dict[str, documents.StateDictEntry]),
    "transform": (f"The property {keys.TRANSFORM} of an initializer.", list[documents.TransformStep]),
}
"""Name of a schema to its title and the type that it is made from."""


def make_json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one of ``DOCUMENTS``."""
    title, kind = DOCUMENTS[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"format version {FORMAT_VERSION}",
        "title": title,
        **msgspec.json.schema(kind),
    }


def format_schema(name: str) -> bytes:
    """The text of a schema as it is in the shipped file."""
    return msgspec.json.format(msgspec.json.encode(make_json_schema(name)), indent=1) + b"\n"


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (DIRECTORY / f"{name}.json").write_bytes(format_schema(name))
