"""Finding the name of the source graph that a longer name was derived from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from modelexport.graph.snapshot import SourceGraph

_SEPARATOR = re.compile(r"[^A-Za-z0-9]+")
_BEFORE_WORD = re.compile(r"[^A-Za-z0-9]+(?=[A-Za-z])")


class OriginalNames:
    """The names of a source graph: those of its values, and those of its nodes for their first outputs."""

    def __init__(self, source: SourceGraph) -> None:
        self._values = {node.name: node.outputs[0] for node in source.nodes if node.name and node.outputs}
        self._values.update((name, name) for name in source.names)

    def find(self, name: str | None) -> str | None:
        """The source value whose name, or whose node's name, equals a name or is its beginning or end."""
        return next(self.candidates(name), None)

    def candidates(self, *names: str | None) -> Iterator[str]:
        """The source values that names may be derived from, best first: at the beginning of a name, then at the end.

        ``linear_3_quantized`` is derived from ``linear_3``, ``node_MatMul_46/MatMulAddFusion`` from the value of the
        node ``node_MatMul_46``, and ``reorder_token_13`` from ``token_13``. ``add_77`` is not derived from ``add``: a
        number after a name only makes it unique. The end of a name is weak evidence: ``output``, in
        ``conv2d_13quant_scaled_output``, may be the name of a value as well.
        """
        given = [name for name in names if name]
        for find in (self._beginning, self._end):
            for name in given:
                if (found := find(name)) is not None:
                    yield found

    def _beginning(self, name: str) -> str | None:
        if name in self._values:
            return self._values[name]
        for gap in reversed([found.start() for found in _BEFORE_WORD.finditer(name)]):
            if name[:gap] in self._values:
                return self._values[name[:gap]]
        return None

    def _end(self, name: str) -> str | None:
        for gap in _SEPARATOR.finditer(name):
            end = name[gap.end() :]
            if end in self._values and not end.isdigit():
                return self._values[end]
        return None
