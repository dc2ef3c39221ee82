"""Inside a block, the TorchScript exporter's passes merge and fuse no nodes of different calls.

The exporter has no options for that, so that functions of ``torch._C`` are replaced while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from modelexport.capture.patches import replaced


@contextmanager
def nothing_merged() -> Iterator[None]:
    """Keep the exporter's passes from merging nodes of different calls.

    - Equal nodes are not merged. Our own optimizer does that, and records all owners.
    - Nodes before and after a value that a call gets or returns are not fused, such as two transpositions of which only
      one is in the call.
    - When the exporter fails, it does not print its graph, which bypasses ``sys.stdout``.
    """
    with replaced({"merging": lambda _: lambda graph: False, "fusing": _between_boundaries, "log": lambda _: _silent}):
        yield


def _silent(*lines: Any) -> None:
    pass


def _between_boundaries(peephole: Callable[..., Any]) -> Callable[..., None]:
    def run(graph: Any, *options: Any) -> None:
        boundaries = [
            _boundary(graph, value) for value in {value.unique(): value for value in graph.outputs()}.values()
        ]
        peephole(graph, *options)
        for boundary in boundaries:
            boundary.output().replaceAllUsesWith(boundary.input())
            boundary.destroy()

    return run


def _boundary(graph: Any, value: Any) -> Any:
    """Insert a node that no pass knows between a value and its users."""
    boundary = graph.create("modelexport::boundary", [value], 1)
    if value.node().kind() == "prim::Param":
        graph.prependNode(boundary)
    else:
        boundary.insertAfter(value.node())
    boundary.output().setType(value.type())
    value.replaceAllUsesAfterNodeWith(boundary, boundary.output())
    return boundary
