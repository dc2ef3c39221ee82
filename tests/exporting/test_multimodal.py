"""Models that generate from images: three graphs, PyTorch's tokens, or the reason why only text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import decoders
import modelexport
from commands import run
from modelexport.errors import CaptureError
from modelexport.pytorch.generation import generation_parts
from modelexport.pytorch.multimodal import Encode, Merge, find_modality
from modelexport.runtime.generation import Generator
from modelexport.tagged.package import read_package

IMAGE = 60
TEXT = {**decoders.SMALL, "vocab_size": 64, "intermediate_size": 48}


def llava() -> Any:
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_seq_length=4,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # fresh weights are so small that all models generate the same
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model


def qwen() -> Any:
    torch.manual_seed(0)
    rotation = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rotation},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=58,
        vision_end_token_id=59,
    )
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def test_the_merge_puts_features_in_the_place_of_placeholders_in_order() -> None:
    model = llava()
    modality = find_modality(model)
    assert modality is not None
    ids = torch.tensor([[IMAGE, 7, IMAGE], [IMAGE, IMAGE, 9]])
    features = torch.arange(4)[:, None].expand(4, 32).float()
    with torch.no_grad():
        merged = Merge(model, modality)(input_ids=ids, image_features=features)["inputs_embeds"]
        plain = model.get_input_embeddings()(torch.tensor([7, 9]))
        text = Merge(model, modality)(input_ids=torch.tensor([[7, 9]]), image_features=features[:0])["inputs_embeds"]
        encoded = Encode(model, modality)(pixel_values=torch.ones(3, 3, 16, 16))["image_features"]
    assert merged[..., 0][ids == IMAGE].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(merged[ids != IMAGE], plain)
    torch.testing.assert_close(text[0], plain)  # without an image, there are no features
    assert encoded.shape == (12, 32)
    assert list(torch.ones(2)) == [1, 1]  # outside, tensors are lists of their elements


def test_a_model_whose_images_a_package_does_not_take_says_so_and_is_exported_for_text() -> None:
    with pytest.raises(CaptureError, match="Qwen2VLForConditionalGeneration takes images"):
        find_modality(qwen())
    (part,) = generation_parts(qwen())
    assert "input_ids" in part.inputs
    assert [note for note in part.notes if note.startswith("takes text only: Qwen2VL")]


@pytest.mark.slow
def test_three_graphs_generate_pytorchs_tokens_from_images(tmp_path: Path) -> None:
    model = llava()
    model.save_pretrained(tmp_path / "llava")
    done = run("export", "llava", "-o", "out/", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    document = json.loads(done.stdout)
    assert [(part["name"], part["inputs"][:2], part["outputs"][:1]) for part in document["manifest"]["parts"][:2]] == [
        ("vision", ["pixel_values"], ["image_features"]),
        ("embedding", ["input_ids", "image_features"], ["inputs_embeds"]),
    ]
    assert document["manifest"]["weights"] == ["model.safetensors"]
    coverage = [part["coverage"] for part in document["parts"].values()]
    assert [one["inferred"] + one["untagged"] for one in coverage] == [0, 0, 0]
    done = run("verify", "out", "--model", "llava", "--new-tokens", "16", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    runs = {one["name"]: one for one in json.loads(done.stdout)["runs"]}
    assert runs.keys() == {"batch", "prompt 0", "prompt 1", "prompt 2"}
    assert len(set(runs["batch"]["prompts"])) == 3
    assert runs["batch"]["tokens"] == [runs[f"prompt {index}"]["tokens"][0] for index in range(3)]
    # The image decides: another one gives other logits.
    generator = Generator(read_package(tmp_path / "out").files)
    ids = np.array([[5, *[IMAGE] * 4, 9, 12]])
    logits = [
        next(generator.steps({"input_ids": ids, "attention_mask": np.ones_like(ids), "pixel_values": image}, 1)).logits
        for image in np.random.default_rng(0).standard_normal((2, 1, 3, 16, 16)).astype(np.float32)
    ]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2
    assert "model.vision_tower.encoder.layers.1" in modelexport.load(tmp_path / "out" / "vision.onnx")


def voxtral() -> Any:
    torch.manual_seed(0)
    audio = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.VoxtralConfig(
        audio_config={**audio, "num_mel_bins": 8, "max_source_positions": 16},
        text_config={**TEXT, "model_type": "llama"},
        audio_token_id=IMAGE,
    )
    model = transformers.VoxtralForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "parts"), [(voxtral, ["speech", "embedding", "decode"]), (qwen, ["decode"])], ids=["sound", "text"]
)
def test_models_of_sound_and_of_positions_on_several_axes_give_pytorchs_tokens(
    build: Any, parts: list[str], tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path / "model")
    done = run("export", "model", "-o", "out/", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [part["name"] for part in document["manifest"]["parts"]] == parts
    assert {part["coverage"]["inferred"] + part["coverage"]["untagged"] for part in document["parts"].values()} == {0}
    done = run("verify", "out", "--model", "model", "--new-tokens", "8", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr or done.stdout
    assert json.loads(done.stdout)["runs"]
