"""A tagged file that was edited in memory, written in the encoding that it had, with true documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from modelexport.core.tags import CallTags
from modelexport.graph.nodes import all_nodes
from modelexport.surgery.grafted_modules import Graft, grafted_sidecar
from modelexport.tagged.documents.hierarchy_sidecar import descended_documents
from modelexport.tagged.file import TaggedFile


class Documents:
    """The documents beside a file, which are written again for what is made of it.

    Made before the file is edited: the sidecar is compared with the file as it is.
    """

    def __init__(self, tagged: TaggedFile) -> None:
        self._tagged = tagged
        self._before = tagged.hierarchy
        self._names = {value.name or "": value for node in tagged.nodes for value in node.outputs}
        self._names |= {value.name or "": value for value in tagged.model.graph.inputs}

    def of_edited(
        self, tags: CallTags, moved: Mapping[ir.Value, ir.Value] | None = None, grafts: Sequence[Graft] = ()
    ) -> dict[str, bytes]:
        """The end of each document's name to its content.

        Args:
            tags: Those of the edited model.
            moved: Values as they were to what is there instead, where that is another.
            grafts: Exported modules that were put into it.
        """
        model = self._tagged.model
        if self._before is None:
            before, values = None, {}
        else:
            before, grafted = grafted_sidecar(self._before, grafts, tags)
            now = {name: (moved or {}).get(value, value) for name, value in (self._names | grafted).items()}
            there = {value for node in all_nodes(model) for value in node.outputs} | set(model.graph.inputs)
            values = {name: value for name, value in now.items() if value in there}
        return descended_documents(self._tagged.path, before, model=model, values=values, tags=tags)
