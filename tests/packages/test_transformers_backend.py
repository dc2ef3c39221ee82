"""transformers' own exporter classes write tagged files, which transformers alone loads and runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel
from transformers.exporters import AutoHfExporter, ExportedModel, OnnxConfig, OnnxExporter

import modelexport
from modelexport.errors import UsageError
from modelexport.packages.transformers_backend import TaggedOnnxConfig, TaggedOnnxExporter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def vit() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4)).eval()
    return model, {"pixel_values": torch.rand(2, 3, 8, 8)}


def test_what_is_saved_is_tagged_verified_and_run_by_transformers(vit: tuple[Any, Any], tmp_path: Path) -> None:
    model, inputs = vit
    modelexport.register_transformers_backend()
    exporter = AutoHfExporter.from_config({"export_format": "modelexport"})
    exported = exporter.export(model, inputs, {"dynamic": False})
    exported.save_pretrained(tmp_path)
    tagged = modelexport.load(tmp_path / "model.onnx")
    assert "layers.0" in tagged
    assert len(tagged["layers.0"].parameters) == 16
    assert modelexport.verify(model, inputs, tagged).agrees
    right = model(**inputs).last_hidden_state
    for one in (exported, ExportedModel.from_pretrained(tmp_path)):
        torch.testing.assert_close(one(**inputs).last_hidden_state, right)


@pytest.mark.slow
def test_what_is_said_of_a_file_is_what_transformers_says(vit: tuple[Any, Any]) -> None:
    ours, theirs = (
        exporter.export(*vit, config).components["model"].metadata
        for exporter, config in (
            (TaggedOnnxExporter(), TaggedOnnxConfig(dynamic=False)), (OnnxExporter(), OnnxConfig(dynamic=False)),
        )
    )  # fmt: skip
    assert dataclasses.replace(ours, export_config={}) == dataclasses.replace(theirs, export_config={})


@pytest.mark.slow
def test_the_parts_of_generation_have_the_addresses_of_the_whole_model(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, num_key_value_heads=2, vocab_size=32)
    model = LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(0, 32, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    inputs["attention_mask"][0, :2] = 0
    config = TaggedOnnxConfig(dynamic=True)
    TaggedOnnxExporter().export_for_generation(model, inputs, config, multi_token_decode=True).save_pretrained(tmp_path)
    for part in ("prefill", "decode"):
        assert "model.layers.0.mlp" in modelexport.load(tmp_path / f"{part}.onnx")


def test_what_the_format_does_not_do_is_refused(vit: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="fusions for cpu and cuda only"):
        TaggedOnnxExporter().export(*vit, TaggedOnnxConfig(ort_fusions="webgpu"))
