"""Refuses to replace or remove files that the running command or other models read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from typing import Literal

from modelexport.errors import FileFormatError, OutputError
from modelexport.files.regular_files import entry_of, is_file
from modelexport.format.keys import DATA_SUFFIX, DOCUMENT_SUFFIXES
from modelexport.format.package_manifest import MANIFEST

OTHER_KINDS = (
    ".bin", ".csv", ".gguf", ".html", ".json", ".md", ".npy", ".npz", ".ort", ".pt", ".pth", ".py", ".safetensors",
    ".txt", ".yaml", ".yml", ".zip",
)  # fmt: skip
"""Suffixes of what this package, PyTorch or ONNX Runtime writes or reads, and that is neither a model nor a folder."""
_MOST_FILES = 100_000
"""How many files of an input folder are looked at."""
_reads: ContextVar[tuple[Path, ...]] = ContextVar("reads", default=())

What = Literal["read", "weights", "document"]


@contextmanager
def reading(paths: Iterable[Path]) -> Iterator[None]:
    """Inside: whatever is written, these files and folders, and what belongs to them, are not replaced or removed."""
    token = _reads.set((*_reads.get(), *paths))
    try:
        yield
    finally:
        _reads.reset(token)


def being_read() -> tuple[Path, ...]:
    """The paths that the enclosing :func:`reading` blocks protect."""
    return _reads.get()


def parts_of(read: Path) -> Iterator[tuple[Path, What]]:
    """The files that an input consists of, as far as they are there: its own, its weights', its documents.

    Of a package these are all files in the folder; of another folder, those that are no model or lie beside one, since
    a model may be exported into the folder of its checkpoint.
    """
    if read.is_dir():
        package = (read / MANIFEST).is_file()
        outputs = (".onnx", f".onnx{DATA_SUFFIX}", *DOCUMENT_SUFFIXES)
        for file in islice(read.rglob("*"), _MOST_FILES):
            if (package or not file.name.endswith(outputs)) and is_file(file):
                yield file, "read"
        return
    if not is_file(read):
        return
    yield read, "read"
    if read.suffix in OTHER_KINDS:
        return
    from modelexport.files.linked_weights import data_files  # what it imports is slow, and rarely needed

    with suppress(FileFormatError):  # its reader says what is wrong with it
        yield from ((file, "weights") for file in data_files(read) if is_file(file))
    yield from ((file, "document") for file in map(read.with_suffix, DOCUMENT_SUFFIXES) if is_file(file))


def check_kept(places: Iterable[Path]) -> None:
    """Fail where a file that is about to be replaced or removed is one of those that are read.

    A hard link to one may be replaced: that leaves the other name as it is.
    """
    there = {entry: place for place in places if (entry := entry_of(place)) is not None}
    for read in _reads.get() if there else ():
        for file, _ in parts_of(read):
            for entry in {entry_of(file), entry_of(Path(os.path.realpath(file)))}:
                if entry in there:
                    raise OutputError(f"{there[entry]} is read, or belongs to {read}: give another name")


def check_others_keep_weights(places: Collection[Path], models: Collection[Path]) -> None:
    """Fail where a file that is about to be replaced or removed holds weights of a model that stays.

    Args:
        places: The files.
        models: The models that are replaced or removed with them.
    """
    if any(is_file(place) for place in places):
        from modelexport.files.linked_weights import model_with_weights_in  # what it imports is slow

        if (found := model_with_weights_in(places, models)) is not None:
            model, place = found
            raise OutputError(
                f"{place} would be replaced or removed, and holds weights of {model}: give another name, or move "
                "that model and its weights to another folder"
            )
