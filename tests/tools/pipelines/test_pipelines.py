"""Pipelines of diffusers as packages: parts from what a run calls, one set of weights, the same images."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

import modelexport
import models  # noqa: F401 - makes pillow and torchvision importable, without which diffusers is not
from commands import run
from exports import Shared
from modelexport.errors import FileFormatError, InputsError, ModelLoadError, OutputError, UsageError
from modelexport.tagged.package import read_package
from modelexport.tools.pipelines.component_weights import share_components
from modelexport.tools.pipelines.components_module import as_module, load_diffusion
from modelexport.tools.pipelines.diffusion_parts import diffusion_parts, model_parts
from modelexport.tools.pipelines.observed_calls import observe_example

# isort: split
import diffusers
import transformers

WEIGHTS = "diffusion_pytorch_model.safetensors"

LETTERS = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
VOCABULARY = {token: index for index, token in enumerate([*LETTERS, "<|startoftext|>", "<|endoftext|>"])}


def clip_tokenizer() -> Any:
    return transformers.CLIPTokenizer(vocab=VOCABULARY, merges=[], model_max_length=12)


def clip(cls: Any) -> Any:
    end = len(VOCABULARY) - 1
    return cls(
        transformers.CLIPTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=12,
            projection_dim=16,
            bos_token_id=end - 1,
            eos_token_id=end,
            pad_token_id=end,
        )
    )


def t5(width: int) -> tuple[Any, Any]:
    """A tokenizer of letters and an encoder."""
    import tokenizers
    from tokenizers import pre_tokenizers, processors

    letters = {token: index for index, token in enumerate(["<pad>", "</s>", "<unk>", *string.ascii_lowercase])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=24
    )
    config = transformers.T5Config(vocab_size=len(letters), d_model=width, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    return tokenizer, transformers.T5EncoderModel(config)


def autoencoder(**options: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * 4,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        **options,
    )


def stable_diffusion(**components: Any) -> Any:
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "DownBlock2D"),  # attention, with the prompt, is in the middle
        up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
    )
    others = {"safety_checker": None, "feature_extractor": None, **components}
    return diffusers.StableDiffusionPipeline(
        vae=autoencoder(),
        text_encoder=clip(transformers.CLIPTextModel),
        tokenizer=clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        requires_safety_checker=False,
        **others,
    )


def stable_diffusion_3() -> Any:
    tokenizer, encoder = t5(32)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(shift_factor=0.0),
        text_encoder=clip(transformers.CLIPTextModelWithProjection),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=encoder,
        tokenizer_3=tokenizer,
    )


def flux() -> Any:
    tokenizer, encoder = t5(16)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder(shift_factor=0.0),
        text_encoder=clip(transformers.CLIPTextModel),
        tokenizer=clip_tokenizer(),
        text_encoder_2=encoder,
        tokenizer_2=tokenizer,
        transformer=transformer,
    )


def unconditional() -> Any:
    unet = diffusers.UNet2DModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        sample_size=16,
    )
    return diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    pipeline = build()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def sd(shared: Shared) -> Path:
    """A folder with a small Stable Diffusion in ``sd``, and in ``out`` its package, with what the command printed."""

    def make(folder: Path) -> None:
        seeded(stable_diffusion).save_pretrained(folder / "sd")
        done = run("export", "sd", "-o", "out/", "--json", cwd=folder)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        (folder / "export.json").write_text(done.stdout)

    return shared("diffusion", make)


def shapes(file: Path) -> dict[str, list[str | int]]:
    graph = onnx.load(file, load_external_data=False).graph
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


def test_what_a_run_calls_are_parts_with_names_for_people() -> None:
    """The same that the package has, before anything is captured."""
    modules = as_module(seeded(stable_diffusion))
    observed, _ = observe_example(modules, steps=2)
    parts = {part.name: part for part in diffusion_parts(modules, observed)}
    assert {name: (list(part.inputs.values()), list(part.outputs.values())) for name, part in parts.items()} == {
        "text_encoder": (["input_ids"], ["last_hidden_state", "pooler_output"]),
        "unet": (["sample", "timestep", "encoder_hidden_states"], ["out_sample"]),
        "vae_decoder": (["latent_sample"], ["sample"]),
        "vae_encoder": (["sample"], ["latent_parameters"]),
    }
    for part in parts.values():
        right = part.results(part.output)
        found = part.module(modules)(**part.tensors(part.arguments))
        assert {name: tensor.shape for name, tensor in found.items()} == {
            name: one.shape for name, one in right.items()
        }


@pytest.mark.slow
def test_each_model_that_a_run_calls_is_a_part_in_the_folder_of_the_field_with_names_for_people(sd: Path) -> None:
    package = read_package(sd / "out")
    assert [(part.name, part.file, part.module) for part in package.manifest.parts] == [
        ("text_encoder", "text_encoder/model.onnx", "text_encoder"),
        ("unet", "unet/model.onnx", "unet"),
        ("vae_decoder", "vae_decoder/model.onnx", "vae"),
        ("vae_encoder", "vae_encoder/model.onnx", "vae"),
    ]
    assert {name: shapes(file) for name, file in package.files.items()} == {
        "text_encoder": {
            "input_ids": ["batch", "sequence"],
            "last_hidden_state": ["batch", "sequence", 16],
            "pooler_output": ["batch", 16],
        },
        "unet": {
            "sample": ["batch", 4, "height", "width"],
            "timestep": [1],
            "encoder_hidden_states": ["batch", "sequence", 16],
            "out_sample": ["batch", 4, "height", "width"],
        },
        "vae_decoder": {
            "latent_sample": ["batch", 4, "height", "width"],
            "sample": ["batch", 3, "8*height", "8*width"],
        },
        "vae_encoder": {
            "sample": ["batch", 3, "height", "width"],
            "latent_parameters": ["batch", 8, "(height//8)", "(width//8)"],
        },
    }


@pytest.mark.slow
def test_a_module_has_its_address_in_the_pipeline_and_every_node_is_exact_or_derived(sd: Path) -> None:
    package = read_package(sd / "out")
    for name, address in {
        "unet": "unet.mid_block.attentions.0",
        "vae_decoder": "vae.decoder.mid_block",
        "vae_encoder": "vae.encoder.mid_block",
        "text_encoder": "text_encoder.encoder.layers.0",
    }.items():
        assert address in modelexport.load(package.files[name])
    parts = json.loads((sd / "export.json").read_text())["parts"]
    assert [part["coverage"]["inferred"] + part["coverage"]["untagged"] for part in parts.values()] == [0] * 4
    assert [part["check"]["status"] for part in parts.values()] == ["passed"] * 4


@pytest.mark.slow
def test_the_weights_are_the_pipelines_own_files_and_are_there_once(sd: Path) -> None:
    out = sd / "out"
    for part, component, file in (
        ("text_encoder", "text_encoder", "model.safetensors"),
        ("unet", "unet", WEIGHTS),
        ("vae_decoder", "vae", WEIGHTS),
        ("vae_encoder", "vae", WEIGHTS),
    ):
        assert (out / part / file).read_bytes() == (sd / "sd" / component / file).read_bytes()
    document = json.loads((sd / "export.json").read_text())
    stored = sum(file.stat().st_size for file in (sd / "sd").rglob("*.safetensors"))
    assert document["weight_bytes"] == stored
    # Both parts of the autoencoder have one file, under two names.
    assert (
        len(
            {
                (out / part / "diffusion_pytorch_model.safetensors").stat().st_ino
                for part in ("vae_decoder", "vae_encoder")
            }
        )
        == 1
    )


@pytest.mark.slow
def test_verify_runs_the_loop_in_both_and_the_images_are_equal(sd: Path) -> None:
    done = run("verify", "out", "--model", "sd", "--steps", "4", "--json", cwd=sd)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(done.stdout)
    calls = [(call["part"], call["index"]) for call in report["calls"]]
    steps = [("unet", step) for step in range(4)]
    assert calls == [("text_encoder", 0), ("text_encoder", 1), *steps, ("vae_decoder", 0), ("vae_encoder", 0)]
    assert {call["status"] for call in report["calls"]} == {"agree"}
    assert [(one["name"], one["status"], one["shape"]) for one in report["results"]] == [
        ("images", "agree", [2, 120, 168, 3])
    ]
    assert report["parameters"]["used"]
    assert not report["parameters"]["differing"]


@pytest.mark.slow
def test_the_parts_alone_make_the_pipelines_image_with_other_sizes_than_those_of_the_export(sd: Path) -> None:
    """The loop of a text-to-image run written out, with the graphs and the scheduler and nothing else."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(sd / "sd")
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 12, 9, generator=torch.Generator().manual_seed(3))
    prompt, steps = "a boat", 4
    how = {"num_inference_steps": steps, "latents": noise, "guidance_scale": 3.0, "height": 96, "width": 72}
    expected, other = (pipeline(text, **how, output_type="np") for text in (prompt, "a cat"))
    sessions = {name: onnxruntime.InferenceSession(file) for name, file in read_package(sd / "out").files.items()}
    ids = pipeline.tokenizer(["", prompt], padding="max_length", max_length=12, return_tensors="np")["input_ids"]
    states = sessions["text_encoder"].run(["last_hidden_state"], {"input_ids": ids.astype(np.int64)})[0]
    scheduler, latents = pipeline.scheduler, noise
    scheduler.set_timesteps(steps)
    for step in scheduler.timesteps:
        feeds = {
            "sample": np.concatenate([latents, latents]),
            "timestep": np.array([step]),
            "encoder_hidden_states": states,
        }
        free, guided = sessions["unet"].run(None, feeds)[0]
        latents = scheduler.step(torch.tensor(free + 3.0 * (guided - free))[None], step, latents).prev_sample
    scaled = (latents / pipeline.vae.config.scaling_factor).numpy()
    image = sessions["vae_decoder"].run(None, {"latent_sample": scaled})[0]
    image = (image / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(image, expected.images, atol=1e-4)
    assert np.abs(other.images - expected.images).max() > 1e-3  # the prompt matters


@pytest.mark.slow
def test_the_folder_has_the_index_configurations_tokenizer_and_scheduler_of_diffusers(sd: Path) -> None:
    out = sd / "out"
    index = json.loads((out / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    scheduler = diffusers.DDIMScheduler.from_pretrained(out, subfolder="scheduler")
    assert scheduler.config.num_train_timesteps == 1000
    assert transformers.CLIPTokenizer.from_pretrained(out / "tokenizer")("a boat").input_ids
    assert diffusers.UNet2DConditionModel.load_config(out / "unet")["cross_attention_dim"] == 16
    assert json.loads((out / "vae_decoder" / "config.json").read_text())["scaling_factor"] == 0.18215


@pytest.mark.slow
def test_verify_names_the_call_and_the_module_that_differ(sd: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sd / "out", tmp_path / "wrong")
    file = folder / "unet" / "model.onnx"
    graph = onnx.load(file, load_external_data=False)
    activation = next(
        node
        for node in graph.graph.node
        if node.op_type == "Mul"
        and any(e.key == "modelexport.call" and e.value == "unet.conv_act" for e in node.metadata_props)
    )
    activation.input[1] = activation.input[0]
    onnx.save(graph, file)
    (tmp_path / "sd").symlink_to(sd / "sd")
    done = run("verify", "wrong", "--model", "sd", "--steps", "2", "--json", cwd=tmp_path)
    calls = json.loads(done.stdout)["calls"]
    assert done.returncode == 1
    assert [(call["part"], call["status"]) for call in calls[:5]] == [
        ("text_encoder", "agree"),
        ("text_encoder", "agree"),
        ("unet", "differ"),
        ("unet", "differ"),
        ("vae_decoder", "agree"),  # on the same inputs
    ]
    assert calls[2]["module"] == "unet.conv_act"


@pytest.mark.slow
def test_copied_and_converted_weights_are_written_once_and_only_unchanged_ones_are_linked(
    sd: Path, tmp_path: Path
) -> None:
    for dtype, mode, name in ((None, "copy", WEIGHTS), ("bfloat16", "auto", "model.safetensors")):
        modules = load_diffusion(sd / "sd", dtype=dtype).model
        observed, _ = observe_example(modules, steps=1)
        parts = model_parts(modules, diffusion_parts(modules, observed))
        places = share_components(parts, sd / "sd", tmp_path / mode, mode)
        files = [tmp_path / mode / part / name for part in ("vae_decoder", "vae_encoder")]
        assert files[0].samefile(files[1])
        assert files[0].stat().st_nlink == 2  # not the pipeline's own file
        keys = {f"vae.{key}" for key in modules.vae.state_dict()}
        assert places["vae_decoder"].tensors.keys() == keys
    with pytest.raises(OutputError, match="--weights copy"):
        share_components(parts, sd / "sd", tmp_path / "link", "link")


@pytest.mark.slow
def test_new_weights_go_into_the_one_file_of_each_component(sd: Path, tmp_path: Path) -> None:
    changed = {
        f"{component.name}.{key}": tensor + 0.01
        for component in (sd / "sd").iterdir()
        for file in component.glob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    save_file(changed, tmp_path / "new.safetensors")
    done = run("update-weights", sd / "out", tmp_path / "new.safetensors", "-o", tmp_path / "updated", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    modules = load_diffusion(sd / "sd").model
    modules.load_state_dict(changed)
    report = modelexport.verify_pipeline(modules, tmp_path / "updated", steps=1)
    assert report.agrees, report
    files = [
        tmp_path / "updated" / part / "diffusion_pytorch_model.safetensors" for part in ("vae_decoder", "vae_encoder")
    ]
    assert files[0].samefile(files[1])


@pytest.mark.slow
@pytest.mark.parametrize("build", [unconditional, stable_diffusion_3, flux])
def test_parts_come_from_the_run_whatever_the_pipeline(build: Callable[[], Any], tmp_path: Path) -> None:
    pipeline = seeded(build)
    result = modelexport.export_package(pipeline, tmp_path / "out")
    encoders = [name for name in pipeline.components if name.startswith("text_encoder")]
    assert [name for name in result.parts if name.startswith("text_encoder")] == encoders
    assert all(part.coverage.inferred == 0 for part in result.parts.values())
    report = modelexport.verify_pipeline(pipeline, tmp_path / "out", steps=4)
    assert report.agrees, report


def test_a_pipeline_says_without_which_components_it_works() -> None:
    assert "safety_checker" in diffusers.StableDiffusionPipeline._optional_components


@pytest.mark.slow
def test_an_optional_model_that_cannot_be_captured_is_left_out_with_the_reason(tmp_path: Path) -> None:
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(vision_config={**vision, "image_size": 32, "patch_size": 16}, projection_dim=16)
    size = {"height": 32, "width": 32}
    extractor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    checker = StableDiffusionSafetyChecker(config)
    pipeline = seeded(lambda: stable_diffusion(safety_checker=checker, feature_extractor=extractor))
    result = modelexport.export_package(pipeline, tmp_path / "out")
    assert list(result.parts) == ["text_encoder", "unet", "vae_decoder", "vae_encoder"]
    assert any(note.startswith("safety_checker was left out") for note in result.notes)
    report = modelexport.verify_pipeline(pipeline, tmp_path / "out", steps=1)
    assert report.agrees, report
    assert report.in_pytorch == ["safety_checker"]


@pytest.mark.slow
def test_bad_input_is_one_line(sd: Path, tmp_path: Path) -> None:
    shutil.copytree(sd / "out", tmp_path / "lacking")
    shutil.rmtree(tmp_path / "lacking" / "unet")
    code = shutil.copytree(sd / "sd", tmp_path / "code")
    index = json.loads((code / "model_index.json").read_text())
    (code / "model_index.json").write_text(json.dumps(index | {"unet": ["os", "system"]}))
    (tmp_path / "arguments.json").write_text('{"promt": ["a"]}')
    for arguments, told in (
        (("export", sd / "sd", "-o", "sd.onnx"), "several models"),
        (("export", sd / "sd", "-o", "x/", "--inputs", "arguments.json"), "no argument promt; did you mean prompt"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        load_diffusion(code)
    with pytest.raises(FileFormatError, match=r"lacks unet/model\.onnx"):
        read_package(tmp_path / "lacking")
    with pytest.raises(InputsError, match="can generate"):
        modelexport.export_package(load_diffusion(sd / "sd").model, tmp_path / "x", parts="generate")


@pytest.mark.slow
def test_a_package_of_another_pipeline_is_refused(sd: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is the package of another model"):
        modelexport.verify_pipeline(seeded(unconditional), sd / "out", steps=1)


def test_a_pipeline_that_needs_more_says_what(tmp_path: Path) -> None:
    class Needy(diffusers.DDIMPipeline):  # type: ignore[misc]
        def __call__(self, image: Any, **others: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(InputsError, match="needs the argument image"):
        modelexport.export_package(Needy(unconditional().unet, diffusers.DDIMScheduler()), tmp_path / "x")
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="is not a JSON object"):
        load_diffusion(tmp_path)
