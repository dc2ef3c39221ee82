"""Tokens per second of one decoder: PyTorch, transformers' own fused export, and packages of ours, plain and fused.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--layers 30] [--vocabulary 49152] [--tokens 64]

The default is SmolLM2-135M's shape with random weights, float32 on the CPU, greedy from one prompt. Each line: the time
to export, the bytes on disk (a linked file once), the time to the first token, tokens per second after it (median of
three rounds in which every candidate runs in turn), and whether the tokens are PyTorch's.

Needs what `make test` installs; ten minutes with the default shape.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import onnxruntime_genai as genai
import torch
import transformers
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

import modelexport
from modelexport.runtime.generation import Generator
from modelexport.tagged.package import read_package

PROMPT = [[5, 77, 23, 9, 101, 44, 8, 63]]
ROUNDS = 3

Run = Callable[[int], Iterator[int]]
"""Yields that many tokens that follow the prompt."""


def smollm2(layers: int, vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def in_pytorch(model: Any) -> Run:
    @torch.no_grad()
    def run(count: int) -> Iterator[int]:
        ids, past = torch.tensor(PROMPT), None
        for _ in range(count):
            made = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = made.past_key_values, made.logits[:, -1:].argmax(-1)
            yield int(ids)

    return run


def in_a_loop(folder: Path) -> Run:
    generator = Generator(read_package(folder).files)
    inputs = {"input_ids": np.array(PROMPT), "attention_mask": np.ones_like(PROMPT)}
    return lambda count: (int(step.tokens[0]) for step in generator.steps(inputs, count))


def in_genai(folder: Path) -> Run:
    loaded = genai.Model(str(folder))

    def run(count: int) -> Iterator[int]:
        parameters = genai.GeneratorParams(loaded)
        parameters.set_search_options(max_length=len(PROMPT[0]) + count, do_sample=False)
        generator = genai.Generator(loaded, parameters)
        generator.append_tokens(PROMPT[0])
        for _ in range(count):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    return run


def of_transformers(folder: Path) -> Run:
    sessions = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("prefill", "decode")}

    def run(count: int) -> Iterator[int]:
        ids, mask = np.array(PROMPT), np.ones_like(PROMPT)
        cache: dict[str, Any] = {}
        for index in range(count):
            session = sessions["decode" if index else "prefill"]
            positions = np.maximum(np.cumsum(mask, 1) - 1, 0)[:, -ids.shape[1] :]
            given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **cache}
            names = {value.name: plain_name(value.name) for value in session.get_inputs()}
            values = session.run(None, {name: given[plain] for name, plain in names.items()})
            made = {plain_name(one.name): value for one, value in zip(session.get_outputs(), values, strict=True)}
            cache = {name: value for name, value in made.items() if name.startswith("past")}
            ids = made["logits"][:, -1:].argmax(-1)
            mask = np.concatenate([mask, np.ones_like(ids)], 1)
            yield int(ids[0, 0])

    return run


def plain_name(name: str) -> str:
    return re.sub(r"^(input|output)\.", "", name)


def export_with_transformers(model: Any, folder: Path) -> None:
    inputs = {"input_ids": torch.tensor(PROMPT * 2), "attention_mask": torch.ones(2, len(PROMPT[0]), dtype=torch.long)}
    config = OnnxConfig(dynamic=True, ort_fusions="cpu")
    OnnxExporter().export_for_generation(model, inputs, config).save_pretrained(folder)


def timed(run: Run, count: int) -> tuple[float, float, list[int]]:
    """Seconds to the first token, tokens per second after it, and the tokens."""
    start, tokens, first = time.perf_counter(), [], 0.0
    for token in run(count):
        tokens.append(token)
        first = first or time.perf_counter() - start
    return first, (count - 1) / (time.perf_counter() - start - first), tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    model = smollm2(asked.layers, asked.vocabulary)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in ("plain", "fused", "transformers")}
        exports: Mapping[str, Callable[[], object]] = {
            "plain": lambda: modelexport.export_package(model, folders["plain"]),
            "fused": lambda: modelexport.export_package(model, folders["fused"], fuse="ort-cpu"),
            "transformers": lambda: export_with_transformers(model, folders["transformers"]),
        }
        took, stored = {}, {}
        for name, export in exports.items():
            start = time.perf_counter()
            export()
            took[name] = time.perf_counter() - start
            stored[name] = sum(file.stat().st_size for file in folders[name].rglob("*") if file.is_file()) / 1e6
        runs: dict[str, tuple[str, Run]] = {
            "PyTorch": ("", in_pytorch(model)),
            "transformers, fused": ("transformers", of_transformers(folders["transformers"])),
            "plain, loop": ("plain", in_a_loop(folders["plain"])),
            "fused, loop": ("fused", in_a_loop(folders["fused"])),
            "fused, genai": ("fused", in_genai(folders["fused"])),
        }
        rounds = [{name: timed(run, asked.tokens) for name, (_, run) in runs.items()} for _ in range(ROUNDS)]
        expected = rounds[0]["PyTorch"][2]
        print("what                  export s      MB  first ms  tokens/s  tokens")
        for name, (export, _) in runs.items():
            first = statistics.median(one[name][0] for one in rounds) * 1e3
            speed = statistics.median(one[name][1] for one in rounds)
            made = f"{took[export]:8.1f}  {stored[export]:6.1f}" if export else f"{'':8}  {'':6}"
            equal = "equal" if all(one[name][2] == expected for one in rounds) else "differ"
            print(f"{name:20}  {made}  {first:8.1f}  {speed:8.1f}  {equal}")


if __name__ == "__main__":
    main()
