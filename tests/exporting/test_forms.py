"""Other graphs of a decoder: a cache of a fixed size, and a graph of its own for the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from test_packages import CACHE, ENCODER_DECODERS, decoder, static  # noqa: F401

import modelexport
from modelexport.errors import InputsError, UsageError
from modelexport.packages.generation_loop import Generator
from modelexport.tagged.package import read_package
from modelexport.tools.generate.prompts import example_prompts
from test_cli import run


def shapes(path: Path) -> dict[str, list[Any]]:
    graph = onnx.load(path, load_external_data=False).graph
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


@pytest.mark.slow
def test_a_static_cache_has_a_fixed_size_and_gives_pytorchs_tokens(static: Path) -> None:  # noqa: F811
    document = json.loads((static / "export.json").read_text())
    assert document["parts"]["decode"]["coverage"]["inferred"] == 0
    assert "does not pass the input cache_position" in str(document["notes"])
    check_static(static / "out", decoder("llama"))


@pytest.mark.slow
def test_a_static_cache_is_fused_too(tmp_path: Path) -> None:
    model = decoder("llama")
    modelexport.export_package(model, tmp_path / "out", static_cache=CACHE, fuse="ort-cpu")
    check_static(tmp_path / "out", model)


def check_static(folder: Path, model: Any) -> None:
    found = shapes(folder / "decode.onnx")
    assert found["cache_position"] == ["sequence"]
    assert found["attention_mask"] == ["batch", CACHE]
    caches = {name: size for name, size in found.items() if name.startswith(("past", "present"))}
    assert len(caches) == 4 * model.config.num_hidden_layers
    assert set(map(tuple, caches.values())) == {("batch", 2, CACHE, 8)}
    # Prompts of different lengths in one padded batch, and each alone.
    report = modelexport.verify_generation(model, folder, example_prompts(model, None), new_tokens=CACHE - 12)
    assert report.agrees, report
    assert [one.steps for one in report.runs] == [CACHE - 12] * 5


def test_a_prompt_longer_than_the_static_cache_is_one_line(static: Path) -> None:  # noqa: F811
    done = run("verify", "out", "--model", "llama", "--new-tokens", "14", cwd=static)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"static cache has {CACHE} positions, and 14 new tokens after a prompt of 12 need 25" in done.stderr
    generator = Generator.of(read_package(static / "out"))
    prompt = {name: np.ones((1, CACHE + 1), np.int64) for name in ("input_ids", "attention_mask")}
    with pytest.raises(UsageError, match="the prompt has 25 tokens, and the static cache 24 positions"):
        next(generator.steps(prompt, 1))
    prompt = {name: array[:, : CACHE - 3] for name, array in prompt.items()}
    with pytest.raises(UsageError, match="generate 4 at most"):
        next(generator.steps(prompt, 5))
    assert len(list(generator.steps(prompt, 4))) == 4


def test_what_a_static_cache_does_not_go_with_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with pytest.raises(UsageError, match="leave out --separate-prefill"):
        modelexport.export_package(decoder("llama"), folder, static_cache=8, separate_prefill=True)
    with pytest.raises(InputsError, match="has an encoder: leave out --static-cache"):
        modelexport.export_package(ENCODER_DECODERS["t5"](), folder, static_cache=8)
    with pytest.raises(InputsError, match="a static cache of 3 positions is too small"):
        modelexport.export_package(decoder("llama"), folder, static_cache=3)
    with pytest.raises(InputsError, match="for a model that generates"):
        modelexport.export_package(torch.nn.Linear(2, 2), folder, inputs=(torch.ones(1, 2),), static_cache=8)
    done = run("export", "bert-tiny", "-o", "x.onnx", "--static-cache", "8", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "go with a FOLDER/" in done.stderr
    assert not folder.exists()


@pytest.mark.slow
def test_a_separate_prefill_shares_the_weights_and_both_loaders_run_both_parts(tmp_path: Path) -> None:
    from transformers.exporters import ExportedModel

    model = decoder("one layer")
    result = modelexport.export_package(model, tmp_path / "out", separate_prefill=True)
    assert any("window" in note for note in result.notes)
    package = read_package(tmp_path / "out")
    assert list(package.files) == ["prefill", "decode"]
    assert package.manifest.weights == ["model.safetensors"]
    assert shapes(package.files["prefill"])["attention_mask"] == ["batch", "sequence"]
    assert not [name for name in shapes(package.files["prefill"]) if name.startswith("past")]
    prompts = example_prompts(model, None)[:2]
    report = modelexport.verify_generation(model, tmp_path / "out", prompts, new_tokens=10)
    assert report.agrees, report
    ids = np.array([[5, 77, 23]])
    steps = Generator.of(package).steps({"input_ids": ids, "attention_mask": np.ones_like(ids)}, 3)
    assert [step.part for step in steps] == ["prefill", "decode", "decode"]
    # What one part returns, the other takes.
    exported = ExportedModel.from_pretrained(tmp_path / "out")
    tokens = torch.from_numpy(ids)
    first = exported.runners["prefill"](
        input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=torch.arange(3)[None]
    )
    further = exported.runners["decode"](
        input_ids=torch.tensor([[9]]),
        attention_mask=torch.ones(1, 4, dtype=torch.int64),
        position_ids=torch.tensor([[3]]),
        past_key_values=first["present"],
    )
    whole = model(torch.tensor([[5, 77, 23, 9]])).logits[:, -1:]
    torch.testing.assert_close(further["logits"], whole, atol=1e-5, rtol=1e-4)
