"""Texts that messages have in common."""

from __future__ import annotations

import pytest

from modelexport.core.text import plural


@pytest.mark.parametrize(
    ("count", "verb", "said"),
    [(1, "that contain", "1 node that contains"), (2, "that contain", "2 nodes that contain"), (1, "are", "1 node is"),
     (1, "that were", "1 node that was"), (0, "are", "0 nodes are"), (1_000, "", "1,000 nodes")],
)  # fmt: skip
def test_a_verb_agrees_with_the_number(count: int, verb: str, said: str) -> None:
    assert plural(count, "node", verb) == said
