"""The calls of a tagged file, read from the properties of its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.errors import FileFormatError
from modelexport.format import documents, keys
from modelexport.format.repeats import unfold_repeats


def check_version(path: Path, properties: Mapping[str, str]) -> None:
    """Refuse a model without tags, or with tags that this version cannot read.

    Raises:
        FileFormatError: It is one of these.
    """
    version = properties.get(keys.FORMAT_VERSION_KEY)
    if version is None:
        raise FileFormatError(
            f"{path} has no tags of modelexport: export it with `modelexport export`, or make some of what another "
            f"exporter left with `modelexport adopt {path} -o OUT.onnx`"
        )
    if version not in keys.READ_VERSIONS:
        raise unknown_version(path, version)


def unknown_version(path: Path, version: str) -> FileFormatError:
    """The error for a file of a format version that this version of modelexport cannot read."""
    return FileFormatError(
        f"{path} has format version {version}, and this version of modelexport reads "
        f"{' and '.join(sorted(keys.READ_VERSIONS))}: "
        "export it again, or use the version that wrote it"
    )


def read_call_tree(properties: Mapping[str, str]) -> tuple[CallTree, dict[ModuleCall, str]]:
    """Every call, and the tag of each.

    Raises:
        LookupError, ValueError: The properties are damaged.
    """
    entries = unfold_repeats(msgspec.json.decode(properties[keys.CALL_TREE], type=list[documents.CallTreeEntry]))
    calls: dict[ModuleCall, TracedCall] = {}
    for entry in entries:
        call = ModuleCall.parse(entry.call)
        parent = None if entry.parent is None else ModuleCall.parse(entry.parent)
        calls[call] = TracedCall(call, parent, 0 if parent is None else calls[parent].depth + 1, None, None)
    return CallTree(tuple(calls.values())), {ModuleCall.parse(entry.call): entry.tag for entry in entries}
