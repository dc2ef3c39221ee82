"""Texts that messages have in common."""

from __future__ import annotations

import pytest

from modelexport.core.text import chained, plural


@pytest.mark.parametrize(
    ("count", "verb", "said"),
    [(1, "that contain", "1 node that contains"), (2, "that contain", "2 nodes that contain"), (1, "are", "1 node is"),
     (1, "that were", "1 node that was"), (0, "are", "0 nodes are"), (1_000, "", "1,000 nodes")],
)  # fmt: skip
def test_a_verb_agrees_with_the_number(count: int, verb: str, said: str) -> None:
    assert plural(count, "node", verb) == said


def test_a_chain_of_exceptions_that_leads_back_to_its_beginning_ends() -> None:
    told = ValueError("raised again while what it caused is handled")
    wrapped = RuntimeError("a library's")
    wrapped.__cause__, told.__context__ = told, wrapped
    assert list(chained(told)) == [told, wrapped]
