"""Finding the name of the source graph that a longer name was derived from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from modelexport.graph.snapshot import SourceGraph

_SEPARATOR = re.compile(r"[^A-Za-z0-9]+")
_BEFORE_WORD = re.compile(r"(?<![^A-Za-z0-9])[^A-Za-z0-9]++(?=[A-Za-z])")  # tries each gap once, from its beginning


class OriginalNames:
    """The names of a source graph: those of its values, and those of its nodes for their first outputs."""

    def __init__(self, source: SourceGraph) -> None:
        self._values = {node.name: node.outputs[0] for node in source.nodes if node.name and node.outputs}
        self._values.update(zip(source.names, source.names, strict=True))
        self._lengths = frozenset(map(len, self._values))
        """Only beginnings and ends as long as a name are copied: a long name has many."""

    def find(self, name: str | None) -> str | None:
        """The source value whose name, or whose node's name, equals a name or is its beginning or end."""
        if not name:
            return None
        beginning = self._beginning(name)
        return beginning if beginning is not None else self._end(name)

    def candidates(self, *names: str | None) -> Iterator[str]:
        """The source values that names may be derived from, best first: at the beginning of a name, then at the end.

        ``linear_3_quantized`` is derived from ``linear_3``, ``node_MatMul_46/MatMulAddFusion`` from the value of the
        node ``node_MatMul_46``, and ``reorder_token_13`` from ``token_13``. ``add_77`` is not derived from ``add``: a
        number after a name only makes it unique. The end of a name is weak evidence: ``output``, in
        ``conv2d_13quant_scaled_output``, may be the name of a value as well.
        """
        for name in names:
            if name and (candidate := self._beginning(name)) is not None:
                yield candidate
        for name in names:
            if name and (candidate := self._end(name)) is not None:
                yield candidate

    def _beginning(self, name: str) -> str | None:
        cuts = (gap.start() for gap in reversed(list(_BEFORE_WORD.finditer(name))))  # the last gap first
        beginnings = (name[:cut] for cut in (len(name), *cuts) if cut in self._lengths)
        return next((self._values[beginning] for beginning in beginnings if beginning in self._values), None)

    def _end(self, name: str) -> str | None:
        for gap in _SEPARATOR.finditer(name):
            if len(name) - gap.end() not in self._lengths:
                continue
            end = name[gap.end() :]
            if end in self._values and not end.isdigit():
                return self._values[end]
        return None
