"""The smallest run of nodes that is wrong on a device, found by halving."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

Node = TypeVar("Node")
_LEFT_OUT_ONE_BY_ONE = 12
"""The length of a region up to which its nodes are left out one by one."""


def smallest_region(nodes: Sequence[Node], is_wrong: Callable[[Sequence[Node]], bool]) -> list[Node]:
    """The smallest part of a run of nodes that is still wrong, each part being given right values.

    First the shortest beginning that is wrong is found, then the shortest end of that, both by halving; then single
    nodes are left out of it.

    Args:
        nodes: Nodes that are wrong together, in the order of the graph.
        is_wrong: Whether some of these nodes, in this order, are wrong.
    """
    end = 1 + bisect_left(range(1, len(nodes)), True, key=lambda end: is_wrong(nodes[:end]))
    begin = bisect_left(range(1, end), True, key=lambda begin: not is_wrong(nodes[begin:end]))
    found = list(nodes[begin:end])
    for node in list(found) if 1 < len(found) <= _LEFT_OUT_ONE_BY_ONE else ():
        rest = [other for other in found if other is not node]
        if rest and is_wrong(rest):
            found = rest
    return found
