"""Inside a block, the TorchScript exporter's passes merge and fuse no nodes of different calls.

The exporter has no options for that, so that functions of ``torch._C`` are replaced while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def nothing_merged() -> Iterator[None]:
    """Keep the exporter's passes from merging nodes of different calls.

    - Equal nodes are not merged. Our own optimizer does that, and records all owners.
    - Nodes before and after a value that a call gets or returns are not fused, such as two transpositions of which only
      one is in the call.
    - When the exporter fails, it does not print its graph, which bypasses ``sys.stdout``.
    """
    peephole = torch._C._jit_pass_onnx_peephole

    def between_boundaries(graph: Any, *options: Any) -> None:
        boundaries = [
            _boundary(graph, value) for value in {value.unique(): value for value in graph.outputs()}.values()
        ]
        peephole(graph, *options)
        for boundary in boundaries:
            boundary.output().replaceAllUsesWith(boundary.input())
            boundary.destroy()

    with _replaced(
        torch._C,
        _jit_pass_cse=lambda graph: False,
        _jit_pass_onnx_peephole=between_boundaries,
        _jit_onnx_log=lambda *lines: None,
    ):
        yield


@contextmanager
def _replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module inside the block."""
    before = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


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
