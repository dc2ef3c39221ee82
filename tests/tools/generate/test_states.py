"""Models that keep more than keys and values: states are found, prompts of any length run, tokens are PyTorch's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_multimodal import llava, paligemma, qwen
from test_packages import decoder, generated_by_genai, llama, static  # noqa: F401

import modelexport
from decoders import SMALL
from modelexport.errors import ModelExportError, UsageError
from modelexport.format.package_manifest import Generation, Start
from modelexport.packages.generation_loop import Generator, TokenLoop
from modelexport.tagged.package import read_package
from modelexport.tools.generate.greedy_reference import generate_greedily
from modelexport.tools.generate.observed_state import State, find_state, restart_length, with_tensors
from modelexport.tools.generate.other_state_parts import other_state_parts
from modelexport.tools.generate.prompts import Example, example_prompts, token_inputs

PAGE = Path(__file__).parents[3] / "docs" / "generating-loop.md"
SIZES = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")}


def scan_in_chunks() -> Any:
    return transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            **SIZES, num_hidden_layers=1, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=4
        )
    )


def loop_over_tokens() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, num_hidden_layers=1, state_size=4))


def states_in_modules() -> Any:
    return transformers.RecurrentGemmaForCausalLM(
        transformers.RecurrentGemmaConfig(
            **{**SMALL, "num_key_value_heads": 1, "num_hidden_layers": 3}, lru_width=32, attention_window_size=16
        )
    )


def other_in_a_batch() -> Any:
    return transformers.RwkvForCausalLM(
        transformers.RwkvConfig(**SIZES, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64)
    )


def made(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():  # fresh weights are so small that all models generate the same
        parameter.data.mul_(6 if parameter.dim() > 1 and parameter.std() < 0.05 else 1)
    return model


def state_of(model: Any) -> State:
    state = find_state(model, Example(token_inputs(model)))
    assert state is not None
    return state


def the_loop() -> Callable[..., Any]:
    """The code of the page, which knows NumPy and ONNX Runtime."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert "modelexport" not in {name.split(".")[0] for name in names}
    return names["generate"]


def prompts(*lengths: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(5)
    return [{"input_ids": random.integers(3, 60, (1, length))} for length in lengths]


def check_with_the_page(model: Any, folder: Path, *batches: tuple[int, ...], tokens: int = 12) -> None:
    for lengths in batches:
        right = generate_greedily(model, prompts(*lengths), tokens)
        found = the_loop()(folder, right.inputs, tokens)
        assert found.tolist() == np.stack(right.tokens, 1).tolist(), lengths


def test_a_state_is_found_in_the_values_that_generate_passes_on() -> None:
    state = state_of(made(loop_over_tokens))
    assert state.axes == {"0.conv_states": ("batch", 64, 4), "0.recurrent_states": ("batch", 64, 4)}
    assert not state.is_keys_and_values
    keys = state_of(decoder("llama"))
    assert keys.axes["0.key"] == ("batch", 2, "past_sequence", 8)
    assert keys.is_keys_and_values


def test_a_state_that_modules_keep_to_themselves_is_found_too() -> None:
    state = state_of(made(states_in_modules))
    assert state.axes["model.layers.1.temporal_block.rg_lru.recurrent_states"] == ("batch", 32)
    assert state.axes["2.key"] == ("batch", 1, "past_sequence", 8)


def longrope(**sizes: Any) -> Any:
    """A decoder whose positions change after a length, where its ``generate`` begins with a new cache."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    }
    length = {"original_max_position_embeddings": 16, **sizes}
    rotation = {"rope_parameters": rope | length, "partial_rotary_factor": 1.0}
    config = transformers.Phi3Config(
        **{**SMALL, "num_hidden_layers": 1, "tie_word_embeddings": False, **rotation, **length}
    )
    return transformers.Phi3ForCausalLM(config)


class Recorded(TokenLoop):
    """A loop whose parts return the token 1, and whose cache has a place for each token."""

    def run(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        self.ran = (part, values["input_ids"].shape[1], values["past"].shape[1], values["position_ids"].tolist())
        past = np.zeros((1, values["past"].shape[1] + values["input_ids"].shape[1]), np.float32)
        self.taken[part] = dict(values)
        return {"past": past, "logits": np.array([[[0.0, 1.0]]])}


def test_a_text_that_gets_longer_than_a_change_of_positions_runs_again() -> None:
    with torch.device("meta"):
        assert restart_length(longrope()) == 16
        assert restart_length(decoder("sliding window")) == 0
    how = {
        "mask": "attention_mask",
        "positions": "position_ids",
        "start": {"past": Start(dtype="float32", shape=[1, 0])},
    }
    loop = Recorded(Generation(tokens="input_ids", first="prefill", step="decode", restart_after=4, **how))
    prompt = {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.array([[0, 1, 1]])}
    assert [loop.ran for _ in loop.steps(prompt, 4)] == [
        ("prefill", 3, 0, [[0, 0, 1]]),
        ("decode", 1, 3, [[2]]),
        ("prefill", 5, 0, [[0, 0, 1, 2, 3]]),
        ("decode", 1, 5, [[4]]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [None, "ort-cpu"])
def test_generation_goes_on_after_a_change_of_positions(fuse: Any, tmp_path: Path) -> None:
    model = made(longrope)
    result = modelexport.export_package(model, tmp_path / "short", fuse=fuse)
    assert any("genai_config.json ends a text at 16 tokens" in note for note in result.notes)
    check_with_the_page(model, tmp_path / "short", (11,), (9, 14, 4), (20,))
    model = made(lambda: longrope(original_max_position_embeddings=4096, max_position_embeddings=5000))
    modelexport.export_package(model, tmp_path / "long", fuse=fuse)
    ids = prompts(4090)[0]["input_ids"]
    right = model.generate(torch.from_numpy(ids), max_new_tokens=12)[0].tolist()
    assert generated_by_genai(tmp_path / "long", ids[0].tolist(), 12) == right


@pytest.mark.parametrize(
    ("build", "parts", "rows"),
    [
        (scan_in_chunks, [["prefill", "decode"], ["decode"]], "padded"),
        (loop_over_tokens, [["decode"]], "padded"),
        pytest.param(
            states_in_modules, [["decode"], ["decode"], ["prefill", "decode"]], "padded", marks=pytest.mark.slow
        ),
        pytest.param(other_in_a_batch, [["decode"], ["decode"], ["prefill", "decode"]], "one", marks=pytest.mark.slow),
    ],
)
def test_the_forms_that_compute_what_the_model_does(build: Any, parts: list[list[str]], rows: str) -> None:
    model = made(build)
    found = other_state_parts(model, state_of(model))
    assert [[part.name for part in form] for form in found] == parts
    assert {part.rows for form in found for part in form} == {rows}


@pytest.mark.slow
def test_a_prompt_of_any_length_runs_at_once_where_the_code_is_the_same_for_all(tmp_path: Path) -> None:
    model = made(scan_in_chunks)
    result = modelexport.export_package(model, tmp_path / "out")
    how = result.manifest.generation
    assert how is not None
    assert (how.first, how.step, how.one_by_one, how.start) == ("prefill", "decode", ["decode"], {})
    assert how.state["present.0.conv_states"] == "past_key_values.0.conv_states"
    shapes = {value.name: value.shape for value in result.parts["prefill"].hierarchy.inputs}
    assert shapes == {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "sequence"]}
    check_with_the_page(model, tmp_path / "out", (7, 3, 12), (1,), (2,), (3,), (30,))


@pytest.mark.slow
def test_a_prompt_runs_token_by_token_where_the_code_has_a_loop_over_tokens(tmp_path: Path) -> None:
    model = made(loop_over_tokens)
    result = modelexport.export_package(model, tmp_path / "out", check=False)
    how = result.manifest.generation
    assert how is not None
    assert (how.first, how.step, how.one_by_one) == ("decode", "decode", ["decode"])
    assert how.start["past_key_values.0.conv_states"] == Start(dtype="float32", shape=["batch", 64, 4])
    assert any("token by token" in note for note in result.notes)
    check_with_the_page(model, tmp_path / "out", (7, 3, 12), (1,), (30,))


@pytest.mark.slow
def test_a_model_that_is_another_in_a_batch_takes_one_prompt(tmp_path: Path) -> None:
    model = made(other_in_a_batch)
    modelexport.export_package(model, tmp_path / "out")
    check_with_the_page(model, tmp_path / "out", (7,), (1,))
    package = read_package(tmp_path / "out")
    generator = Generator.of(package)
    two = {name: np.ones((2, 3), np.int64) for name in ("input_ids", "attention_mask")}
    with pytest.raises(UsageError, match="one prompt at a time"):
        list(generator.steps(two, 1))


def test_the_page_runs_a_decoder_and_a_static_cache(llama: tuple[Path, Path], static: Path) -> None:  # noqa: F811
    check_with_the_page(decoder("llama"), llama[1], (5, 2, 9), (1,), tokens=4)
    check_with_the_page(decoder("llama"), static / "out", (5, 2, 9), tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("build", [llava, qwen, paligemma])
def test_the_page_runs_models_with_images(build: Callable[[], Any], tmp_path: Path) -> None:
    """Of one size, of unlike sizes with a prompt that has none, and in a prompt that runs as a whole."""
    model = build()
    modelexport.export_package(model, tmp_path / "out")
    rows = example_prompts(model, None, seed=2, manifest=read_package(tmp_path / "out").manifest)
    right = generate_greedily(model, rows, 8)
    found = the_loop()(tmp_path / "out", right.inputs, 8)
    assert found.tolist() == np.stack(right.tokens, 1).tolist()


class OtherForLongPrompts(transformers.LlamaForCausalLM):
    """Decides by the length of a prompt, in Python."""

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        made = super().forward(input_ids=input_ids, **arguments)
        if input_ids.shape[1] > 6:
            made.logits = made.logits.flip(-1)
        return made


@pytest.mark.slow
def test_a_package_that_cannot_run_a_prompt_is_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OtherForLongPrompts(transformers.LlamaConfig(**SMALL)).eval()
    with pytest.raises(ModelExportError, match=r"does not generate what the model does|no loop over its tokens"):
        modelexport.export_package(model, tmp_path / "out")
    assert not (tmp_path / "out" / "modelexport.json").exists()


class InBfloat16(transformers.LlamaForCausalLM):
    """Has a weight of a type for which ONNX Runtime has no kernels on processors."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.full((), 2.0, dtype=torch.bfloat16))

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        made = super().forward(input_ids=input_ids, **arguments)
        made.logits = (made.logits.bfloat16() * self.scale).float()
        return made


@pytest.mark.slow
def test_a_package_that_the_runtime_cannot_run_is_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = InBfloat16(transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1})).eval()
    with pytest.raises(ModelExportError, match=r"cannot run a prompt here.*NOT_IMPLEMENTED.*--dtype float32"):
        modelexport.export_package(model, tmp_path / "out")
    assert not (tmp_path / "out" / "modelexport.json").exists()


def test_a_state_with_other_tensors_shares_no_counter_with_the_example() -> None:
    template = {"count": torch.zeros(1), "0": {"key": torch.zeros(2, 3)}}
    other = torch.ones(2, 3)
    made = with_tensors(template, {"0.key": other})
    made["count"] += 1
    assert made["0"]["key"] is other
    assert template["count"].tolist() == [0]


@pytest.mark.slow
def test_positions_with_axes_before_the_batch_are_inputs_of_a_step(tmp_path: Path) -> None:
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
    config = transformers.Qwen3VLConfig(
        text_config={**text, **heads, "rope_parameters": rope},
        vision_config={**vision, "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=58,
        vision_end_token_id=59,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    result = modelexport.export_package(model, tmp_path / "p")
    positions = next(port for port in result.parts["decode"].hierarchy.inputs if port.name == "position_ids")
    assert positions.shape == [3, "batch", "sequence"]
