"""Attributes of other packages that have another value for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from modelexport.core.replaced_attributes import attribute_set


def test_an_attribute_is_as_before_also_after_an_error() -> None:
    target = SimpleNamespace(value=1)
    with pytest.raises(RuntimeError), attribute_set(target, "value", 2):
        assert target.value == 2
        raise RuntimeError
    assert target.value == 1


def test_an_attribute_that_was_absent_is_absent_again() -> None:
    target = SimpleNamespace()
    with attribute_set(target, "value", 2):
        assert target.value == 2
    assert not hasattr(target, "value")
