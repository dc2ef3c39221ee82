"""What stopped people who were new to the commands: each message says what is wrong, in our words."""

from __future__ import annotations

import errno
import shutil
import tempfile
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import commands
from exports import Exporter
from graph_texts import written
from modelexport.cli.command_list import COMMANDS
from modelexport.cli.command_parsers import load_command
from modelexport.core.selectors import find_call
from modelexport.errors import NoSuchCallError, UsageError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.files.regular_files import read_json

NET = 'g (float[2,4] x) => (float[2,4] y) { ["/a/Relu"] r = Relu(x) ["/b/Neg"] y = Neg(r) }'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "a.onnx", NET)


@pytest.fixture
def without_weights(exported: Exporter, tmp_path: Path) -> Path:
    """A file whose data file was left behind."""
    save_model(load_onnx(exported("bert").path), tmp_path / "a.onnx", external=True)
    (tmp_path / "a.onnx.data").unlink()
    return tmp_path / "a.onnx"


@pytest.mark.parametrize("command", ["profile", "quantize", "to-torch", "optimize", "rename", "verify"])
def test_a_missing_weights_file_is_told_in_our_words(command: str, without_weights: Path) -> None:
    more = {
        "quantize": ["--to", "int4", "-o", "q.onnx"],
        "to-torch": ["-o", "net.py"],
        "optimize": ["--with", "ort-basic", "-o", "o.onnx"],
        "rename": ["-o", "o.onnx"],
        "verify": ["--device", "cpu"],
    }
    done = commands.run(command, without_weights.name, *more.get(command, []), cwd=without_weights.parent)
    assert "a.onnx.data, which holds weights, is missing" in done.stderr


@pytest.mark.parametrize("device", ["cpu", "CPUExecutionProvider"])
def test_the_processor_is_a_device_by_either_name(device: str, file: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((2, 4), np.float32))
    done = commands.run("verify", file, "--device", device, "--inputs", tmp_path / "x.npz")
    assert done.returncode == 0, done.stderr


def test_warnings_of_numpy_are_not_shown(file: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        commands.run("tree", file)
        np.float32(1e38) * np.float32(1e38)
    assert shown == []


@pytest.mark.parametrize("command", [name for name in COMMANDS if "data" in signature(load_command(name)).parameters])
def test_a_command_that_reads_texts_takes_the_folder_of_a_tokenizer(command: str) -> None:
    assert "processor" in signature(load_command(command)).parameters


def of_a_full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def of_a_runtime(*_: object, **__: object) -> None:
    raise ValueError(f"Failed to write {tempfile.gettempdir()}/modelexport-1/x.onnx.data")


def of_a_model(*_: object, **__: object) -> None:
    raise ValueError("no node fits")


@pytest.mark.parametrize(("fails", "names"), [(of_a_full_disk, True), (of_a_runtime, True), (of_a_model, False)])
def test_an_error_of_a_library_names_the_folder_for_temporary_files_if_that_is_to_blame(
    fails: Callable[..., None], names: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr("onnxruntime.quantization.quantize_dynamic", fails)
    text = 'g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 5}> { ["/a/MatMul"] y = MatMul (x, w) }'
    file = written(tmp_path / "w.onnx", text)
    stderr = commands.run("quantize", file, "--to", "int8-dynamic", "-o", tmp_path / "q.onnx").stderr
    assert ("the folder for temporary files, has 0 bytes free" in stderr) == names, stderr


@pytest.mark.parametrize("wrong", ["none.onnx", "a.onnx"])
def test_an_error_that_is_known_does_not_name_the_folder_for_temporary_files(
    wrong: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert "temporary" not in commands.run("cost", file.with_name(wrong), "--top", "x").stderr


def test_an_error_of_a_library_is_one_line_where_no_folder_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", missing)
    (tmp_path / "m.onnx").write_bytes(b"damaged")
    assert commands.run("cost", tmp_path / "m.onnx").stderr.startswith("modelexport: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kit", "a.onnx", "--seed", "-1", "-o", "kit"], "greater than or equal to 0"),
        (["tree", "a.onnx", "--depth", "-1"], "greater than or equal to 0"),
        (["cost", "a.onnx", "--depth", "-1"], "greater than or equal to 0"),
        (["example", "-o", "x.onnx"], "name the example to write to x.onnx: tiny-bert.onnx or"),
        (["rename", ".", "-o", "o.onnx"], ". is a folder: give one of the .onnx files in it"),
        (["update-weights", "a.onnx", ".", "-o", "o.onnx"], ". is not a file: give"),
    ],
)
def test_what_is_out_of_range_or_of_another_kind_is_refused_in_a_true_line(
    words: list[str], said: str, file: Path
) -> None:
    assert said in commands.run(*words, cwd=file.parent).stderr


def test_a_call_that_a_model_in_memory_lacks_names_no_command_for_a_file() -> None:
    with pytest.raises(NoSuchCallError) as raised:
        find_call("none", {})
    assert "modelexport tree" not in str(raised.value)


def test_a_file_of_settings_that_is_missing_is_not_said_to_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        read_json(tmp_path / "none.json", UsageError, "give another")
    assert "JSON" not in str(raised.value)
