"""JSON Schemas of the documents, made from their types. ``python -m modelexport.json_schema`` writes those we ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from modelexport import schema

DIRECTORY = Path(__file__).parent / "schemas"

DOCUMENTS: dict[str, tuple[str, Any]] = {
    "hierarchy": ("NAME.hierarchy.json, the sidecar.", schema.Hierarchy),
    "dag": ("NAME.dag.json: the tag of each module call to its operations.", dict[str, schema.Dag]),
    "operations": ("NAME.operations.json: operations and initializers by name.", dict[str, schema.Operation]),
    "call_tree": (f"The model property {schema.CALL_TREE}.", list[schema.CallTreeEntry]),
    "adopted": (f"The model property {schema.ADOPTED}.", dict[str, int]),
    "state_dict": (f"The model property {schema.STATE_DICT}.", dict[str, schema.StateDictEntry]),
    "transform": (f"The property {schema.TRANSFORM} of an initializer.", list[schema.TransformStep]),
}
"""Name of a schema to its title and the type that it is made from."""


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one of ``DOCUMENTS``."""
    title, kind = DOCUMENTS[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"format version {schema.FORMAT_VERSION}",
        "title": title,
        **msgspec.json.schema(kind),
    }


def format_schema(name: str) -> bytes:
    """The schema as the shipped file holds it."""
    return msgspec.json.format(msgspec.json.encode(json_schema(name)), indent=1) + b"\n"


def main() -> None:
    """Write every schema into the package."""
    DIRECTORY.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (DIRECTORY / f"{name}.json").write_bytes(format_schema(name))


if __name__ == "__main__":
    main()
