"""`example` writes files that come with the package; the .onnx among them is what an export of its model is today."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

import modelexport
from commands import run
from exports import Shared
from modelexport.cli.commands.example import EXAMPLES, FOLDER
from modelexport.exporting.requested_names import RequestedNames
from modelexport.files.named_models import named_folder
from modelexport.format.versions import FORMAT_VERSION

TINY = "tiny-bert.onnx"
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}


def write_tiny_bert(folder: Path, *, dynamic: bool = False) -> None:
    """The example has dynamic axes and was captured by torch.export, which takes longer."""
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=2, num_attention_heads=2, **SIZES)
    ids = torch.arange(1, 33).view(2, 16)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    axes = RequestedNames(leading=["batch", "sequence"]) if dynamic else None
    modelexport.export(
        transformers.BertModel(config),
        inputs,
        folder / TINY,
        dynamic=dynamic,
        interface=axes,
        documents=False,
        frontend="dynamo" if dynamic else "torchscript",
        check=False,
    )


@pytest.fixture(scope="module")
def alone(shared: Shared) -> Path:
    """A folder with an export of today without documents."""
    return shared("alone", write_tiny_bert)


def test_the_example_has_the_modules_that_an_export_has_today(
    alone: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--rewrite-goldens"):
        write_tiny_bert(FOLDER, dynamic=True)
    done = run("example", TINY, cwd=tmp_path)
    assert done.returncode == 0
    assert "next: modelexport tree tiny-bert.onnx" in done.stdout
    example, today = modelexport.load(tmp_path / TINY), modelexport.load(alone / TINY)
    assert example.tags == today.tags
    assert example.model.metadata_props["modelexport.format_version"] == FORMAT_VERSION
    inputs = {name: np.ones((3, 5), np.int64) for name in ("input_ids", "attention_mask")}
    states, _ = onnxruntime.InferenceSession(tmp_path / TINY).run(None, inputs)
    assert states.shape == (3, 5, 32)


def test_without_a_name_it_says_what_there_is(tmp_path: Path) -> None:
    done = run("example")
    assert all(name in done.stdout for name in EXAMPLES)
    assert "the examples are tiny-bert.onnx, sentences.txt" in run("example", "bert").stderr
    assert run("example", "sentences.txt", "-o", tmp_path / "t.txt").returncode == 0
    assert len((tmp_path / "t.txt").read_text().splitlines()) == 64


def test_a_folder_of_an_installed_package_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_models" / "small").mkdir(parents=True)
    (tmp_path / "some_models" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert named_folder("some_models:small") is None
    (tmp_path / "some_models" / "small" / "config.json").write_text("{}")
    assert named_folder("some_models:small") == tmp_path / "some_models" / "small"
    for wrong in ("some_models", "some-models", "some-models:small"):
        assert "give some_models:small" in run("export", wrong, "-o", tmp_path / "x.onnx").stderr
    (tmp_path / "some_models" / "__init__.py").write_text("")
    assert "did you mean some_models:small?" in run("export", "some_models:smal", "-o", tmp_path / "x.onnx").stderr


def test_a_file_alone_gets_its_tables_again_and_nothing_else(alone: Path, tmp_path: Path) -> None:
    assert [file.name for file in alone.iterdir()] == [TINY]
    shutil.copy(alone / TINY, tmp_path)
    assert run("documents", tmp_path / TINY).returncode == 0
    written = {file.name for file in tmp_path.iterdir()} - {TINY}
    assert written == {"tiny-bert.dag.json", "tiny-bert.operations.json"}
    modelexport.load(tmp_path / TINY).extract("encoder.layer.0", tmp_path / "layer.onnx")
    assert "was written without .dag.json" in run("documents", tmp_path / "layer.onnx").stderr


def test_every_file_can_be_read_by_those_whom_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert run("inputs", "bert-tiny", "-o", tmp_path / "in.safetensors").returncode == 0
    finally:
        os.umask(before)
    assert (tmp_path / "in.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("name", "instead"), [("out.txt", "give out.onnx"), ("out", "give out.onnx")])
def test_what_is_written_has_the_name_of_an_onnx_file(tmp_path: Path, name: str, instead: str) -> None:
    done = run("export", "bert-tiny", "-o", name, cwd=tmp_path)
    assert done.returncode == 2
    assert instead in done.stderr


def test_an_export_without_a_model_says_that_it_is_the_example(tmp_path: Path) -> None:
    done = run("export", "-o", "a.onnx", "--no-check", "--frontend", "torchscript", cwd=tmp_path)
    assert "\n  bert-tiny is an example with random weights\n" in done.stdout
