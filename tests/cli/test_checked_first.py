"""What a command is given is checked before it imports or computes anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_axes_of_several_inputs_go_in_one_option() -> None:
    interface = read_interface(NameOptions(axes=["image:0=batch,ids:1=words", "ids:0=batch"]))
    assert interface.axes == {("image", 0): "batch", ("ids", 1): "words", ("ids", 0): "batch"}
    interface.check_named_axes(["image", "ids"])
    with pytest.raises(UsageError, match="the model has no input image; did you mean images"):
        interface.check_named_axes(["images", "ids"][:1])
