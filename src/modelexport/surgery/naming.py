"""``rename``: names of nodes after the modules that they belong to, for tools that go by such names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from modelexport.errors import OutputError
from modelexport.files.atomic import check_writable, written_together
from modelexport.graph.path_names import name_nodes_by_path, name_values_by_path
from modelexport.surgery.edited_tags import EditedTags
from modelexport.surgery.edits import Documents
from modelexport.surgery.saving import SharedFiles
from modelexport.tagged.encodings.attributes import write_attributes
from modelexport.tagged.file import read_tagged


class Renamed(msgspec.Struct, frozen=True):
    """A file whose nodes have new names."""

    path: str
    renamed: dict[str, str]
    """Old names to new ones, of the nodes that had others."""
    values: dict[str, str]
    """The same of values."""


def rename(path: str | Path, output: str | Path, *, values: bool = False) -> Renamed:
    """Write a tagged file whose nodes are named after their modules.

    A file with functions becomes flat: in the body of a function, which many modules share, no such name is true. The
    documents beside the file are written for the new one.

    Args:
        values: Name what the nodes compute as well: ``retag`` then needs the renamed file as its source.

    Raises:
        FileFormatError: The file cannot be read.
        OutputError: ``output`` cannot be written. What was there before is still there.
    """
    path, output = Path(path), Path(output)
    check_writable(output, [path])
    if output.exists() and output.samefile(path):
        raise OutputError(f"{output} is the file to rename nodes in: give another name")
    tagged = read_tagged(path)
    documents, tags = Documents(tagged), EditedTags(tagged)
    renamed = name_nodes_by_path(tagged.model)
    values_renamed = name_values_by_path(tagged.model) if values else {}
    beside = documents.of_edited(tags)
    if tagged.encoding == "attributes":
        write_attributes(tagged.model)
    with written_together(output.parent) as staging:
        SharedFiles(path, tagged.model, output.parent, staging).save(tagged.model, output.name, beside)
    return Renamed(str(output), renamed, values_renamed)
