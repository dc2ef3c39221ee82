"""Garbage collection inside the block looks at new objects; garbage of earlier blocks does not accumulate."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from modelexport.core.garbage_collection import Heap, only_new_garbage


class Knot:
    def __init__(self) -> None:
        self.itself = self


def the_collector_is_as_before_after_the_block() -> None:
    before = gc.get_threshold()
    with only_new_garbage():
        assert gc.get_freeze_count() > 0
        with only_new_garbage():
            assert gc.get_threshold()[2] >= before[2]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def nothing_is_done_in_a_program_that_froze_objects() -> None:
    gc.freeze()
    before = gc.get_threshold()
    with only_new_garbage():
        assert gc.get_threshold() == before
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    with only_new_garbage():
        assert gc.get_freeze_count() == 0


def new_garbage_is_collected_and_old_is_not_looked_at() -> None:
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


def garbage_of_earlier_blocks_is_collected_when_it_may_be_much() -> None:
    with only_new_garbage():
        pass  # the first block of a process counts
    Heap.counted, Heap.blocks = 1000, sys.getallocatedblocks()  # as in a process that has imported little
    with only_new_garbage():
        knots = [Knot() for _ in range(Heap.counted)]
    gone = weakref.ref(knots[0])
    del knots
    with only_new_garbage():
        assert gone() is None


@pytest.mark.parametrize(
    "check",
    [
        the_collector_is_as_before_after_the_block,
        nothing_is_done_in_a_program_that_froze_objects,
        new_garbage_is_collected_and_old_is_not_looked_at,
        garbage_of_earlier_blocks_is_collected_when_it_may_be_much,
    ],
    ids=lambda check: check.__name__,
)
def test_in_a_small_process(check: Callable[[], None]) -> None:
    """With the collector as Python starts it, and without the million objects of torch, which takes a second to see."""
    code = f"import test_garbage; test_garbage.{check.__name__}()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
