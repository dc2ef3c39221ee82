"""Writes a tagged file that was edited in memory, in its encoding, with the documents beside it."""

from __future__ import annotations

from pathlib import Path

from modelexport.surgery import Sharing
from modelexport.surgery.shared_files import SharedFiles
from modelexport.tagged.documents.encoded_documents import documents_after
from modelexport.tagged.documents.export_facts import ExportFacts
from modelexport.tagged.file import TaggedFile


def save_edited(
    edited: TaggedFile, facts: ExportFacts | None, output: Path, staging: Path, sharing: Sharing = "auto"
) -> list[str]:
    """Write an edited file and its documents into a folder; returns the weights files beside it.

    Args:
        edited: The file, with the path that it was read from.
        facts: What is known of it besides its graph, taken before it was edited.
        output: The file that they will be moved to.

    Raises:
        FileFormatError, OutputError: As :meth:`modelexport.surgery.shared_files.SharedFiles.save`.
    """
    beside = documents_after(edited.path, facts, edited.model, edited.call_tags)
    return SharedFiles(output, staging, sharing).save(edited.encoded(), output.name, beside)
