"""A bound holds for padded batches, too: methods that quantize activations take one scale for all rows of a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.tools.quantize.padded_batches import ROWS, padded_batches
from modelexport.tools.quantize.search_within_bound import search


def product(path: Path, shape: str) -> Path:
    """A file whose output is a product of its input with a weight of four rows."""
    takes = f'<ir_version: 10, opset_import: ["": 20]> g (float[{shape}, 4] x) => (float[{shape}, 6] y)'
    model = onnx.parser.parse_model(takes + " { y = MatMul (x, w) }")
    weight = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, path)
    return path


def runs_of(sizes: list[float]) -> list[dict[str, np.ndarray]]:
    """A run of each size of numbers, each longer than the one before."""
    random = np.random.default_rng(1)
    return [{"x": (size * random.standard_normal((1, 3 + i, 4))).astype(np.float32)} for i, size in enumerate(sizes)]


def test_the_rows_of_a_batch_are_those_of_its_runs(tmp_path: Path) -> None:
    path, runs = product(tmp_path / "a.onnx", "batch, words"), runs_of([1.0] * (ROWS + 2))
    session = open_session(path)
    batches = list(padded_batches(read_tagged(path).model, runs, "y"))
    assert [inputs["x"].shape for inputs, _ in batches] == [(ROWS, ROWS + 2, 4), (2, ROWS + 4, 4)]
    rows = [row for inputs, rows_of in batches for row in rows_of(run_session(session, inputs)["y"])]
    for run, row in zip(runs, rows, strict=True):
        np.testing.assert_allclose(row, run_session(session, run)["y"], rtol=1e-5, atol=1e-6)


def test_a_file_with_a_fixed_batch_takes_no_batches(tmp_path: Path) -> None:
    path = product(tmp_path / "a.onnx", "1, words")
    assert not list(padded_batches(read_tagged(path).model, runs_of([1.0, 1.0]), "y"))


def runs_of_two_inputs() -> list[dict[str, np.ndarray]]:
    return [{"x": np.ones((1, 4), np.float32), "bank": np.ones((3, 4), np.float32)} for _ in range(2)]


@pytest.mark.parametrize(
    ("signature", "batched"),
    [
        ("(float[b,4] x, float[b,4] bank) => (float[b,4] y)", True),
        ("(float[b,4] x, float[k,4] bank) => (float[b,4] y)", False),
        ("(float[b,4] x, float[b,4] bank) => (float[k,4] y)", False),
        ("(float[?,4] x, float[?,4] bank) => (float[?,4] y)", False),
    ],
)
def test_only_files_whose_first_axes_are_one_take_batches(tmp_path: Path, signature: str, batched: bool) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g {signature} {{ y = Add (x, bank) }}')
    onnx.save(model, tmp_path / "a.onnx")
    assert bool(list(padded_batches(read_tagged(tmp_path / "a.onnx").model, runs_of_two_inputs(), "y"))) == batched


def test_an_output_without_the_rows_of_its_batch_is_not_compared(tmp_path: Path) -> None:
    path = product(tmp_path / "a.onnx", "batch, words")
    ((_, rows_of),) = padded_batches(read_tagged(path).model, runs_of([1.0, 1.0]), "y")
    assert [len(rows) for rows in rows_of(np.zeros((2, 4, 6)))] == [1, 1]
    assert rows_of(np.zeros((4, 2, 6))) == rows_of(np.zeros(())) == []


def test_what_is_within_a_bound_alone_and_not_in_batches_is_not_chosen(tmp_path: Path) -> None:
    path = product(tmp_path / "a.onnx", "batch, words")
    runs = runs_of([1.0, 1.0, 1.0, 100.0])
    loose = search(path, to=["int8-dynamic"], data=runs, within="error<=10").found
    assert loose.in_batches is not None, "the small row gets the large one's scale"
    assert loose.in_batches > 5 * loose.judged, "the small row gets the large one's scale"
    tight = search(path, to=["int8-dynamic"], data=runs, within=f"error<={2 * loose.judged}").found
    assert tight.met
    assert tight.judged == tight.in_batches == 0
    assert tight.bytes_after == tight.bytes_before
