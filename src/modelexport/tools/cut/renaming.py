"""``rename``: name nodes after their modules, for tools that use such names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from modelexport.core.result_display import Written
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.replaceable_files import check_writable
from modelexport.graph.names_by_module import name_nodes_by_path, name_values_by_path
from modelexport.regions.shared_files import save_edited
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged.file import read_tagged


class Renamed(Written, msgspec.Struct, frozen=True):
    """A file whose nodes have new names."""

    path: str
    renamed: dict[str, str]
    """Old names of the renamed nodes to new ones."""
    values: dict[str, str]
    """Old names of the renamed values to new ones."""


def rename(path: Source, output: str | Path, *, values: bool = False) -> Renamed:
    """Write a tagged file whose nodes are named after their modules.

    A file with functions is made flat: no such name would be right in the body of a function that many modules share.
    The documents beside the file are written for the new one.

    Args:
        values: Rename values as well. ``retag`` then needs the renamed file as its source.

    Raises:
        FileFormatError: The file cannot be read.
        OutputError: ``output`` cannot be written. An existing file of that name is unchanged.
    """
    path, output = as_path(path), Path(output)
    check_writable(output, [path])
    tagged = read_tagged(path)
    facts = tagged.facts()
    renamed = name_nodes_by_path(tagged.model)
    values_renamed = name_values_by_path(tagged.model) if values else {}
    with checked_and_written(output.parent, [path]) as staging:
        edited = replace(tagged, encoding="metadata") if tagged.encoding == "functions" else tagged
        save_edited(edited, facts, output, staging)
    return Renamed(str(output), renamed, values_renamed)
