"""Garbage collection inside the block looks at new objects; garbage of earlier blocks does not accumulate."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from modelexport.core.garbage_collection import Heap, only_new_garbage


@pytest.fixture(autouse=True)
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector as Python starts it; `conftest` has another for all tests."""
    monkeypatch.setattr(Heap, "frozen", False)
    thresholds = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.freeze()
    gc.set_threshold(*thresholds)


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_the_collector_is_as_before_after_the_block() -> None:
    before = gc.get_threshold()
    with only_new_garbage():
        assert gc.get_freeze_count() > 0
        with only_new_garbage():
            assert gc.get_threshold()[2] >= before[2]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_nothing_is_done_in_a_program_that_froze_objects() -> None:
    gc.freeze()
    before = gc.get_threshold()
    with only_new_garbage():
        assert gc.get_threshold() == before
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    with only_new_garbage():
        assert gc.get_freeze_count() == 0


def test_new_garbage_is_collected_and_old_is_not_looked_at() -> None:
    old = Knot()
    gone = weakref.ref(old)
    with only_new_garbage():
        new = weakref.ref(Knot())
        del old
        gc.collect()
        assert new() is None
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_garbage_of_earlier_blocks_is_collected_when_it_may_be_much(monkeypatch: pytest.MonkeyPatch) -> None:
    with only_new_garbage():
        pass  # the first block of a process counts
    monkeypatch.setattr(Heap, "counted", 1000)  # as in a process that has imported little
    monkeypatch.setattr(Heap, "blocks", sys.getallocatedblocks())
    with only_new_garbage():
        knots = [Knot() for _ in range(Heap.counted)]
    gone = weakref.ref(knots[0])
    del knots
    with only_new_garbage():
        assert gone() is None
