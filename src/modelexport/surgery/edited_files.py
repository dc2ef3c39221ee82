"""Writes a tagged file that was edited in memory, in the encoding that it had, with the documents beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from modelexport.core.tags import CallTags
from modelexport.graph.nodes import all_nodes
from modelexport.surgery import Sharing
from modelexport.surgery.grafted_modules import Graft, grafted_sidecar
from modelexport.surgery.shared_files import SharedFiles
from modelexport.tagged.documents.hierarchy_sidecar import descended_documents
from modelexport.tagged.encodings.encoded import encoded
from modelexport.tagged.file import TaggedFile


class EditedFile:
    """A tagged file whose model is going to be edited. The sidecar is compared with the file as it is before that."""

    def __init__(self, tagged: TaggedFile) -> None:
        self._tagged = tagged
        self._before = tagged.hierarchy
        self._names = {value.name or "": value for node in tagged.nodes for value in node.outputs}
        self._names |= {value.name or "": value for value in tagged.model.graph.inputs}

    def save(
        self,
        output: Path,
        staging: Path,
        sharing: Sharing = "auto",
        *,
        tags: CallTags | None = None,
        moved: Mapping[ir.Value, ir.Value] | None = None,
        grafts: Sequence[Graft] = (),
        encoding: str = "",
    ) -> list[str]:
        """Write the edited model and its documents into a folder; returns the weights files beside it.

        Args:
            output: The file that they will be moved to.
            tags: Those of the edited model, if calls have changed.
            moved: Values as they were to what is there instead, where that is another.
            grafts: Exported modules that were put into it.
            encoding: The encoding to write, if not that of the file.

        Raises:
            FileFormatError, OutputError: As :meth:`modelexport.surgery.shared_files.SharedFiles.save`.
        """
        tagged, model, tags = self._tagged, self._tagged.model, tags or self._tagged.call_tags
        before, values = self._before, {}
        if before is not None:
            before, grafted = grafted_sidecar(before, grafts, tags)
            now = {name: (moved or {}).get(value, value) for name, value in (self._names | grafted).items()}
            there = {value for node in all_nodes(model) for value in node.outputs} | set(model.graph.inputs)
            values = {name: value for name, value in now.items() if value in there}
        beside = descended_documents(tagged.path, before, model=model, values=values, tags=tags)
        written = encoded(model, tags, encoding or tagged.encoding)
        return SharedFiles(output, staging, sharing).save(written, output.name, beside)
