"""Which existing files an output may replace: those that this package wrote and that no input needs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from modelexport.errors import OutputError
from modelexport.files.protected_inputs import OTHER_KINDS, being_read, check_others_keep_weights, parts_of
from modelexport.files.regular_files import check_folder_writable, what_it_is
from modelexport.format.keys import (
    DAG_SUFFIX,
    DATA_SUFFIX,
    DOCUMENT_SUFFIXES,
    OPERATIONS_SUFFIX,
    REFERENCE_SUFFIX,
    SIDECAR_SUFFIX,
)

_BEGINNINGS = {
    ".html": rb"<title>modelexport</title>",
    SIDECAR_SUFFIX: rb'\A\{\s*"format_version": "',
    DAG_SUFFIX: rb'\A\{\s*(\}|"[^\n]*": \{"nodes":\[)',
    OPERATIONS_SUFFIX: rb'\A\{\s*(\}|"[^\n]*": \{"op_type":")',
    REFERENCE_SUFFIX: rb'\A.{8}\{"__metadata__":\{"modelexport\.',
    ".json": rb'"session\.layer_assignment_settings"|\A\{\s*"[^"\n]*": \{\s*"name": "[^"\n]*",\s*"results"'
    rb'|\A\{"nodes":\[',
    ".md": rb"\A# [^\n]*\n\r?\n`[^\n]*`, [\d,]+ parameters, [\d,]+ nodes, ",
    ".safetensors": rb'\A.{8}\{"__metadata__":\{"made_by":"modelexport"',
}
"""By which a file is known as one that this package wrote, and may therefore be replaced."""
_MODEL = rb"\A\x08"
"""The first field of an ONNX file, the version of the format: no text begins so."""
_BEGINNING_BYTES = 1 << 14


def check_writable(path: Path, reads: Iterable[Path] = (), *, alone: bool = False) -> None:
    """Fail before the work when ``path`` cannot be written or writing it would destroy an input.

    Args:
        path: The file to write. Documents and a data file may be written beside it.
        reads: The files that the command reads, including the weights files of an ONNX file.
        alone: Nothing is written beside it: it is a page or a table, which may have the name of a model, and replaces
            only what this package wrote.

    Raises:
        OutputError: The folder does not exist or cannot be written to; ``path`` is not a regular file, has the name of
            another model's file, or is an input; or a file that would be written beside it belongs to an input or
            holds weights of another model.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: give the name of a file in it")
    if path.is_symlink():
        raise OutputError(
            f"{path} is a symbolic link: give the file that it points to, {os.path.realpath(path)}, or "
            "--follow-symlinks"
        )
    if (kind := what_it_is(path)) is not None:
        raise OutputError(f"{path} is not a regular file but {kind}: give the name of a file")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    check_folder_writable(path.parent, path)
    _check_name(path, alone=alone)
    beside = [] if alone else [path.with_name(path.name + DATA_SUFFIX), *map(path.with_suffix, DOCUMENT_SUFFIXES)]
    for file in beside:
        if (kind := what_it_is(file)) is not None:
            raise OutputError(f"{file} is not a regular file but {kind}, and would have to be replaced: remove it")
    there = [file for file in (path, *beside) if file.exists()]
    for read in dict.fromkeys((*reads, *being_read())) if there else ():
        for part, what in parts_of(read):
            replaced = next((file for file in there if file.samefile(part)), None)
            if replaced == path and what != "document":
                held = f"a file {'with weights ' if what == 'weights' else ''}of {read}"
                raise OutputError(f"{path} is {'the file to read' if part == read else held}: give another name")
            if replaced is not None:
                holds = "holds weights of" if what == "weights" else "belongs to"
                raise OutputError(f"{path} would replace {replaced}, which {holds} {read}: give another name")
    check_others_keep_weights(there, [path])
    for document in beside[1:]:
        check_written_by_us(document)


def _check_name(path: Path, *, alone: bool) -> None:
    """Refuse a name that other files have, and a file that was not written by this package."""
    belongs = next((end for end in (f".onnx{DATA_SUFFIX}", *DOCUMENT_SUFFIXES) if path.name.endswith(end)), None)
    if belongs is not None:
        raise OutputError(f"{path} has a name reserved for files beside a model (*{belongs}): give another name")
    if not alone and path.suffix in OTHER_KINDS:
        raise OutputError(f"{path} is not the name of an ONNX file: give {path.stem}.onnx")
    check_written_by_us(path)


def check_written_by_us(path: Path) -> None:
    """Refuse to replace what a person may have written: all but empty files, models, arrays, and what is known."""
    if path.suffix in (".onnx", ".onnx_adapter", ".npz") or not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
        if path.suffix in (".yaml", ".py"):
            whole = (beginning + file.read()).replace(b"\r\n", b"\n")  # as git writes text on some systems
            _, _, content = whole.partition(b"\n")
            known = signed(content) == whole
            why = "was not written by modelexport, or was changed since, or is of an earlier version"
        else:
            known = re.search(_beginning(path.name), beginning, re.S) is not None
            why = "was not written by modelexport"
    if not known:
        raise OutputError(f"{path} exists and {why}: give another name, or move it")


def _beginning(name: str) -> bytes:
    """The pattern of the beginning of the files with the suffix of a name."""
    return next((pattern for suffix, pattern in _BEGINNINGS.items() if name.endswith(suffix)), _MODEL)


def signed(content: bytes) -> bytes:
    """YAML or Python, which people edit, after a comment by which :func:`check_written_by_us` knows that nobody did."""
    return b"# Made by modelexport, SHA-256 %b\n%b" % (hashlib.sha256(content).hexdigest().encode(), content)
