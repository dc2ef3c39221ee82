"""The tables beside a file, ``NAME.dag.json`` and ``NAME.operations.json``, made from the file's tags alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

from modelexport.errors import UsageError
from modelexport.files.atomic_writing import written_together
from modelexport.format import keys
from modelexport.graph.properties import recorded
from modelexport.tagged.documents.encoded_documents import TABLES, encode_table
from modelexport.tagged.file import TaggedFile


def write_tables(tagged: TaggedFile) -> list[Path]:
    """Write the tables of a file that was exported with ``documents=False``.

    Returns:
        The files that were written.

    Raises:
        UsageError: The file records no tables, or other ones: it was changed since.
        OutputError: They cannot be written.
    """
    if tagged.found_calls is not None:
        raise UsageError(f"{tagged.path} is not from modelexport, so it has no documents: `tree` and `nodes` read it")
    digests = recorded(tagged.model, keys.DOCUMENTS, damaged=f"{tagged.path} has damaged tags") or {}
    tables = {suffix: encode_table(table(tagged.model, tagged.call_tags)) for suffix, table in TABLES.items()}
    for suffix, content in tables.items():
        if digests.get(suffix) != hashlib.sha256(content).hexdigest():
            raise UsageError(f"{tagged.path} was written without {suffix} or changed since: `tree` and `nodes` read it")
    with written_together(tagged.path.parent, [tagged.path]) as staging:
        for suffix, content in tables.items():
            (staging / tagged.path.with_suffix(suffix).name).write_bytes(content)
    return [tagged.path.with_suffix(suffix) for suffix in tables]
