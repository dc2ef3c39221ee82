"""A package is quantized by one recipe, and what its parts share is written once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

import modelexport
from commands import run
from exports import Exporter
from modelexport.errors import UsageError
from modelexport.files.linked_weights import check_weights_files
from modelexport.packages.changed_packages import update_package
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session
from modelexport.tagged.file import read_tagged
from modelexport.tagged.package import read_package


@pytest.fixture
def stages(exported: Exporter, tmp_path: Path) -> Path:
    """A package of two parts: the second has the output head, whose weight is the embedding of the first."""
    modelexport.split(exported("tied-weights").path, tmp_path / "stages", at=["lm_head"])
    return tmp_path / "stages"


def test_every_part_is_quantized_and_runs(stages: Path, tmp_path: Path) -> None:
    results = modelexport.quantize_package(stages, tmp_path / "out", to="int8-dynamic")
    package = read_package(tmp_path / "out")
    assert {name: result.methods for name, result in results.items()} == {
        "stage_0": {"int8-dynamic": 2},
        "stage_1": {"int8-dynamic": 1},
    }
    for result, file in zip(results.values(), package.files.values(), strict=True):
        tagged = read_tagged(file)
        check_weights_files(tagged.model)
        assert result.coverage == tagged.coverage
        assert not tagged.coverage.untagged
        assert not tagged.coverage.inferred
    feeds = make_random_inputs(read_tagged(package.files["stage_0"]).model, open_session(package.files["stage_0"]))
    expected, found = (modelexport.run_chain(folder, feeds)["output"] for folder in (stages, tmp_path / "out"))
    assert 0 < np.linalg.norm(expected - found) < 0.1 * np.linalg.norm(expected)


def test_what_parts_share_is_there_once(stages: Path, tmp_path: Path) -> None:
    modelexport.quantize_package(stages, tmp_path / "out", to="int4", keep=["embedding", "lm_head"])
    package = read_package(tmp_path / "out")
    assert package.manifest.weights == ["weights.data"]
    offsets = [
        [entry.value for entry in tensor.external_data if entry.key == "offset"]
        for file in package.files.values()
        for tensor in onnx.load(file, load_external_data=False).graph.initializer
        if tensor.name == "lm_head.weight"
    ]
    assert len(offsets) == 2
    assert offsets[0] == offsets[1]
    assert (tmp_path / "out" / "weights.data").stat().st_size < 2 * 32 * 8 * 4


def test_parameters_of_two_parts_at_one_place_are_not_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))
    model[1].load_state_dict(model[0].state_dict())
    modelexport.export(model, torch.ones(2, 16), tmp_path / "m.onnx", check=False)
    modelexport.split(tmp_path / "m.onnx", tmp_path / "stages", stages=2)
    with monkeypatch.context() as earlier:  # versions that wrote tensors once by their content
        earlier.setattr("modelexport.tools.quantize.quantized_packages.parameter_plan", lambda value: None)
        modelexport.quantize_package(tmp_path / "stages", tmp_path / "shared", to="int8-dynamic", keep=["0", "1"])
    save_file({"0.weight": torch.zeros(16, 16), "1.weight": torch.ones(16, 16)}, tmp_path / "new.safetensors")
    with pytest.raises(UsageError, match=r"0\.weight and 1\.weight have one place in weights\.data"):
        update_package(tmp_path / "shared", tmp_path / "new.safetensors", tmp_path / "updated")


def test_surplus_entries_of_a_package_are_refused_with_strict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)))
    modelexport.export(model, torch.ones(2, 16), tmp_path / "m.onnx", check=False)
    modelexport.split(tmp_path / "m.onnx", tmp_path / "stages", stages=2)
    save_file(model.state_dict() | {"2.weight": torch.zeros(16, 16)}, tmp_path / "new.safetensors")
    done = run("update-weights", "stages/", "new.safetensors", "-o", "updated/", "--strict", cwd=tmp_path)
    assert (done.returncode, "2.weight" in done.stderr) == (2, True)


def test_a_selector_has_to_match_in_one_part(stages: Path, tmp_path: Path) -> None:
    results = modelexport.quantize_package(stages, tmp_path / "out", to="int8-weights", only=["lm_head"])
    assert [bool(result.methods) for result in results.values()] == [False, True]
    with pytest.raises(UsageError, match="no part has a module that 'lm_hed' picks; did you mean lm_head"):
        modelexport.quantize_package(stages, tmp_path / "other", to="int4", keep=["lm_hed"])
    assert not (tmp_path / "other").exists()


def test_data_belong_to_one_file(stages: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give one of its files"):
        modelexport.quantize_package(stages, tmp_path / "out", to="int8-static", data=tmp_path / "data.npz")


def test_the_command_writes_a_package_with_its_recipe(stages: Path, tmp_path: Path) -> None:
    done = run("quantize", stages, "-o", tmp_path / "out/", "--to", "int4", "--keep", "lm_head")
    assert done.returncode == 0, done.stderr
    assert "kept, bit for bit:" in done.stdout
    assert "0 untagged" in done.stdout
    assert "\nrules:\n- select: lm_head\n  method: keep\n" in (tmp_path / "out" / "recipe.yaml").read_text()
    (tmp_path / "out" / "olive.yaml").write_text("of another tool")
    for _ in range(2):  # the second replaces the copy of olive.yaml that the first made
        modelexport.quantize_package(tmp_path / "out", tmp_path / "kept", to="int4")
    with (tmp_path / "out" / "recipe.yaml").open("a") as recipe:
        recipe.write("notes: [mine]\n")
    refused = run("quantize", stages, "-o", tmp_path / "out/", "--to", "int4")
    assert refused.returncode == 2
    assert "recipe.yaml exists and was not written by modelexport, or was" in refused.stderr
    assert "or is of an earlier version: give another name, or move it" in refused.stderr
    again = run("quantize", stages, "-o", tmp_path / "again/", "--recipe", tmp_path / "out" / "recipe.yaml", "--json")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "weights.data").read_bytes() == (tmp_path / "again" / "weights.data").read_bytes()
