"""Models that generate from images: three graphs, PyTorch's tokens, or the reason why only text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_packages import generated_by_genai
from transformers import vision_utils

import decoders
import modelexport
from commands import run
from modelexport.errors import CaptureError, InputsError
from modelexport.exporting.options import PackageOptions
from modelexport.packages.generation_loop import Generator
from modelexport.packages.measured_parts import profile_parts
from modelexport.packages.model_parts import with_weights
from modelexport.pytorch.loading import load_model
from modelexport.tagged.package import read_package
from modelexport.tools.generate import image_sizes
from modelexport.tools.generate.generation_parts import generation_forms
from modelexport.tools.generate.greedy_reference import first_difference, generate_greedily
from modelexport.tools.generate.multimodal import encode, find_modality, merge, undivided, with_any_size
from modelexport.tools.generate.prompts import example_of, example_prompts

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
    return scaled(transformers.LlavaForConditionalGeneration(config))


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
    return scaled(transformers.Qwen2VLForConditionalGeneration(config))


def scaled(model: Any) -> Any:
    """Fresh weights are so small that all models generate the same."""
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model.eval()


def test_the_merge_puts_features_in_the_place_of_placeholders_in_order() -> None:
    model = llava()
    modality = find_modality(model, example_of(model))
    assert modality is not None
    ids = torch.tensor([[IMAGE, 7, IMAGE], [IMAGE, IMAGE, 9]])
    features = torch.arange(4)[:, None].expand(4, 32).float()
    with torch.no_grad():
        merged = merge(modality, model, input_ids=ids, image_features=features)["inputs_embeds"]
        plain = model.get_input_embeddings()(torch.tensor([7, 9]))
        text = merge(modality, model, input_ids=torch.tensor([[7, 9]]), image_features=features[:0])["inputs_embeds"]
        encoded = encode(modality, model, pixel_values=torch.ones(3, 3, 16, 16))["image_features"]
    assert merged[..., 0][ids == IMAGE].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(merged[ids != IMAGE], plain)
    torch.testing.assert_close(text[0], plain)  # without an image, there are no features
    assert encoded.shape == (12, 32)
    assert list(torch.ones(2)) == [1, 1]  # outside, tensors are lists of their elements


def smolvlm() -> Any:
    """Its processor cuts an image into tiles."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.SmolVLMConfig(
        vision_config={**vision, "image_size": 16, "patch_size": 4},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return scaled(transformers.SmolVLMForConditionalGeneration(config))


def cut_image(tiles: int) -> dict[str, Any]:
    """A prompt with an image in tiles, whose lower part is padding, as its processor returns it."""
    mask = np.ones((1, tiles, 16, 16), dtype=np.int64)
    mask[:, -1:, 8:] = 0
    pixels = np.random.default_rng(tiles).standard_normal((1, tiles, 3, 16, 16)).astype(np.float32)
    ids = np.array([[5, *[IMAGE] * 4 * tiles, 7, 9]])
    return {"input_ids": ids, "pixel_values": pixels, "pixel_attention_mask": mask}


def test_an_image_in_tiles_is_an_image_and_a_processor_gives_the_mask_of_its_pixels() -> None:
    model = smolvlm()
    for masked, names in ((False, {"pixel_values"}), (True, {"pixel_values", "pixel_attention_mask"})):
        example = example_of(model, masks_pixels=masked)
        tiles = example.inputs["pixel_values"].shape[1]
        assert tiles > 3  # other than the sizes of the batch and of the channels, which a capture would take for equal
        assert (example.inputs["input_ids"] == IMAGE).sum(1).tolist() == [4 * tiles] * 2
        modality = find_modality(model, example)
        assert modality is not None
        assert modality.tensors.keys() == names
    taken = {name: torch.from_numpy(one) for name, one in cut_image(2).items() if name != "input_ids"}
    with torch.no_grad():
        whole = encode(modality, model, **taken)["image_features"]
        taken["pixel_attention_mask"].fill_(1)
        other = encode(modality, model, **taken)["image_features"]
    assert whole.shape == (8, 32)
    assert [not torch.equal(*rows) for rows in zip(whole, other, strict=True)] == [False] * 4 + [True] * 4


@pytest.mark.slow
def test_a_package_takes_any_number_of_tiles(tmp_path: Path) -> None:
    model = smolvlm()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    modelexport.export_package(model, tmp_path / "out", directory=tmp_path / "model")
    prompts = [cut_image(tiles) for tiles in (1, 3, 4)]
    report = modelexport.verify_generation(model, tmp_path / "out", prompts[:1], new_tokens=8)
    assert report.agrees, report
    generator = Generator.of(read_package(tmp_path / "out"))
    for prompt in prompts:
        assert first_difference(generator, generate_greedily(model, [prompt], 8)) == ""
        ids = prompt.pop("input_ids")
        expected = generate_greedily(model, [{"input_ids": ids, **prompt}], 8)
        count = np.array([(ids == IMAGE).sum()])
        found = generated_by_genai(tmp_path / "out", ids[0].tolist(), 8, **prompt, num_image_tokens=count)
        assert found[ids.shape[1] :] == np.stack(expected.tokens, 1)[0].tolist()


def qwen_2_5() -> Any:
    """Its patches attend to those of their window."""
    torch.manual_seed(0)
    rotation = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rotation},
        vision_config={**vision, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32},
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=58,
        vision_end_token_id=59,
    )
    return scaled(transformers.Qwen2_5_VLForConditionalGeneration(config))


def qwen_3() -> Any:
    """Its decoder gets features of images in several layers."""
    torch.manual_seed(0)
    rotation = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rotation},
        vision_config={
            **vision,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=58,
        vision_end_token_id=59,
    )
    return scaled(transformers.Qwen3VLForConditionalGeneration(config))


def test_features_of_layers_are_inputs_of_the_decoder_at_every_token() -> None:
    model = qwen_3()
    modality = find_modality(model, example_of(model))
    assert modality is not None
    assert modality.layers is not None
    assert modality.layers.decoder == "model.language_model"
    assert list(modality.layers.tables.values()) == [".deepstack_features.0", ".deepstack_features.1"]
    _, embedding, positions, step = next(generation_forms(model))
    assert {*positions.inputs} == {"input_ids", "attention_mask", "image_grid_thw"}
    assert {*embedding.inputs} == {"input_ids", "image_features", "image_features_0", "image_features_1"}
    assert step.inputs["inputs_embeds_1"].shape == step.inputs["inputs_embeds"].shape
    with pytest.raises(InputsError, match="leave out --static-cache and --separate-prefill"):
        next(generation_forms(model, PackageOptions(separate_prefill=True)))


@pytest.mark.slow
def test_a_model_whose_images_a_package_does_not_take_says_so_and_is_exported_for_text() -> None:
    model = qwen_3()

    def doubled(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        features = kwargs.get("deepstack_visual_embeds")
        return args, kwargs | {"deepstack_visual_embeds": features and [feature * 2 for feature in features]}

    model.model.language_model.register_forward_pre_hook(doubled, with_kwargs=True)
    with pytest.raises(CaptureError, match=r"Qwen3VLForConditionalGeneration takes images.* depends on the places"):
        find_modality(model, example_of(model))
    (part,) = next(generation_forms(model))
    assert "input_ids" in part.inputs
    assert [note for note in part.notes if note.startswith("takes text only: Qwen3VL")]
    with pytest.raises(InputsError, match=r"depends on the places.*leave out --inputs"):
        next(generation_forms(model, user_inputs={"image_grid_thw": torch.tensor([[1, 4, 4]])}))


def test_what_follows_from_sizes_of_images_is_computed_as_transformers_does() -> None:
    sizes = torch.tensor([[1, 4, 6], [2, 6, 4], [1, 14, 10]])
    patches, ends = int(sizes.prod(-1).sum()), torch.unique_consecutive
    positions = image_sizes.FUNCTIONS["get_vision_position_ids"](patches, sizes, 2, include_temporal=True)
    assert torch.equal(positions, vision_utils.get_vision_position_ids(sizes, 2, include_temporal=True))
    order, windows = image_sizes.FUNCTIONS["get_vision_window_index"](patches, sizes, 2, 16, 4)
    right, right_windows = vision_utils.get_vision_window_index(sizes, 2, 16, 4)
    assert torch.equal(order, right)
    assert torch.equal(ends(windows), right_windows)
    for temporal in (False, True):
        frames, _ = image_sizes.FUNCTIONS["get_vision_attention_seqlens"](patches, sizes, None, temporal)
        assert torch.equal(ends(frames), vision_utils.get_vision_cu_seqlens(sizes, temporal))
    name = "get_vision_interpolation_indices_and_weights"
    found = image_sizes.FUNCTIONS[name](patches, sizes, 7, align_corners=True, spatial_merge_size=2)
    expected = getattr(vision_utils, name)(sizes, 7, align_corners=True, spatial_merge_size=2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("patches", [20, 28])
def test_sizes_of_another_number_of_patches_are_refused(patches: int) -> None:
    with pytest.raises(IndexError):
        image_sizes.FUNCTIONS["get_vision_position_ids"](patches, torch.tensor([[1, 4, 6]]), 2)


@pytest.mark.parametrize("any_size", [False, True])
def test_positions_are_counted_without_reading_values(any_size: bool) -> None:
    model, size = qwen(), [1, 4, 8]
    modality = find_modality(model, example_of(model, {"image_grid_thw": torch.tensor([size])}))
    modality = with_any_size(model, modality) if any_size and modality is not None else modality
    assert modality is not None
    assert modality.positions is not None
    assert modality.sizes == ("image_grid_thw",)
    # Several images with text between them, at the beginning and at the end, in a row with padding and one without.
    sizes = torch.tensor([size, [1, 6, 4], [1, 2, 2], size, [1, 6, 4], size] if any_size else [size] * 6)
    first, second, third, *others = ([IMAGE] * (int(each.prod()) // 4) for each in sizes)
    rows = [[*first, 6, *second, 7, 9, *third, 3, 2], [4, *others[0], 8, *others[1], 6, *others[2]]]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = (ids != 0).long()
    found = modality.positions.of_prompt(ids, mask, sizes)
    right, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=sizes, attention_mask=mask
    )
    assert (found == right)[:, mask.bool()].all()


PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def git() -> Any:
    """Images come before the tokens, without placeholders."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    return scaled(transformers.GitForCausalLM(transformers.GitConfig(**sizes, vision_config=PATCHES)))


def paligemma() -> Any:
    """A prompt attends to all of itself where its token types say so."""
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **PATCHES},
        text_config={"model_type": "gemma", **TEXT, "head_dim": 8, "tie_word_embeddings": False},
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
        tie_word_embeddings=False,
    )
    return scaled(transformers.PaliGemmaForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("build", "beside"), [(git, set()), pytest.param(paligemma, {"token_type_ids"}, marks=pytest.mark.slow)]
)
def test_a_prompt_runs_as_a_whole_where_a_model_does_more_than_merge(build: Any, beside: set[str]) -> None:
    prefill, decode = next(generation_forms(build()))
    assert (prefill.name, decode.name, prefill.rows) == ("prefill", "decode", "padded")
    assert set(prefill.inputs) == {"input_ids", "attention_mask", "position_ids", "pixel_values"} | beside
    assert prefill.axes["pixel_values", 0] == "batch"
    assert set(decode.inputs) == {"input_ids", "attention_mask", "position_ids", "past_key_values"}


def mllama() -> Any:
    """Layers attend to the image, as a mask of each token says."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32,
        "attention_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "vision_output_dim": 64,
        "image_size": 16,
        "patch_size": 8,
        "max_num_tiles": 1,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    rotation = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = transformers.MllamaConfig(
        vision_config=vision, text_config={**TEXT, **rotation, "cross_attention_layers": [1]}, image_token_index=IMAGE
    )
    model = scaled(transformers.MllamaForConditionalGeneration(config))
    for parameter in model.parameters():
        if parameter.numel() == 1:
            parameter.data.fill_(0.7)  # the gates of images are closed until they are trained
    return model


def test_what_each_token_repeats_of_the_prompt_is_part_of_the_state() -> None:
    given = {
        "input_ids": torch.tensor([[5, IMAGE, 7, 9, 11, 13]]),
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 6, 1, 1, dtype=torch.long),
    }
    prefill, decode = next(generation_forms(mllama(), user_inputs=given))
    assert given.keys() <= prefill.inputs.keys()
    assert decode.inputs["past_key_values"]["cross_attention_mask"].shape == (2, 1, 1, 1)


def test_a_package_that_takes_text_only_says_so_where_no_image_can_be_made() -> None:
    (form,) = itertools.islice(generation_forms(mllama()), 1)
    told = "takes text only: MllamaForConditionalGeneration also takes images, of which no example can be made"
    assert any(note.startswith(told) for part in form for note in part.notes)


def test_features_that_are_split_by_the_sizes_in_a_tensor_stay_whole() -> None:
    class Features(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            counts = (rows != 0).any(-1).view(-1, 1).sum(1)
            return torch.cat([one * 2 for one in rows.split(counts.tolist())])

    batch = {0: torch.export.Dim("batch")}
    with undivided():
        program = torch.export.export(Features(), (torch.ones(3, 4),), dynamic_shapes=(batch,))
    assert program.module()(torch.ones(5, 4)).shape == (5, 4)
    assert [len(one) for one in torch.ones(3, 1).split([1, 2])] == [1, 2]
    assert torch.ones(1).item() == 1


def test_without_its_weights_a_merge_is_not_compared_and_the_export_says_so() -> None:
    model = llava()
    for parameter in model.parameters():
        parameter.data.zero_()
    modality = find_modality(model, example_of(model))
    assert modality is not None
    assert not modality.compared
    notes = [note for part in next(generation_forms(model)) for note in part.notes]
    assert notes == [
        "the merge of image features was not compared with the model's own, because the weights are not in memory: "
        "verify FOLDER/ --model compares it"
    ]
    assert not [note for part in next(generation_forms(llava())) for note in part.notes]


def test_a_model_with_lent_weights_generates_what_it_does_with_its_own(tmp_path: Path) -> None:
    """``generate`` calls the encoder outside of ``forward``."""
    model = llava()
    model.save_pretrained(tmp_path / "llava")
    lent = load_model(str(tmp_path / "llava"), weights="files")
    prompts = example_prompts(model, None)[:2]
    right = generate_greedily(model, prompts, 2)
    with with_weights(lent.model, lent.weights):
        found = generate_greedily(lent.model, prompts, 2)
    np.testing.assert_allclose(found.logits, right.logits, atol=1e-5)


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
    # The checkpoint is linked, and the merge was compared nevertheless.
    assert document["notes"] == ["the parts were run with generated inputs"]
    coverage = [part["coverage"] for part in document["parts"].values()]
    assert [one["inferred"] + one["untagged"] for one in coverage] == [0, 0, 0]
    done = run("verify", "out", "--model", "llava", "--new-tokens", "16", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    runs = {one["name"]: one for one in json.loads(done.stdout)["runs"]}
    assert runs.keys() == {"batch", "prompt 0", "prompt 1", "prompt 2"}
    assert len(set(runs["batch"]["prompts"])) == 3
    assert runs["batch"]["tokens"] == [runs[f"prompt {index}"]["tokens"][0] for index in range(3)]
    # A prompt is measured with an image in it.
    measured = profile_parts(tmp_path / "out", sizes={"batch": 2, "sequence": 12}, runs=1, warmup=1)
    assert list(measured) == ["vision", "embedding", "prefill", "decode"]
    assert (measured["embedding"].feeds["input_ids"] == IMAGE).sum(1).tolist() == [4, 4]
    shapes = {name: one.facts.inputs for name, one in measured.items()}
    assert shapes["vision"]["pixel_values"] == "float32[2, 3, 16, 16]"
    assert shapes["prefill"]["inputs_embeds"] == "float32[2, 12, 32]"
    assert shapes["decode"]["inputs_embeds"] == "float32[2, 1, 32]"
    assert shapes["decode"]["past_key_values.0.key"] == "float32[2, 2, 12, 8]"
    with pytest.raises(InputsError, match="takes 4 tokens of a prompt"):
        profile_parts(tmp_path / "out", sizes={"sequence": 4})
    # The image decides: another one gives other logits.
    generator = Generator.of(read_package(tmp_path / "out"))
    ids = np.array([[5, *[IMAGE] * 4, 9, 12]])
    logits = [
        next(generator.steps({"input_ids": ids, "attention_mask": np.ones_like(ids), "pixel_values": image}, 1)).logits
        for image in np.random.default_rng(0).standard_normal((2, 1, 3, 16, 16)).astype(np.float32)
    ]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2
    for images in (1, 2):
        values = torch.randn(images, 3, 16, 16)
        ids = [5, *[IMAGE] * 4 * images, 9, 12]
        expected = model.generate(torch.tensor([ids]), pixel_values=values, max_new_tokens=12, do_sample=False)
        told = {"pixel_values": values.numpy(), "num_image_tokens": np.array([4 * images])}
        assert generated_by_genai(tmp_path / "out", ids, 12, **told) == expected[0].tolist()
    assert "model.vision_tower.encoder.layers.1" in modelexport.load(tmp_path / "out" / "vision.onnx")


def voxtral() -> Any:
    torch.manual_seed(0)
    audio = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.VoxtralConfig(
        audio_config={**audio, "num_mel_bins": 8, "max_source_positions": 16},
        text_config={**TEXT, "model_type": "llama"},
        audio_token_id=IMAGE,
    )
    return scaled(transformers.VoxtralForConditionalGeneration(config))


GRID = [1, 4, 8]
"""The size of an image in patches, of which four are one token."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (voxtral, ["speech", "embedding", "decode"]),
        (qwen, ["vision", "embedding", "positions", "decode"]),
        (qwen_2_5, ["vision", "embedding", "positions", "decode"]),
        (qwen_3, ["vision", "embedding", "positions", "decode"]),
    ],
    ids=["sound", "positions on several axes", "attention in windows", "features in several layers"],
)
def test_other_encoders_give_pytorchs_tokens_here_and_in_genai(build: Any, parts: list[str], tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "model")
    done = run("export", "model", "-o", "out/", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [part["name"] for part in document["manifest"]["parts"]] == parts
    assert {part["coverage"]["inferred"] + part["coverage"]["untagged"] for part in document["parts"].values()} == {0}
    assert {part["check"]["status"] for part in document["parts"].values()} == {"passed"}
    done = run("verify", "out", "--model", "model", "--new-tokens", "8", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr or done.stdout
    assert json.loads(done.stdout)["runs"]
    if build is not voxtral:
        assert_loops_generate_from_any_images(model, tmp_path / "out")
    if build is qwen_3:
        told = (
            "genai_config.json was not written: onnxruntime-genai does not pass the input inputs_embeds_0 to a decoder"
        )
        assert told in document["notes"]
    else:
        assert_genai_generates_the_same(model, tmp_path / "out", images=build is not voxtral)


def assert_loops_generate_from_any_images(model: Any, folder: Path) -> None:
    """From one, two and no images of unlike sizes."""
    generator = Generator.of(read_package(folder))
    for sizes in ([[1, 4, 8]], [[1, 8, 4], [1, 4, 4]], []):
        images = [token for size in sizes for token in (58, *[IMAGE] * (size[1] * size[2] // 4), 59, 7)]
        ids = np.array([[5, *images, 9, 12]])
        prompt = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).astype(np.int32)}
        if sizes:
            patches = sum(size[1] * size[2] for size in sizes)
            pixels = np.random.default_rng(patches).standard_normal((patches, 96)).astype(np.float32)
            prompt |= {"pixel_values": pixels, "image_grid_thw": np.array(sizes)}
        assert first_difference(generator, generate_greedily(model, [prompt], 8)) == ""


def assert_genai_generates_the_same(model: Any, folder: Path, *, images: bool) -> None:
    """From text with an image in the middle, or with sound."""
    torch.manual_seed(1)
    count = 8 if images else 4
    ids = [5, 58, *[IMAGE] * count, 59, 9, 12]
    given: dict[str, Any] = (
        {"pixel_values": torch.randn(32, 96)} if images else {"input_features": torch.randn(1, 8, 32)}
    )
    own = {"image_grid_thw": torch.tensor([GRID])} if images else {}
    types = {"mm_token_type_ids": (torch.tensor([ids]) == IMAGE).int()} if images else {}
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, **given, **own, **types)
    told = {"num_image_tokens" if images else "audio_sizes": np.array([count])}
    arrays = {name: value.numpy() for name, value in {**given, **own}.items()}
    assert generated_by_genai(folder, ids, 8, **arrays, **told) == expected[0].tolist()
