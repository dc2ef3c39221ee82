"""Inputs to calibrate with and to judge by: arrays, descriptions, images or texts, fitted to the inputs of a file."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from modelexport.core.collected_messages import native_errors_to
from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import IMAGE_PIXELS, LINE_CHARACTERS, SETTINGS_BYTES, TEXT_CHARACTERS
from modelexport.core.missing_extras import missing_extra
from modelexport.core.text import error_line, first_few, raised_first, reason_of
from modelexport.errors import FileFormatError, InputsError
from modelexport.files.regular_files import open_regular, read_json, read_regular
from modelexport.graph.nodes import required_inputs
from modelexport.runtime.fitted_inputs import fitted
from modelexport.runtime.input_files import read_feeds
from modelexport.tagged.file import TaggedFile

Feeds = dict[str, Any]
"""Names of inputs to arrays: what one run takes."""

RunInputs = Sequence[Mapping[str, Any]]
"""The inputs of several runs."""

LIMIT = 128
"""Runs that are read from data unless more are asked for."""
LENGTH = 128
"""Tokens of a text that one run takes, where the file does not fix it."""
PLAIN_EDGE = 224
"""Height and width of images where neither the file nor a processor says another."""
TOKENIZER, PROCESSOR = "tokenizer.json", "preprocessor_config.json"
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF")
"""The formats that Pillow decodes itself; for others it starts programs, such as Ghostscript for EPS."""


def given_runs(tagged: TaggedFile, data: RunInputs | str | Path, processor: str | Path | None) -> RunInputs:
    """Inputs for runs of a file, read by :func:`read_data` if ``data`` is a path, in the types that the file takes."""
    if isinstance(data, str | Path):
        return read_data(Path(data), tagged.model, Path(processor or tagged.path.parent))
    return _fitted_runs(data, tagged.model, "data")


def read_data(path: Path, model: ir.Model, beside: Path, *, limit: int = LIMIT) -> list[Feeds]:
    """Inputs for runs of a file.

    ``.npz`` and ``.safetensors`` have an array for each input: of one run, or of several, with an axis more in front.
    ``.jsonl`` has an object of lists by name, or ``{"text": ...}``, on each line; any other file is text, a run a line.
    A folder has images.

    Args:
        beside: The folder of its tokenizer (``tokenizer.json``) or its image processor (``preprocessor_config.json``).
    """
    if path.is_dir():
        runs = _images(path, model, beside)
    elif path.suffix in (".npz", ".safetensors"):
        runs = _unstacked(read_feeds(path, 0), model)
    elif path.suffix == ".jsonl":
        runs = _objects(path, model, beside)
    else:
        runs = _texts(_lines(path, TEXT_CHARACTERS), path, model, beside)
    return _fitted_runs(itertools.islice(runs, limit), model, str(path))


def _fitted_runs(runs: Iterable[Mapping[str, Any]], model: ir.Model, source: str) -> list[Feeds]:
    runs_of_model: list[Feeds] = []
    for number, feeds in enumerate(runs, 1):
        try:
            runs_of_model.append(fitted(feeds, model))
        except InputsError as error:
            raise InputsError(f"{source} does not fit: {error}" + (f" (run {number})" if number > 1 else "")) from error
    if not runs_of_model:
        raise InputsError(f"{source} has no inputs for the model")
    return runs_of_model


def _unstacked(arrays: Feeds, model: ir.Model) -> Iterator[Feeds]:
    """The runs in some arrays. Arrays of several runs have one more axis than the model's inputs, in front."""
    ranks = {value.name or "": len(value.shape) for value in required_inputs(model) if value.shape is not None}
    stacked = {name for name, array in arrays.items() if np.ndim(array) == ranks.get(name, -2) + 1}
    if not arrays or stacked != arrays.keys():
        yield arrays
        return
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise InputsError(f"the arrays have different numbers of runs: {counts}")
    for index in range(next(iter(counts.values()))):
        yield {name: array[index] for name, array in arrays.items()}


def _objects(path: Path, model: ir.Model, beside: Path) -> Iterator[Feeds]:
    """The runs of lines that are objects of lists by name, or the tokens of lines that are ``{"text": ...}``."""
    inputs = {value.name or "": value for value in required_inputs(model)}
    objects = (
        (number, decode_json(line, kind=dict[str, Any], damaged=_problem(path, number), then="correct it"))
        for number, line in _lines(path, LINE_CHARACTERS)
    )
    for number, described in objects:
        if described.keys() == {"text"} and "text" not in inputs:
            texts = itertools.chain([(number, described)], objects)
            yield from _texts(((line, str(each.get("text", ""))) for line, each in texts), path, model, beside)
            return
        try:
            yield {name: np.asarray(value) for name, value in described.items()}
        except ValueError as error:
            raise FileFormatError(f"{_problem(path, number)} ({error_line(error)})") from error


def _problem(path: Path, number: int) -> str:
    return f"line {number} of {path} is not an object of inputs by name"


def _lines(path: Path, longest: int) -> Iterator[tuple[int, str]]:
    """The number and the text of each line that is not empty, read as they are needed."""
    with open_regular(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        try:
            for number in itertools.count(1):
                line = text.readline(longest + 1)
                if not line:
                    return
                if len(line) > longest:
                    raise FileFormatError(f"line {number} of {path} has more than {longest:,} characters: cut it")
                if line.strip():
                    yield number, line.strip()
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path} is not text: give .npz, .safetensors, .jsonl, text or a folder") from error


def _texts(texts: Iterable[tuple[int, str]], path: Path, model: ir.Model, beside: Path) -> Iterator[Feeds]:
    """The tokens of texts, a text a run, or as many as the file takes; a long text makes several runs.

    An input that no tokenizer makes and that may have the length zero (a cache) has it.

    Args:
        texts: The number of the line of each text, and the text.
    """
    texts = iter(texts)
    first = list(itertools.islice(texts, 1))  # a file that is not text is refused as such
    tokenizer = _tokenizer(beside, path)
    padding = {name: value for name, value in (tokenizer.padding or {}).items() if name in ("pad_id", "pad_type_id")}
    tokenizer.no_padding()
    inputs = {value.name or "": value for value in required_inputs(model)}
    shape = next((value.shape for value in inputs.values() if value.shape is not None and len(value.shape) == 2), None)
    if shape is None:
        raise InputsError(f"the model takes {first_few(inputs)}, and no input of tokens: give arrays, not text")
    batch, length = (size if isinstance(size, int) else 0 for size in shape)
    tokenizer.enable_truncation(length or LENGTH)

    def rows() -> Iterator[Any]:
        for number, text in itertools.chain(first, texts):
            if len(text) > TEXT_CHARACTERS:
                raise FileFormatError(
                    f"the text of line {number} of {path} has more than {TEXT_CHARACTERS:,} characters: cut it"
                )
            with _panics_told(f"the tokenizer in {beside} fails on line {number} of {path}"):
                encoding = tokenizer.encode(text)
            yield from (encoding, *encoding.overflowing)

    for batch_of_rows in _batches(rows(), batch or 1):
        yield _feeds_of_rows(batch_of_rows, length, padding, inputs)


def _batches(rows: Iterable[Any], count: int) -> Iterator[list[Any]]:
    """Batches of as many rows as a file takes; the last batch is filled by repeating its rows."""
    rows = iter(rows)
    while batch := list(itertools.islice(rows, count)):
        yield list(itertools.islice(itertools.cycle(batch), count))


def _feeds_of_rows(rows: list[Any], length: int, padding: Mapping[str, int], inputs: Mapping[str, ir.Value]) -> Feeds:
    """The arrays of one run, of rows padded to ``length``, or to the longest of them if it is 0."""
    for row in rows:
        row.pad(length or max(map(len, rows)), **padding)
    arrays = {
        "input_ids": [row.ids for row in rows],
        "attention_mask": [row.attention_mask for row in rows],
        "token_type_ids": [row.type_ids for row in rows],
        "position_ids": [list(range(len(row.ids))) for row in rows],
    }
    return {name: arrays[name] if name in arrays else _empty(name, value, len(rows)) for name, value in inputs.items()}


def _empty(name: str, value: ir.Value, batch: int) -> Any:
    sizes = list(value.shape or ())
    if all(isinstance(size, int) for size in sizes[1:]) or value.dtype is None:
        raise InputsError(f"a text has no {name}: give arrays (.npz, .safetensors, .jsonl)")
    first = [size if isinstance(size, int) else batch for size in sizes[:1]]
    return np.zeros([*first, *(size if isinstance(size, int) else 0 for size in sizes[1:])], value.dtype.numpy())


def _tokenizer(beside: Path, path: Path) -> Any:
    file = beside / TOKENIZER
    data = read_regular(file, SETTINGS_BYTES) if file.is_file() else b""
    if not data:
        raise InputsError(f"{path} is text, and there is no {TOKENIZER} in {beside}: name its folder with --processor")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputsError(missing_extra(error) or str(error)) from error
    with _panics_told(f"{file} is not a tokenizer"):
        return Tokenizer.from_str(data.decode())


@contextmanager
def _panics_told(failed: str) -> Iterator[None]:
    """Report what the tokenizers library raises as an error of one line.

    Its errors have no class of their own, and a panic of its Rust code is not an ``Exception``.
    """
    try:
        with Path(os.devnull).open("wb") as nowhere, native_errors_to(nowhere.fileno()):  # a panic writes its stack
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FileFormatError(f"{failed} ({reason_of(error)}): give another one") from error


def _images(folder: Path, model: ir.Model, beside: Path) -> Iterator[Feeds]:
    """The pixels of images as the image processor beside the model makes them; without one, numbers from 0 to 1."""
    inputs = required_inputs(model)
    wanted = [value for value in inputs if value.shape is not None and len(value.shape) == 4]
    if len(inputs) != 1 or not wanted:
        takes = first_few(value.name for value in inputs)
        raise InputsError(f"{folder} is a folder, which is read as images, and the model takes {takes}: give arrays")
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InputsError(f"reading the images in {folder} needs Pillow: pip install pillow") from error
    batch, _, *size = list(wanted[0].shape or ())
    pixels = _processor(beside) or _plain_pixels(*(edge if isinstance(edge, int) else PLAIN_EDGE for edge in size))

    def rows() -> Iterator[Any]:
        for file in sorted(file for file in folder.iterdir() if file.is_file()):
            try:
                with Image.open(file, formats=IMAGE_FORMATS) as image:
                    if image.width * image.height > IMAGE_PIXELS:
                        raise ValueError(f"it has more than {IMAGE_PIXELS:,} pixels")
                    colours = image.convert("RGB")
            except UnidentifiedImageError:
                continue  # a text beside the images, or a format that is not read
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise FileFormatError(f"{file} cannot be read as an image ({error})") from error
            yield pixels(colours)

    for batch_of_rows in _batches(rows(), batch if isinstance(batch, int) else 1):
        if len({row.shape for row in batch_of_rows}) > 1:
            raise InputsError(
                f"the images of {folder} have several sizes, and the model takes {batch} at once: crop them"
            )
        yield {wanted[0].name or "": np.stack(batch_of_rows)}


def _plain_pixels(height: int, width: int) -> Callable[[Any], Any]:
    return lambda image: np.asarray(image.resize((width, height)), np.float32).transpose(2, 0, 1) / np.float32(255)


def _processor(beside: Path) -> Callable[[Any], Any] | None:
    """A function from an image to the pixels that transformers' processor makes; ``None`` if the folder has no
    processor.
    """
    file = beside / PROCESSOR
    if not file.is_file():
        return None
    settings = read_json(file, FileFormatError, "copy it again, or remove it")
    for name, size in settings.items():
        for edge in (size.values() if isinstance(size, dict) else [size]) if name in ("size", "crop_size") else ():
            if isinstance(edge, int) and not 1 <= edge <= isqrt(IMAGE_PIXELS):
                raise FileFormatError(
                    f"{file}: {name} is {size}, and each number has to be from 1 to 8,192: correct it"
                )
    try:
        from transformers import AutoImageProcessor

        # Pillow rather than torchvision: its kernels are those that most models were trained with.
        processor: Any = AutoImageProcessor.from_pretrained(beside, local_files_only=True, backend="pil")
    except ImportError as error:
        why = error_line(raised_first(error))  # transformers' own message tells only what it could not import
        raise InputsError(
            missing_extra(error)
            or f"transformers cannot load an image processor ({why}): install what it lacks in a version "
            "that fits torch, or give arrays"
        ) from error
    except Exception as error:  # of settings that name no processor, or one that this version does not have
        raise FileFormatError(f"{file} is not the settings of an image processor ({error_line(error)})") from error

    def pixels(image: Any) -> Any:
        try:
            return np.asarray(processor(images=image, return_tensors="np")["pixel_values"][0])
        except Exception as error:  # of settings that fit no image
            raise FileFormatError(f"{file} does not fit an image ({error_line(error)}): copy it again") from error

    return pixels
