"""New weights in an exported file give what a fresh export gives, and those that do not fit are refused."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import modelexport
import models
from commands import run
from exports import Exporter
from graph_texts import written
from modelexport import load
from modelexport.errors import FileFormatError, OutputError, WeightsError
from modelexport.format import keys
from modelexport.graph.nodes import initializers
from modelexport.verify.parameters_in_pytorch import verify_parameters
from modelexport.weights.weight_updates import update_weights


def perturbed(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator), alpha=0.1)
        for key, buffer in model.named_buffers():
            if buffer.is_floating_point() and key in model.state_dict():
                buffer.add_(torch.rand(buffer.shape, generator=generator), alpha=0.1)
    return model


def saved(model: nn.Module, path: Path) -> Path:
    save_file({key: tensor.clone().contiguous() for key, tensor in model.state_dict().items()}, path)
    return path


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["blocks", "unet", "recurrent", "tied-weights", "bert", "gpt2", "t5", "mamba", "swin", "wav2vec2", "minilm"]
)
def test_the_file_is_that_of_a_fresh_export(name: str, exported: Exporter, tmp_path: Path) -> None:
    case = exported(name)
    model = perturbed(case.case.build())
    update_weights(case.path, saved(model, tmp_path / "new.safetensors"), tmp_path / "updated.onnx")
    modelexport.export(model, case.case.inputs(), tmp_path / "fresh.onnx", check=False)
    assert (tmp_path / "updated.onnx").read_bytes() == (tmp_path / "fresh.onnx").read_bytes()
    assert verify_parameters(model, tmp_path / "updated.onnx").agrees
    assert not verify_parameters(case.case.build(), tmp_path / "updated.onnx").agrees


@pytest.fixture
def blocks(exported: Exporter) -> Path:
    return exported("blocks").path


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return perturbed(models.case("blocks").build()).state_dict()


@pytest.mark.parametrize(
    "convert", [lambda t: t, lambda t: t.numpy(), lambda t: nn.Parameter(t) if t.is_floating_point() else t]
)
def test_a_mapping_of_any_kind_of_tensor_gives_what_a_file_gives(
    convert: Callable[[torch.Tensor], Any], blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file({key: tensor.clone() for key, tensor in weights.items()}, tmp_path / "new.safetensors")
    update_weights(blocks, tmp_path / "new.safetensors", tmp_path / "a.onnx")
    update_weights(blocks, {key: convert(tensor) for key, tensor in weights.items()}, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_list_has_no_element_type_and_is_not_reported_as_missing(
    blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    listed = weights | {"head.bias": weights["head.bias"].tolist()}
    with pytest.raises(WeightsError, match=r"1 of another shape or type \(head\.bias: list\[\] instead of float32"):
        update_weights(blocks, listed, tmp_path / "out.onnx")


def test_external_data_gets_a_file_of_its_own_beside_the_output(tmp_path: Path) -> None:
    model, inputs = nn.Linear(32, 32).eval(), (torch.ones(2, 32),)
    modelexport.export(model, inputs, tmp_path / "old.onnx", weights="copy", check=False)
    perturbed(model)
    (tmp_path / "out").mkdir()
    result = update_weights(tmp_path / "old.onnx", model.state_dict(), tmp_path / "out" / "new.onnx")
    assert sorted(Path(file).name for file in result.files) == ["new.hierarchy.json", "new.onnx", "new.onnx.data"]
    modelexport.export(model, inputs, tmp_path / "new.onnx", weights="copy", check=False)
    for name in ("new.onnx", "new.onnx.data"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_the_output_may_not_be_the_file_itself(blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = Path(shutil.copy(blocks, tmp_path / "x.onnx"))
    with pytest.raises(OutputError, match="is the file to read: give another name"):
        update_weights(path, weights, path)
    assert path.read_bytes() == blocks.read_bytes()


def test_a_file_is_read_in_whatever_order_its_messages_are(
    blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = load(blocks).model
    for value in list(initializers(model)):
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.TensorProtoTensor(
            onnx.helper.make_tensor(value.name, tensor.dtype.value, tensor.shape.numpy(), tensor.numpy().ravel())
        )
    ir.save(model, tmp_path / "values.onnx")  # the weights are stored as numbers, not as bytes
    assert all(not tensor.HasField("raw_data") for tensor in onnx.load(tmp_path / "values.onnx").graph.initializer)
    update_weights(tmp_path / "values.onnx", weights, tmp_path / "new.onnx")
    assert all(
        np.array_equal(value.const_value.numpy(), weights[value.name].numpy())
        for value in initializers(load(tmp_path / "new.onnx").model)
        if value.const_value is not None and value.name in weights
    )


def test_the_tags_and_the_sidecar_stay(blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    update_weights(blocks, weights, tmp_path / "new.onnx")
    old, new = load(blocks), load(tmp_path / "new.onnx")
    assert old.tags == new.tags
    assert [node.metadata_props for node in old.nodes] == [node.metadata_props for node in new.nodes]
    assert (tmp_path / "new.hierarchy.json").read_bytes() == blocks.with_suffix(".hierarchy.json").read_bytes()


def test_one_name_of_a_tied_parameter_is_enough(exported: Exporter, tmp_path: Path) -> None:
    case = exported("tied-weights")
    model = perturbed(case.case.build())
    for dropped in case.case.expected.tied[0]:
        state = {key: tensor for key, tensor in model.state_dict().items() if key != dropped}
        update_weights(case.path, state, tmp_path / "new.onnx")
        assert verify_parameters(model, tmp_path / "new.onnx").agrees


def test_names_of_a_tied_parameter_must_agree(exported: Exporter, tmp_path: Path) -> None:
    case = exported("tied-weights")
    state = dict(case.case.build().state_dict())
    second = case.case.expected.tied[0][1]
    state[second] = state[second] + 1
    with pytest.raises(WeightsError, match="1 tied in the module and different in these weights"):
        update_weights(case.path, state, tmp_path / "new.onnx")


def test_entries_that_the_graph_does_not_use_may_be_there_or_not(exported: Exporter, tmp_path: Path) -> None:
    case = exported("module-dict")
    state = perturbed(case.case.build()).state_dict()
    assert update_weights(case.path, state, tmp_path / "all.onnx").unused == 4
    used = {key: tensor for key, tensor in state.items() if "unused" not in key}
    assert update_weights(case.path, used, tmp_path / "used.onnx").unused == 0
    assert (tmp_path / "all.onnx").read_bytes() == (tmp_path / "used.onnx").read_bytes()


def test_bfloat16_weights_come_from_a_file(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(torch.bfloat16).eval()

    inputs = {"input": torch.ones(2, 3, 4, dtype=torch.bfloat16)}
    modelexport.export(build(), inputs, tmp_path / "old.onnx", check=False)
    model = perturbed(build())
    update_weights(tmp_path / "old.onnx", saved(model, tmp_path / "new.safetensors"), tmp_path / "new.onnx")
    assert verify_parameters(model, tmp_path / "new.onnx").agrees


@pytest.mark.parametrize(("prefix", "words"), [("module.", "have the prefix 'module.' in addition"), ("", "")])
def test_a_common_prefix_is_named_and_few_keys_are_listed(
    prefix: str, words: str, blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    other = {prefix + key if prefix else f"other{index}": value for index, (key, value) in enumerate(weights.items())}
    with pytest.raises(WeightsError) as raised:
        update_weights(blocks, other, tmp_path / "new.onnx")
    assert len(raised.value.missing) > 3
    assert f" and {len(raised.value.missing) - 3} more)" in str(raised.value)
    assert words in str(raised.value)
    assert ("prefix" in str(raised.value)) == bool(prefix)
    assert len(str(raised.value)) < 600


def test_a_prefix_that_the_keys_lack_is_named(tmp_path: Path) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.body(x)
            return result

    model = Outer()
    modelexport.export(model, (torch.ones(1, 3),), tmp_path / "old.onnx", check=False)
    with pytest.raises(WeightsError, match=r"all keys lack the prefix 'body\.'"):
        update_weights(tmp_path / "old.onnx", model.body.state_dict(), tmp_path / "new.onnx")


def test_everything_that_does_not_fit_is_listed_at_once(
    blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    del weights["head.weight"]
    weights["heads.weight"] = torch.ones(2)
    weights["down.0.linear.bias"] = torch.ones(9)
    weights["up.0.norm.bias"] = weights["up.0.norm.bias"].half()
    with pytest.raises(WeightsError) as raised:
        update_weights(blocks, weights, tmp_path / "new.onnx")
    error = raised.value
    assert error.missing == ("head.weight",)
    assert error.surplus == ("heads.weight",)
    assert set(error.misshapen) == {"down.0.linear.bias", "up.0.norm.bias"}
    text = str(error)
    assert "1 missing (head.weight)" in text
    assert "heads.weight; did you mean head.weight?" in text
    assert "down.0.linear.bias: float32[9] instead of float32[8]" in text
    assert "up.0.norm.bias: float16[8] instead of float32[8]" in text
    assert "\n" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no weights", b"\xff" * 100])
def test_a_file_that_is_not_safetensors_is_refused(content: bytes, blocks: Path, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(FileFormatError, match="is cut off or not a safetensors file"):
        update_weights(blocks, tmp_path / "w.safetensors", tmp_path / "new.onnx")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_named_as_such(zipped: bool, blocks: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "new.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(FileFormatError, match=r"new\.pt was written by torch\.save: .*save_file$"):
        update_weights(blocks, tmp_path / "new.pt", tmp_path / "new.onnx")


def test_weights_that_are_not_there_are_named(blocks: Path, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"there is no file .*w\.safetensors"):
        update_weights(blocks, tmp_path / "w.safetensors", tmp_path / "new.onnx")


@pytest.mark.parametrize("content", [None, b"", b"not onnx", b"\x08\x0a\x3a\xff"])
def test_a_file_that_is_not_onnx_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"x\.onnx"):
        update_weights(tmp_path / "x.onnx", {}, tmp_path / "new.onnx")


def test_a_file_without_tags_gets_values_for_initializers_by_name(blocks: Path, tmp_path: Path) -> None:
    model = onnx.load(blocks)
    for store in (model, *model.graph.node, *model.graph.initializer):
        del store.metadata_props[:]
    onnx.save(model, tmp_path / "bare.onnx")
    result = update_weights(tmp_path / "bare.onnx", {"head.bias": np.full(4, 7, np.float32)}, tmp_path / "new.onnx")
    assert (result.replaced, result.kept) == (1, len(model.graph.initializer) - 1)
    for tensor in model.graph.initializer:
        if tensor.name == "head.bias":
            tensor.raw_data = np.full(4, 7, np.float32).tobytes()
    assert onnx.load(tmp_path / "new.onnx").graph == model.graph
    with pytest.raises(WeightsError, match=r"no initializer of .*bare\.onnx has a name in the weights; it has "):
        update_weights(tmp_path / "bare.onnx", {"x": np.ones(4, np.float32)}, tmp_path / "new.onnx")


def test_an_entry_without_an_initializer_is_refused_where_the_file_does_not_record_entries(
    tmp_path: Path,
) -> None:
    """The exporter wrote the transposed weight under another name, which would keep its old value."""
    text = "g (float[2, 1] x) => (float[2, 2] y) <float[2] bias = {1, 2}, float[1, 2] val_0 = {3, 4}>"
    path = written(tmp_path / "file.onnx", text + " { m = MatMul(x, val_0) y = Add(m, bias) }")
    entries: dict[str, Any] = {"bias": np.ones(2, np.float32), "0._extra_state": [1, 2]}
    assert update_weights(path, entries, tmp_path / "bias.onnx").replaced == 1
    adopted, weight = Path(modelexport.adopt(path, tmp_path / "adopted.onnx").path), np.ones((2, 1), np.float32)
    for file, new in [(path, weight), (adopted, weight), (path, weight.tolist()), (path, memoryview(weight))]:
        with pytest.raises(WeightsError, match=r"1 of the 2 entries \(weight\), .*retag .*leave out") as raised:
            update_weights(file, {**entries, "weight": new}, tmp_path / "new.onnx")
        assert raised.value.surplus == ("weight",)
        assert not (tmp_path / "new.onnx").exists()


def test_extra_state_is_not_surplus(blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    states = {"0._extra_state": [1, 2], "1._extra_state": {"scale": 1}}
    assert update_weights(blocks, weights | states, tmp_path / "new.onnx", strict=True).unused == 0


def test_a_weight_that_another_tool_changed_is_not_overwritten(
    blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = load(blocks).model
    value = model.graph.initializers["head.bias"]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy().astype(np.float16), name="head.bias")
    ir.save(model, tmp_path / "half.onnx")
    with pytest.raises(FileFormatError, match=r"head.bias is float16\[4\], but its entries give float32\[4\]"):
        update_weights(tmp_path / "half.onnx", weights, tmp_path / "new.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["half.onnx"]


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no folder"):
        update_weights(tmp_path / "missing.onnx", {}, tmp_path / "no" / "new.onnx")


def test_a_file_that_was_there_stays_when_the_weights_do_not_fit(blocks: Path, tmp_path: Path) -> None:
    (tmp_path / "new.onnx").write_text("precious")
    with pytest.raises(WeightsError):
        update_weights(blocks, {}, tmp_path / "new.onnx")
    assert (tmp_path / "new.onnx").read_text() == "precious"


def test_damaged_metadata_is_named(blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = load(blocks).model
    model.graph.initializers["head.bias"].metadata_props[keys.PARAMETER] = "{"
    ir.save(model, tmp_path / "x.onnx")
    with pytest.raises(FileFormatError, match=r"x\.onnx: initializer head\.bias has damaged metadata"):
        update_weights(tmp_path / "x.onnx", weights, tmp_path / "new.onnx")


def test_the_command_prints_what_it_did(blocks: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file({key: tensor.clone() for key, tensor in weights.items()}, tmp_path / "new.safetensors")
    command = ["update-weights", blocks, "new.safetensors", "-o", "new.onnx"]
    done = run(*command, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["path"], document["used"], document["unused"]) == ("new.onnx", 30, 0)
    (tmp_path / "new.safetensors").write_text("no")
    done = run(*command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["update_weights", "verify"])
def test_public_names_are_functions_beside_packages_of_the_same_name(name: str) -> None:
    importlib.import_module("modelexport.verify.verify")
    assert callable(getattr(modelexport, name))


def test_the_state_dict_in_the_file_has_every_entry(blocks: Path, weights: dict[str, torch.Tensor]) -> None:
    entries = msgspec.json.decode(load(blocks).model.metadata_props[keys.STATE_DICT])
    assert list(entries) == list(weights)
    assert entries["head.bias"] == ["float32", [4], True, False]


def test_a_file_that_no_parameter_goes_into_is_not_written_again(tmp_path: Path) -> None:
    modelexport.adopt(
        written(tmp_path / "file.onnx", 'g (float x) => (float y) { ["/a/Neg"] y = Neg(x) }'), tmp_path / "tagged.onnx"
    )
    with pytest.raises(WeightsError, match=r"no initializer of .* has a name in the weights; it has none"):
        update_weights(tmp_path / "tagged.onnx", {"w": np.ones(4, np.float32)}, tmp_path / "new.onnx")
