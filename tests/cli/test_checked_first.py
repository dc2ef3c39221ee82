"""What a command is given is checked before it imports or computes anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import run
from modelexport.cli.name_and_axis_options import NameOptions, read_interface
from modelexport.errors import UsageError

_WITHOUT_LIBRARIES = """
import json, sys
sys.modules["torch"] = sys.modules["onnxruntime"] = None  # importing either fails
from modelexport.cli.app import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["modelexport", *arguments]
    try:
        main()
    except SystemExit as error:
        print(error.code, file=sys.stderr)
"""


def test_a_wrong_model_or_column_is_refused_without_torch_and_onnxruntime(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").touch()
    lines = [
        (["export", "folder", "-o", "x/"], "the weights in folder are a GGUF file: give file.py:factory"),
        (["hierarchy", "none.py:make"], "no such file: none.py"),
        (["profile", "x.onnx", "--sort", "SECONDS OWN"], "there is no column 'SECONDS OWN'; the columns are seconds,"),
        (["profile", "x.onnx", "--csv", "--json"], "give --csv or --json, not both"),
    ]
    (tmp_path / "x.onnx").touch()
    script = [sys.executable, "-c", _WITHOUT_LIBRARIES, json.dumps([arguments for arguments, _ in lines])]
    printed = subprocess.run(script, check=False, cwd=tmp_path, capture_output=True, text=True).stderr.splitlines()
    assert [int(status) for status in printed[1::2]] == [2] * len(lines)
    for line, (_, message) in zip(printed[::2], lines, strict=True):
        assert line.startswith(f"modelexport: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "x.onnx", "x.onnx", "--inputs", "none.npz"], "there is no file none.npz"),
        (["compare", "x.onnx", "x.onnx", "--inputs", "x.npz"], "inputs are for the outputs: give --fail-on outputs"),
        (["values", "x.onnx", "--processor", "."], "--processor goes with --data"),
        (["values", "x.onnx", "--dtype", "float16"], "--model-class, --dtype, --bare and --trust-remote-code go with"),
        (["profile", "x.onnx", "--bare"], "--model-class, --dtype, --bare and --trust-remote-code go with --against"),
        (["report", "x.onnx", "-o", "x.html", "--data", "x.npz"], "--data are for the ranges of values: give --values"),
        (["report", "x.onnx", "-o", "x.html", "--device", "cpu"], "--device is where times are measured: give --prof"),
        (["quantize", "x.onnx", "-o", "y.onnx", "--to", "int4", "--processor", "."], "--processor goes with --data"),
        (["quantize", "x.onnx", "-o", "y.onnx", "--to", "int4", "--compare", "y"], "--metric, --compare, --device, "),
        (["quantize", "x.onnx", "-o", "y.onnx", "--within", "kl<=1", "--metric", "top1"], "--metric goes with --budg"),
        (["update-weights", "x.onnx", "x.onnx", "-o", "y.onnx"], "x.onnx is a model, not weights: give a .safetensors"),
    ],
)
def test_what_would_have_no_effect_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    for name in ("x.onnx", "x.npz"):
        (tmp_path / name).touch()
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"modelexport: {message}")
    assert {path.name for path in tmp_path.iterdir()} == {"x.onnx", "x.npz"}


def test_a_path_that_cannot_be_followed_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    done = run("tree", "loop.onnx", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("modelexport: cannot read loop.onnx: Too many levels of symbolic links")


def test_axes_of_several_inputs_go_in_one_option() -> None:
    interface = read_interface(NameOptions(axes=["image:0=batch,ids:1=words", "ids:0=batch"]))
    assert interface.axes == {("image", 0): "batch", ("ids", 1): "words", ("ids", 0): "batch"}
    interface.check_named_axes(["image", "ids"])
    with pytest.raises(UsageError, match="the model has no input image; did you mean images"):
        interface.check_named_axes(["images", "ids"][:1])
