"""``strip`` and ``inline``: convert files of the `attributes` and `functions` encodings to flat, runnable ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from modelexport.errors import UsageError
from modelexport.files.atomic_writing import scratch
from modelexport.files.linked_weights import data_files
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.replaceable_files import check_writable
from modelexport.graph.nodes import all_nodes
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged import file
from modelexport.tagged.encodings.encoded import encoded


def strip(path: Source, output: str | Path) -> None:
    """Convert a file with tags as node attributes to one with tags as metadata, which ONNX Runtime runs.

    Weights in a separate file are copied to ``OUTPUT.data``.

    Raises:
        FileFormatError: ``path`` cannot be read.
        OutputError: ``output`` cannot be written.
        UsageError: ``path`` does not hold its tags as attributes.
    """
    _rewrite(as_path(path), Path(output), "attributes", "tags as attributes of nodes", "strip")


def inline(path: Source, output: str | Path) -> None:
    """Convert a file with a function for each distinct module to a flat one with the same names and tags.

    Weights in a separate file are copied to ``OUTPUT.data``.

    Raises:
        FileFormatError: ``path`` cannot be read.
        OutputError: ``output`` cannot be written.
        UsageError: ``path`` has no functions of modules.
    """
    _rewrite(as_path(path), Path(output), "functions", "functions with tags", "inline")


@contextlib.contextmanager
def runnable(path: Path, encoding: str) -> Iterator[Path]:
    """Yield a file that ONNX Runtime accepts: ``path``, or a temporary copy without tags as attributes."""
    if encoding != "attributes":
        yield path
        return
    with scratch(path.parent) as directory:
        strip(path, directory / path.name)
        yield directory / path.name


def flat_file(tagged: file.TaggedFile, folder: Path, *, links: bool) -> Path:
    """The file itself, or a flat copy of it in a folder.

    Every node has a name of its own, the one that it has in memory, and tags are metadata.

    Args:
        links: Whether the weights may be hard links, which ONNX Runtime reads and ``onnx`` refuses.
    """
    names = [node.name for node in all_nodes(tagged.model)]
    named_apart = all(names) and len(set(names)) == len(names)
    if tagged.found_calls is not None:  # the nodes of the model were given names
        named_apart &= names == [node.name for node in all_nodes(load_onnx(tagged.path))]
    is_readable = links or all(data.stat().st_nlink == 1 for data in data_files(tagged.path))
    if tagged.encoding == "metadata" and named_apart and is_readable:
        return tagged.path
    model = encoded(tagged.model, tagged.call_tags)
    name_nodes_apart(model)
    save_model(model, copy := folder / f"flat-{tagged.path.name}")
    return copy


def _rewrite(path: Path, output: Path, encoding: str, needed: str, verb: str) -> None:
    check_writable(output, [path])
    tagged = file.read_tagged(path)
    if tagged.encoding != encoding:
        found = "no tags" if tagged.found_calls is not None else f"its tags as {tagged.encoding}"
        raise UsageError(f"{path} has {found}: there is nothing to {verb}, which takes a file with {needed}")
    with checked_and_written(output.parent, [path]) as staging:
        save_model(encoded(tagged.model, tagged.call_tags), staging / output.name)
