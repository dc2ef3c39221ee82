"""Reference values: a trace that is written is read back, and damaged ones are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exports import Exporter
from modelexport.core.calls import ModuleCall
from modelexport.errors import FileFormatError
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.traces.reference_values import open_reference, reference_path, write_reference
from modelexport.traces.trace import Choice, SeenTensor, TensorPlace, Trace

ROOT, STEM, DOWN = (ModuleCall(path, 0) for path in ("", "stem", "down.0"))
X = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
Y = X[:, :4].copy()


@pytest.fixture
def tagged(exported: Exporter, tmp_path: Path) -> TaggedFile:
    return read_tagged(Path(shutil.copyfile(exported("blocks").path, tmp_path / "blocks.onnx")))


def traced() -> Trace:
    trace = Trace(parents={ROOT: None, STEM: ROOT, DOWN: ROOT})
    for call, side, array in ((ROOT, "inputs", X), (STEM, "inputs", X), (DOWN, "outputs", 2 * X), (ROOT, "outputs", Y)):
        content = trace.contents.add(array.astype(np.float64), keep=True)
        content.passed[call] = None
        trace.tensors.append(SeenTensor(TensorPlace(call, side, "t"), content, "float32", array.shape))  # type: ignore[arg-type]
    trace.contents.add(3.0 * X).computed[STEM] = None
    trace.choices.append(Choice(X.astype(np.float64), np.argsort(X)))
    trace.random_numbers.append((DOWN, np.array([0.5, 1.5])))
    return trace


def write(tagged: TaggedFile, **options: Any) -> None:
    path = reference_path(tagged.path)
    write_reference(path, tagged, traced(), dtype="float32", inputs={"x": X}, outputs=[Y], weights={}, **options)


def test_a_trace_is_read_as_it_was_written(tagged: TaggedFile) -> None:
    write(tagged)
    right = traced()
    with open_reference(tagged) as values:
        found = values.trace
    np.testing.assert_array_equal(values.inputs["x"], X)
    np.testing.assert_array_equal(values.outputs[0], Y)
    assert found.parents == right.parents
    for one, other in zip(found.contents, right.contents, strict=True):
        assert (one.fingerprint, one.computed, one.passed) == (other.fingerprint, other.computed, other.passed)
        assert (one.array is None) == (other.array is None)
    for seen, expected in zip(found.tensors, right.tensors, strict=True):
        assert (seen.place, seen.dtype, seen.shape) == (expected.place, expected.dtype, expected.shape)
        np.testing.assert_array_equal(seen.content.array, expected.content.array)
    np.testing.assert_array_equal(found.choices[0].indices, right.choices[0].indices)
    assert found.random_numbers[0][0] == DOWN
    np.testing.assert_array_equal(found.random_numbers[0][1], right.random_numbers[0][1])


def test_the_same_trace_gives_the_same_bytes(tagged: TaggedFile) -> None:
    write(tagged)
    first = reference_path(tagged.path).read_bytes()
    write(tagged)
    assert reference_path(tagged.path).read_bytes() == first


def test_only_chosen_modules_are_kept(tagged: TaggedFile) -> None:
    write(tagged, modules=[DOWN])
    with open_reference(tagged) as values:
        assert values.modules == [DOWN]
        assert {tensor.place.call for tensor in values.trace.tensors} == {DOWN}


def test_the_size_is_told_before_anything_is_written(tagged: TaggedFile) -> None:
    told: list[int] = []
    write(tagged, announce=told.append)
    assert told == [reference_path(tagged.path).stat().st_size]


def test_missing_and_damaged_values_are_refused(tagged: TaggedFile) -> None:
    with pytest.raises(FileFormatError, match="there is no"), open_reference(tagged):
        pass
    write(tagged)
    whole = reference_path(tagged.path).read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        reference_path(tagged.path).write_bytes(whole[:cut])
        with pytest.raises(FileFormatError), open_reference(tagged):
            pass
