"""Copies of the arrays of a run."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from modelexport.traces import kept_arrays


@pytest.fixture
def in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_arrays, "IN_MEMORY", 0)


@pytest.mark.usefixtures("in_a_file")
def test_arrays_in_the_file_outlive_what_copied_them() -> None:
    arrays = [np.full(1 << 15, number, np.float32) for number in range(3)]
    copies = [*map(kept_arrays.KeptArrays().copy, arrays)]
    np.testing.assert_array_equal(copies, arrays)


@pytest.mark.usefixtures("in_a_file")
def test_the_file_is_closed() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept_arrays.KeptArrays().copy(np.zeros(1 << 15, np.float32))
    assert not said
