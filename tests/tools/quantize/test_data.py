"""Data to calibrate with: every form is read, and what does not fit is one line that says what the model takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import save_file

import models  # noqa: F401 - makes pillow and torchvision importable
from modelexport.errors import FileFormatError, InputsError, UsageError
from modelexport.runtime.fitted_inputs import fitted
from modelexport.traces.calibration_data import LENGTH, read_data


def model_of(**inputs: tuple[ir.DataType, list[int | str | None]]) -> ir.Model:
    values = [
        ir.Value(name=n, type=ir.TensorType(dtype), shape=ir.Shape(shape)) for n, (dtype, shape) in inputs.items()
    ]
    return ir.Model(ir.Graph(values, [], nodes=[]), ir_version=10)


FEATURES = model_of(x=(ir.DataType.FLOAT, ["batch", 3]))
TOKENS = model_of(
    input_ids=(ir.DataType.INT64, ["batch", "sequence"]), attention_mask=(ir.DataType.INT64, ["batch", "sequence"])
)
FIXED = model_of(input_ids=(ir.DataType.INT64, [2, 6]), attention_mask=(ir.DataType.INT64, [2, 6]))
CACHED = model_of(
    input_ids=(ir.DataType.INT64, ["batch", "sequence"]),
    position_ids=(ir.DataType.INT64, ["batch", "sequence"]),
    past=(ir.DataType.FLOAT, ["batch", 4, "past_sequence", 8]),
)
PIXELS = model_of(pixel_values=(ir.DataType.FLOAT, [1, 3, 4, 6]))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with a tokenizer that knows a few words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    vocabulary = {word: number for number, word in enumerate(["[UNK]", "a", "cat", "sat", "on", "mat"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def written(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez(path, **arrays) if path.suffix == ".npz" else save_file(arrays, path)
    return path


@pytest.mark.parametrize("name", ["data.npz", "data.safetensors"])
def test_arrays_are_one_run_or_have_an_axis_of_runs_in_front(tmp_path: Path, name: str) -> None:
    (run,) = read_data(written(tmp_path / name, {"x": np.ones((2, 3))}), FEATURES, tmp_path)
    assert run["x"].shape == (2, 3)
    assert run["x"].dtype == np.float32
    runs = read_data(written(tmp_path / name, {"x": np.arange(12.0).reshape(4, 1, 3)}), FEATURES, tmp_path, limit=3)
    assert [float(run["x"][0, 0]) for run in runs] == [0, 3, 6]


def test_each_line_of_jsonl_is_a_run(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": [[1, 2, 3]]}\n\n{"x": [[4, 5, 6], [7, 8, 9]]}\n')
    assert [len(run["x"]) for run in read_data(path, FEATURES, tmp_path)] == [1, 2]
    path.write_text(json.dumps({"text": "a cat"}))
    (run,) = read_data(path, TOKENS, words)
    assert run["input_ids"].tolist() == [[1, 2]]


def test_each_line_of_a_text_is_a_run_of_tokens(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("a cat sat\n\non a mat in" + " cat" * LENGTH)
    runs = read_data(path, TOKENS, words)
    assert [run["input_ids"].shape[1] for run in runs] == [3, LENGTH, 4], "a long line makes several runs"
    assert runs[0]["input_ids"].tolist() == [[1, 2, 3]]
    assert runs[0]["attention_mask"].tolist() == [[1, 1, 1]]


def test_texts_fill_the_sizes_that_a_file_fixes(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("a cat\nsat on a mat\na")
    first, last = read_data(path, FIXED, words)
    assert first["input_ids"].tolist() == [[1, 2, 0, 0, 0, 0], [3, 4, 1, 5, 0, 0]]
    assert first["attention_mask"].sum() == 6
    assert last["input_ids"].tolist() == [[1, 0, 0, 0, 0, 0]] * 2  # the last batch is filled with its own rows


def test_a_cache_begins_empty(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("a cat sat")
    (run,) = read_data(path, CACHED, words)
    assert run["past"].shape == (1, 4, 0, 8)
    assert run["position_ids"].tolist() == [[0, 1, 2]]


def image_folder(path: Path, *colours: tuple[int, int, int]) -> Path:
    image = pytest.importorskip("PIL.Image")
    path.mkdir()
    for number, colour in enumerate(colours):
        image.new("RGB", (20, 10), colour).save(path / f"{number}.png")
    (path / "notes.txt").write_text("not an image")
    return path


def test_images_are_what_the_processor_of_transformers_makes_of_them(tmp_path: Path) -> None:
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "size": {"height": 4, "width": 6}}
    settings = {"image_processor_type": "ViTImageProcessor", **half}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    runs = read_data(image_folder(tmp_path / "images", (255, 0, 0), (0, 0, 255)), PIXELS, tmp_path)
    assert np.allclose([run["pixel_values"][0, :, 3, 5] for run in runs], [[1, -1, -1], [-1, -1, 1]])


def test_images_without_a_processor_are_numbers_from_0_to_1_in_the_size_of_the_file(tmp_path: Path) -> None:
    (run,) = read_data(image_folder(tmp_path / "images", (255, 0, 51)), PIXELS, tmp_path)
    assert np.allclose(run["pixel_values"][0, :, 3, 5], [1, 0, 0.2])


Write = Callable[[Path], Path]


def text(content: str, name: str = "data.jsonl") -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


def arrays(**values: Any) -> Write:
    return lambda folder: written(folder / "data.npz", values)


@pytest.mark.parametrize(
    ("write", "model", "message"),
    [
        (arrays(y=np.ones((1, 3))), FEATURES, "does not fit: x missing; the model takes x, and y is none of them"),
        (
            arrays(input_ids=np.ones((2, 3), int), attention_mask=np.ones((2, 4), int)),
            TOKENS,
            r"attention_mask has the shape \[2, 4\], and in input_ids sequence is 3",
        ),
        (arrays(x=np.ones((1, 3)), z=np.ones(2)), FEATURES, "does not fit: the model has no input z"),
        (arrays(x=np.ones((1, 4))), FEATURES, r"x has the shape \[1, 4\], and the model takes \[batch, 3\]"),
        (arrays(x=np.array([["a", "b", "c"]])), FEATURES, "x has <U1, and the model takes float32"),
        (arrays(input_ids=np.ones((1, 2)), attention_mask=np.ones((1, 2))), TOKENS, "input_ids has float64, and"),
        (text('{"x": [[1, 2, 3]]}\n{"x": [[1, 2]]}'), FEATURES, r"x has the shape \[1, 2\].* \(run 2\)"),
        (text('{"x": [[1, 2, 3]]}\n{"x": '), FEATURES, "line 2 of .* is not an object of inputs by name"),
        (text("a cat", "some.txt"), TOKENS, "is text, and there is no tokenizer.json in .*: name its folder"),
        (text("\n \n", "empty.jsonl"), FEATURES, "has no inputs for the model"),
        (lambda folder: folder, TOKENS, "is a folder, which is read as images, and the model takes input_ids"),
        (lambda folder: folder / "nothing.npz", FEATURES, "there is no file"),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, write: Write, model: ir.Model, message: str
) -> None:
    with pytest.raises((UsageError, FileFormatError), match=message) as refused:
        read_data(write(tmp_path), model, tmp_path)
    assert "\n" not in str(refused.value)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="is not text: give"):
        read_data(tmp_path / "data.bin", TOKENS, tmp_path)


def test_lines_end_at_line_breaks_only_and_may_begin_with_a_byte_order_mark(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "a\u2028cat"}, ensure_ascii=False).encode())
    (run,) = read_data(path, TOKENS, words)
    assert run["input_ids"].tolist() == [[1, 2]]


def test_rows_of_a_fixed_batch_come_from_several_lines_and_have_one_length(tmp_path: Path, words: Path) -> None:
    pairs = model_of(input_ids=(ir.DataType.INT64, [2, "sequence"]))
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a cat sat"}\n{"text": "the third line lacks a second row"}')
    first, second = read_data(path, pairs, words)
    assert first["input_ids"].tolist() == [[1, 0, 0], [1, 2, 3]]
    assert second["input_ids"].tolist() == [[0, 0, 0, 0, 1, 0, 0]] * 2


def test_only_the_lines_that_are_needed_are_read(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(b"a cat\n" * 10_000 + b"\xff is not text")
    assert len(read_data(path, TOKENS, words, limit=3)) == 3


def test_a_text_too_long_to_tokenize_is_refused_by_its_line(tmp_path: Path, words: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("a\n" + "a" * 500_001)
    with pytest.raises(FileFormatError, match=r"line 2 of .* has more than 500,000 characters: cut it"):
        read_data(path, TOKENS, words)
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a" * 500_001}))
    with pytest.raises(FileFormatError, match=r"line 1 of .* has more than 500,000 characters"):
        read_data(tmp_path / "data.jsonl", TOKENS, words)


def test_a_number_that_the_type_of_the_input_cannot_hold_is_refused(tmp_path: Path) -> None:
    ids = model_of(ids=(ir.DataType.INT64, ["n"]))
    path = written(tmp_path / "data.npz", {"ids": np.array([1, 2**64 - 1], np.uint64)})
    with pytest.raises(UsageError, match="ids has the number 18446744073709551615, and the model takes int64"):
        read_data(path, ids, tmp_path)
    (run,) = read_data(written(tmp_path / "data.npz", {"ids": np.array([1, 2], np.uint64)}), ids, tmp_path)
    assert run["ids"].tolist() == [1, 2]
    assert run["ids"].dtype == np.int64
    path = written(tmp_path / "large.npz", {"x": np.array([[1, 2, 1e300]])})
    with pytest.raises(UsageError, match=r"x has the number 1e\+300, and the model takes float32"):
        read_data(path, FEATURES, tmp_path)


def test_a_tokenizer_that_panics_is_an_error_of_one_line(
    tmp_path: Path, words: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((words / "tokenizer.json").read_text())
    settings["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (words / "tokenizer.json").write_text(json.dumps(settings))
    (tmp_path / "some.txt").write_text("a cat")
    with pytest.raises(FileFormatError, match=r"tokenizer.*: give another one"):
        read_data(tmp_path / "some.txt", TOKENS, words)
    assert capfd.readouterr().err == "", "the library writes its stack past Python"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"image_mean": [0.5]}, "is not the settings of an image processor"),
        ({"size": {"height": 0, "width": 8}}, "each number has to be from 1 to 8,192"),
        ({"size": 10**9}, "each number has to be from 1 to 8,192"),
    ],
)
def test_settings_of_an_image_processor_that_no_image_fits_are_named(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    pytest.importorskip("PIL.Image")
    with pytest.raises(FileFormatError, match=reason):
        read_data(tmp_path, PIXELS, tmp_path)


def test_what_transformers_could_not_import_for_a_processor_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError("Could not import") from RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", fails)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(InputsError, match=r"torchvision::nms does not exist\): install"):
        read_data(image_folder(tmp_path / "images", (255, 0, 0)), PIXELS, tmp_path)


def test_only_formats_that_pillow_decodes_itself_are_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (6, 4))
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "b.eps")  # Pillow would start Ghostscript to read it
    assert len(read_data(tmp_path, PIXELS, tmp_path)) == 1


def test_axes_without_names_have_any_sizes() -> None:
    model = model_of(x=(ir.DataType.FLOAT, [None, 3]), y=(ir.DataType.FLOAT, [None]))
    assert len(fitted({"x": np.ones((2, 3)), "y": np.ones(5)}, model)) == 2
