"""Fused for ONNX Runtime: the same numbers, padded or not, exact owners, and a report of what is where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime_genai as genai
import pytest
import torch
import transformers

import decoders
import modelexport
from commands import run
from exports import Shared
from modelexport.errors import UsageError
from modelexport.exporting import runtime_fusion
from modelexport.pytorch.loading import load_model
from modelexport.tools.generate.observed_state import cache_argument
from modelexport.tools.generate.prompts import example_prompts

SMALL = {**decoders.SMALL, "hidden_size": 64}


def small(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # fresh weights are so small that any model says the same
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    return model


@pytest.fixture(scope="session")
def fused(shared: Shared) -> Path:
    """A folder with a small Llama in ``llama``, and in ``out`` its package, fused, with what the command printed."""

    def make(folder: Path) -> None:
        small(transformers.LlamaConfig(**SMALL)).save_pretrained(folder / "llama")
        done = run("export", "llama", "-o", "out/", "--fuse", "ort-cpu", "--verify", "--json", cwd=folder)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        (folder / "export.json").write_text(done.stdout)

    return shared("fused", make)


@pytest.mark.slow
def test_every_fused_node_is_exact_or_derived_and_every_call_agrees(fused: Path) -> None:
    part = json.loads((fused / "export.json").read_text())["parts"]["decode"]
    assert part["coverage"]["inferred"] == part["coverage"]["untagged"] == 0
    assert part["verify"]["agrees"]
    assert part["verify"]["calls"]["agree"] > 30


@pytest.mark.slow
def test_the_report_counts_fused_operators_by_class_and_names_lost_boundaries(fused: Path) -> None:
    found = json.loads((fused / "export.json").read_text())["parts"]["decode"]["fusion"]
    counts = {(one["op_type"], one["module_class"]): (one["calls"], one["of"]) for one in found["operators"]}
    assert counts["GroupQueryAttention", "LlamaAttention"] == (2, 2)
    assert counts["SkipSimplifiedLayerNormalization", "LlamaRMSNorm"] == (4, 5)
    assert found["unfused"] == {}
    assert found["lost"] == ["model.rotary_emb"]
    report = (fused / "out" / "decode.report.md").read_text()
    assert "| `GroupQueryAttention` | 2 | `LlamaAttention` | 2 of 2 |" in report


@pytest.mark.slow
def test_an_attention_belongs_to_its_layer_and_a_skip_norm_to_both_modules(fused: Path) -> None:
    nodes = json.loads((fused / "out" / "decode.hierarchy.json").read_text())["nodes"]
    attention = [(node["call"], node.get("calls")) for node in nodes if node["op_type"] == "GroupQueryAttention"]
    assert attention == [(f"model.layers.{layer}.self_attn", None) for layer in (0, 1)]
    skip = [node["calls"] for node in nodes if node["op_type"] == "SkipSimplifiedLayerNormalization"]
    assert skip[0] == ["model.layers.0.post_attention_layernorm", "model.layers.0"]


@pytest.mark.slow
def test_rows_padded_differently_generate_what_pytorch_does(fused: Path) -> None:
    model = load_model(str(fused / "llama")).model
    report = modelexport.verify_generation(model, fused / "out", example_prompts(model, None), new_tokens=12)
    assert report.agrees, report
    assert len(set(report.runs[0].prompts)) == 4


@pytest.mark.slow
def test_several_tokens_after_others_are_for_one_row_and_refused_for_more(fused: Path) -> None:
    session = onnxruntime.InferenceSession(fused / "out" / "decode.onnx")

    def feeds(rows: int) -> dict[str, Any]:
        cache = np.zeros((rows, 2, 3, 16), np.float32)
        past = {value.name: cache for value in session.get_inputs() if value.name.startswith("past")}
        ids = np.ones((rows, 2), np.int64)
        return {"input_ids": ids, "attention_mask": np.ones((rows, 5), np.int64), "position_ids": ids, **past}

    assert session.run(["logits"], feeds(1))[0].shape == (1, 2, 128)
    with pytest.raises(Exception, match="batch_size must be 1"):
        session.run(None, feeds(2))


@pytest.mark.slow
def test_onnxruntime_genai_generates_from_a_fused_package_in_a_batch(fused: Path) -> None:
    model = load_model(str(fused / "llama")).model
    prompts = [[5, 77, 23, 9], [8, 9, 11, 12]]
    loaded = genai.Model(str(fused / "out"))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=16, do_sample=False, batch_size=2)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(np.array(prompts, dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    for row, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert list(generator.get_sequence(row)) == expected


@pytest.mark.slow
def test_projections_of_an_attention_are_one_product_that_belongs_to_all_of_them(fused: Path) -> None:
    nodes = json.loads((fused / "out" / "decode.hierarchy.json").read_text())["nodes"]
    projections = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    packed = [node for node in nodes if node.get("calls") == projections]
    assert [node["op_type"] for node in packed] == ["Concat", "FusedMatMul", "Split"]
    inside = [node["op_type"] for node in nodes if node["call"] == "model.layers.1.self_attn"]
    assert sorted({*inside}) == ["GroupQueryAttention", "Reshape", "RotaryEmbedding", "Where"]


@pytest.mark.slow
def test_the_cache_may_be_a_longer_buffer_that_a_step_writes_into(fused: Path) -> None:
    session = onnxruntime.InferenceSession(fused / "out" / "decode.onnx")
    names = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    ids, draw = np.array([[7], [9]]), np.random.default_rng(0)
    caches = {name: draw.standard_normal((2, 2, 3, 16)).astype(np.float32) for name in names}
    buffers = {name: np.pad(cache, ((0, 0), (0, 0), (0, 5), (0, 0))) for name, cache in caches.items()}
    plain = {"input_ids": ids, "attention_mask": np.ones((2, 4), np.int64), "position_ids": np.full((2, 1), 3)}
    grown, written = (session.run(["logits", "present.0.key"], plain | given) for given in (caches, buffers))
    np.testing.assert_array_equal(grown[0], written[0])
    np.testing.assert_array_equal(grown[1], written[1][:, :, :4])
    assert written[1].shape[2] == 8
    assert json.loads((fused / "out" / "genai_config.json").read_text())["search"]["past_present_share_buffer"]


def prefill(path: Path) -> tuple[list[Any], list[Any]]:
    """The logits and the cached keys of rows padded differently: of a file without a cache input, and of its model."""
    model = small(transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1}))
    ids = torch.arange(12).view(2, 6) + 3
    mask = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    modelexport.export(model, inputs, path, fuse="ort-cpu", check=False)
    session = onnxruntime.InferenceSession(path)
    given = {name: value.numpy() for name, value in inputs.items()}
    with torch.no_grad():
        right = model(**inputs)
    keys = next(value.name for value in session.get_outputs() if "key" in value.name.rpartition(".")[2])
    actual = session.run(["logits", keys], given)
    expected = [right.logits.numpy(), right[cache_argument(model)].layers[0].keys.numpy()]
    return actual, expected


def test_a_prompt_without_a_past_is_right_for_rows_padded_differently(tmp_path: Path) -> None:
    (logits, keys), (right_logits, right_keys) = prefill(tmp_path / "llama.onnx")
    for row, attended in ((0, slice(None)), (1, slice(3, None))):
        np.testing.assert_allclose(logits[row, attended], right_logits[row, attended], atol=1e-4)
        np.testing.assert_allclose(keys[row, :, attended], right_keys[row, :, attended], atol=1e-4)
    nodes = onnx.load(tmp_path / "llama.onnx").graph.node
    assert sum(node.op_type == "GroupQueryAttention" for node in nodes) == 1


@pytest.mark.slow
def test_without_rotating_before_the_attention_it_would_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when ONNX Runtime reads the positions of a first prompt: then `rotate_before_attention` can be removed.

    The logits of the prompt are right, because distances are; the keys in the cache are rotated by other positions than
    the next tokens.
    """
    monkeypatch.setattr(runtime_fusion, "rotate_before_attention", lambda node, before: None)
    (_, keys), (_, right_keys) = prefill(tmp_path / "llama.onnx")
    assert np.abs(keys[1, :, 3:] - right_keys[1, :, 3:]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (transformers.Qwen3Config(**SMALL, head_dim=16), 2),
        (transformers.MistralConfig(**SMALL, sliding_window=8), 2),
        (
            transformers.Qwen3MoeConfig(
                **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16
            ),
            2,
        ),
        (transformers.LlamaConfig(**{**SMALL, "hidden_size": 16}), 0),
    ],
    ids=["norms of heads", "sliding window", "mixture of experts", "heads of 4"],
)
def test_families_are_fused_or_told_why_not(config: Any, layers: int, tmp_path: Path) -> None:
    model = small(config)
    result = modelexport.export_package(model, tmp_path / "out", fuse="ort-cpu", verify=True)
    part = result.parts["decode"]
    assert part.coverage.inferred == 0
    assert part.verified is not None
    assert part.verified.agrees
    assert part.fusion is not None
    found = [one for one in part.fusion.operators if one.op_type == "GroupQueryAttention"]
    assert [(one.calls, one.of) for one in found] == ([(layers, 2)] if layers else [])
    told = dict.fromkeys(() if layers else ("model.layers.0.self_attn", "model.layers.1.self_attn"))
    assert part.fusion.unfused.keys() == told.keys()
    assert all("takes multiples of 8" in reason for reason in part.fusion.unfused.values())
    assert modelexport.verify_generation(model, tmp_path / "out", example_prompts(model, None), new_tokens=8).agrees


@pytest.mark.slow
def test_a_graph_for_cuda_has_exact_or_derived_owners_too(tmp_path: Path) -> None:
    model = small(transformers.LlamaConfig(**SMALL))
    result = modelexport.export_package(model, tmp_path / "out", fuse="ort-cuda")
    part = result.parts["decode"]
    assert part.coverage.inferred == 0
    assert part.fusion is not None
    assert any(one.op_type == "GroupQueryAttention" and one.calls == 2 for one in part.fusion.operators)


def test_fusing_asks_for_an_optimised_graph(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--no-optimize"):
        modelexport.export(
            torch.nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "x.onnx", fuse="ort-cpu", optimized=False
        )
