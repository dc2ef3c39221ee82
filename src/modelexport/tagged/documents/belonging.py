"""Whether the documents beside a model were written together with it: the model has their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from modelexport.core.limits import DOCUMENT_BYTES
from modelexport.errors import FileFormatError
from modelexport.files.regular import read_regular
from modelexport.format import keys


def check_documents(path: Path, properties: Mapping[str, str], suffixes: Iterable[str] = ()) -> None:
    """Refuse documents beside a model that were not written together with it.

    A run that was killed, or a copy of some of the files, may leave those of two exports beside one another.

    Args:
        path: The model.
        properties: Its own. A model of an earlier version does not say what was written with it.
        suffixes: The ends of the names of the documents to look at; all that describe a model if left out.

    Raises:
        FileFormatError: One is of another export. Says which.
    """
    if keys.DOCUMENTS not in properties:
        return
    try:
        recorded = msgspec.json.decode(properties[keys.DOCUMENTS], type=dict[str, str])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FileFormatError(f"{path} has damaged tags ({error}): export it again") from error
    for suffix in suffixes or keys.DESCRIBING_SUFFIXES:
        document = path.with_suffix(suffix)
        if document.exists() and hashlib.sha256(read_document(document)).hexdigest() != recorded.get(suffix):
            raise FileFormatError(
                f"{document} does not belong to {path}: they are of different runs, or one was changed; export again, "
                "or remove the document: the model can be read without it"
            )


def read_document(path: Path) -> bytes:
    """The bytes of a document.

    Raises:
        FileFormatError: It is missing, or is not a file of a size that can be read.
    """
    if not path.exists():
        raise FileFormatError(f"cannot read {path}: there is no such file")
    return read_regular(path, DOCUMENT_BYTES)
