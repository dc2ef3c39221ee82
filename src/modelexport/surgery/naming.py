"""``rename``: names of nodes after the modules that they belong to, for tools that go by such names."""

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
    """Old names to new ones, of the nodes that had others."""


def rename(path: str | Path, output: str | Path) -> Renamed:
    """Write a tagged file whose nodes are named after their modules; values keep their names, and with them lineage.

    A file with functions becomes flat: in the body of a function, which many modules share, no such name is true. The
    documents beside the file that name its nodes are not copied.

    Raises:
        FileFormatError: The file cannot be read.
        OutputError: ``output`` cannot be written. What was there before is still there.
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
