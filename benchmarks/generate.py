"""Tokens per second of a decoder: PyTorch, transformers' own fused export, onnxruntime-genai's model builder, ours.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--model DIR] [--layers 30] [--vocabulary 49152] [--tokens 64]
    OMP_NUM_THREADS=1 python benchmarks/generate.py --int4 [--tokens 32] [--rounds 15]

The default is SmolLM2-135M's shape with random weights, float32 on the CPU, greedy from one prompt of 8 tokens. Each
row: the time of the whole export command, the bytes on disk (a linked file once), the time to the first token, tokens
per second after it, memory, and whether the tokens are PyTorch's. Every candidate has a process of its own; they run
in turn: figures are medians of the rounds, memory is the largest resident size without what the process had before it
loaded the model. The last lines compare rates round by round.

`--int4` compares int4 packages in onnxruntime-genai: ours, quantized from the fused package, and those of its own model
builder, of a decoder of SmolLM2's width and a mixture of experts (LFM2), with symmetric blocks of 32. Each row: tokens
per second after the first, in the best of the rounds, since other work on the machine only adds time; the bytes of
weights and graph on disk, and the share of them that is left in float.

Needs what `make test` installs; about six minutes with the default shape on two idle cores, and two for `--int4`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import stages

PROMPT = [[5, 77, 23, 9, 101, 44, 8, 63]]
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

Run = Callable[[int], Iterator[int]]
"""Yields that many tokens that follow the prompt."""


def save_smollm2(folder: Path, layers: int, vocabulary: int) -> None:
    """A model of SmolLM2's shape with random weights, and a tokenizer, without which the model builder does not run."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"vocab_size": vocabulary, "num_hidden_layers": layers, "max_position_embeddings": 2048}
    config = transformers.LlamaConfig(**sizes, **TOKENS, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def in_pytorch(folder: Path) -> Run:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def run(count: int) -> Iterator[int]:
        ids, past = torch.tensor(PROMPT), None
        for _ in range(count):
            made = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = made.past_key_values, made.logits[:, -1:].argmax(-1)
            yield int(ids)

    return run


def in_a_loop(folder: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "decode.onnx")
    returned, first = [value.name for value in session.get_outputs()], stages.first_feeds(session, np.array(PROMPT))

    def step(feeds: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(returned, session.run(None, feeds), strict=True))

    return lambda count: stages.generate(step, first, count)


def in_genai(folder: Path) -> Run:
    import onnxruntime_genai as genai

    loaded = genai.Model(str(folder))

    def run(count: int) -> Iterator[int]:
        parameters = genai.GeneratorParams(loaded)
        length = len(PROMPT[0]) + count
        parameters.set_search_options(min_length=length, max_length=length, do_sample=False)
        generator = genai.Generator(loaded, parameters)
        generator.append_tokens(PROMPT[0])
        for _ in range(count):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    return run


def of_transformers(folder: Path) -> Run:
    import onnxruntime

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


def export_with_transformers(model: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    inputs = {"input_ids": torch.tensor(PROMPT * 2), "attention_mask": torch.ones(2, len(PROMPT[0]), dtype=torch.long)}
    config = OnnxConfig(dynamic=True, ort_fusions="cpu")
    OnnxExporter().export_for_generation(loaded, inputs, config).save_pretrained(folder)


def command_of(export: str, model: Path, folder: Path, precision: str = "fp32") -> tuple[list[str], dict[str, str]]:
    """The command that writes a folder, and what it needs in its environment."""
    if export == "builder":
        import importlib.util

        found = importlib.util.find_spec("onnxruntime_genai")
        assert found is not None
        assert found.origin is not None
        models = Path(found.origin).parent / "models"
        command = [str(models / "builder.py"), "-m", str(model), "-o", str(folder), "-p", precision, "-e", "cpu"]
        return [*command, "-c", str(folder.parent / "cache")], {"PYTHONPATH": str(models)}
    if export == "transformers":
        return [__file__, "--model", str(model), "--only-export", str(folder)], {}
    fuse = ["--fuse", "ort-cpu"] if export == "fused" else []
    return ["-m", "modelexport", "export", str(model), "-o", f"{folder}/", *fuse], {}


def exported(export: str, model: Path, folder: Path, precision: str = "fp32") -> tuple[float, float]:
    """Seconds that the command took, and the megabytes that it wrote or linked."""
    command, environment = command_of(export, model, folder, precision)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{export}: {done.stderr[-2000:]}")
    took = time.perf_counter() - start
    return took, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


@dataclass(frozen=True)
class Candidate:
    name: str
    export: str
    """The export that it runs; empty for the model itself."""
    load: Callable[[Path], Run]


CANDIDATES = (
    Candidate("PyTorch", "", in_pytorch),
    Candidate("transformers, fused", "transformers", of_transformers),
    Candidate("builder, genai", "builder", in_genai),
    Candidate("plain, loop", "plain", in_a_loop),
    Candidate("plain, genai", "plain", in_genai),
    Candidate("fused, loop", "fused", in_a_loop),
    Candidate("fused, genai", "fused", in_genai),
)
COMPARED = (("fused, genai", "builder, genai"), ("fused, loop", "transformers, fused"))


def serve(connection: Connection, index: int, folder: Path) -> None:
    """Load a candidate in this process; then run it whenever a number of tokens comes, until 0 comes."""
    load = CANDIDATES[index].load
    if load is in_pytorch:
        import torch
        import transformers  # noqa: F401  # before the memory is read

        torch.set_num_threads(os.cpu_count() or 1)
    import onnxruntime  # noqa: F401
    import onnxruntime_genai  # noqa: F401

    before = memory("VmRSS")
    run = load(folder)
    list(run(2))
    connection.send("loaded")
    while count := connection.recv():
        first, rate, tokens = timed(run, count)
        connection.send((first, rate, tokens, memory("VmHWM") - before))


def memory(kind: str) -> float:
    """The resident size of this process in megabytes: ``VmRSS`` now, ``VmHWM`` at most."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"{kind}:\s+(\d+)", status)[1]) / 1e3  # type: ignore[index]


def timed(run: Run, count: int) -> tuple[float, float, list[int]]:
    """Seconds to the first token, tokens per second after it, and the tokens."""
    start, tokens, first = time.perf_counter(), [], 0.0
    for token in run(count):
        tokens.append(token)
        first = first or time.perf_counter() - start
    return first, (count - 1) / (time.perf_counter() - start - first), tokens


def measure(
    folders: dict[str, Path], tokens: int, rounds: int
) -> dict[str, list[tuple[float, float, list[int], float]]]:
    """Name of a candidate to what it measured in each round."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    for index, candidate in enumerate(CANDIDATES):
        here, there = context.Pipe()
        context.Process(target=serve, args=(there, index, folders[candidate.export]), daemon=True).start()
        ends[candidate.name] = here
        here.recv()
    found: dict[str, list[tuple[float, float, list[int], float]]] = {name: [] for name in ends}
    for _ in range(rounds):
        for name, end in ends.items():
            end.send(tokens)
            found[name].append(end.recv())
    for end in ends.values():
        end.send(0)
    return found


def save_experts(folder: Path) -> None:
    """A mixture of 8 experts, of which a token takes 2."""
    import torch
    import transformers

    save_smollm2(folder, 1, 4096)  # its tokenizer
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512}
    sizes |= {"num_hidden_layers": 8, "num_dense_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    config = transformers.Lfm2MoeConfig(**sizes, **experts, **TOKENS, layer_types=["full_attention"] * 8)
    transformers.Lfm2MoeForCausalLM(config).save_pretrained(folder)


def megabytes(folder: Path) -> float:
    files = {file.stat().st_ino: file for file in folder.rglob("*") if ".onnx" in file.name or file.suffix == ".data"}
    return sum(file.stat().st_size for file in files.values()) / 1e6


def int4(tokens: int, rounds: int) -> None:
    """Print the table of int4 packages."""
    import torch
    import transformers

    from modelexport import export_package, quantize_package

    print("| model | package | tokens/s | MB | left in float |\n|---|---|--:|--:|---|")
    for name, save in (("decoder", lambda folder: save_smollm2(folder, 12, 16384)), ("experts", save_experts)):
        with tempfile.TemporaryDirectory() as place:
            model, ours, theirs, fused = (Path(place) / part for part in ("model", "ours", "builder", "fused"))
            save(model)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            opset = 21  # the first with tables of int4
            export_package(loaded, fused, directory=model, fuse="ort-cpu", opset=opset)
            result = quantize_package(fused, ours, to="int4:symmetric=true,embeddings=true")["decode"]
            exported("builder", model, theirs, "int4")
            runs = {folder: in_genai(folder) for folder in (theirs, ours)}
            rates: dict[Path, list[float]] = {folder: [] for folder in runs}
            for _ in range(rounds):
                for folder, run in runs.items():
                    rates[folder].append(timed(run, tokens)[1])
            left = f"{sum(result.left.values()) / result.bytes_after:.0%}: {', '.join(list(result.left)[:2])}"
            best = {folder: max(found) for folder, found in rates.items()}
            for folder in runs:
                told = left if folder is ours else ""
                print(f"| {name} | {folder.name} | {best[folder]:,.0f} | {megabytes(folder):.1f} | {told} |")
            smaller = megabytes(theirs) / megabytes(ours)
            print(f"| {name} | ratio | {best[ours] / best[theirs]:.2f} | {smaller:.2f} | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="a folder with a decoder, instead of random weights")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--int4", action="store_true", help="the table of int4 packages")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--only-export", type=Path, help="export --model with transformers to this folder, nothing else"
    )
    asked = parser.parse_args()
    if asked.only_export:
        export_with_transformers(asked.model, asked.only_export)
        return
    if asked.int4:
        int4(asked.tokens or 32, asked.rounds or 15)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            name: Path(scratch) / (name or "model") for name in ("", "builder", "plain", "fused", "transformers")
        }
        if asked.model:
            folders[""] = asked.model.resolve()
        else:
            save_smollm2(folders[""], asked.layers, asked.vocabulary)
        made = {name: exported(name, folders[""], folder) for name, folder in folders.items() if name}
        found = measure(folders, asked.tokens or 64, asked.rounds or 5)
    expected = found["PyTorch"][0][2]
    print("| what | export, s | on disk, MB | first token, ms | tokens a second | memory, MB | tokens |")
    print("|---|---|---|---|---|---|---|")
    for candidate in CANDIDATES:
        rounds = found[candidate.name]
        first, rate, most = (statistics.median(one[index] for one in rounds) for index in (0, 1, 3))  # type: ignore[type-var]
        export = "{:.1f} | {:,.1f}".format(*made[candidate.export]) if candidate.export else "|"
        equal = "equal" if all(one[2] == expected for one in rounds) else "differ"
        print(f"| {candidate.name} | {export} | {first * 1e3:.1f} | {rate:.1f} | {most:,.0f} | {equal} |")
    print()
    for ours, theirs in COMPARED:
        shares = [one[1] / other[1] for one, other in zip(found[ours], found[theirs], strict=True)]
        share = f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        print(f"`{ours}` generates {share} times the tokens of `{theirs}`.")


if __name__ == "__main__":
    main()
