"""``rename``: name nodes after their modules, for tools that use such names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from modelexport.errors import OutputError
from modelexport.files.atomic import check_writable, written_together
from modelexport.graph.path_names import name_nodes_by_path
from modelexport.surgery.saving import SharedFiles
from modelexport.tagged.encodings.attributes import write_attributes
from modelexport.tagged.file import read_tagged


class Renamed(msgspec.Struct, frozen=True):
    """A file whose nodes have new names."""

    path: str
    renamed: dict[str, str]
    """Old names of the renamed nodes to new ones."""


def rename(path: str | Path, output: str | Path) -> Renamed:
    """Write a tagged file whose nodes are named after their modules; values keep their names, which lineage needs.

    A file with functions is made flat: no such name would be right in the body of a function that many modules share.
    The documents beside the file that name its nodes are not copied.

    Raises:
        FileFormatError: The file cannot be read.
        OutputError: ``output`` cannot be written. An existing file of that name is unchanged.
    """
    path, output = Path(path), Path(output)
    check_writable(output, [path])
    if output.exists() and output.samefile(path):
        raise OutputError(f"{output} is the file to rename nodes in: give another name")
    tagged = read_tagged(path)
    renamed = name_nodes_by_path(tagged.model)
    if tagged.encoding == "attributes":
        write_attributes(tagged.model)
    with written_together(output.parent) as staging:
        SharedFiles(path, tagged.model, output.parent, staging).save(tagged.model, output.name)
    return Renamed(str(output), renamed)
