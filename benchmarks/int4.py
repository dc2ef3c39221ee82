"""Int4 packages in onnxruntime-genai: ours, quantized from the fused package, and those of its own model builder.

    OMP_NUM_THREADS=1 python benchmarks/int4.py [--tokens 32] [--rounds 15]

A decoder of SmolLM2's width and a mixture of experts (LFM2) with random weights, symmetric blocks of 32. Each row:
tokens per second after the first, the bytes of weights and graph on disk, and the share of them that is left in float.
The candidates run in turn in one process, and the best of the rounds counts: other work on the machine only adds time.

Needs what `make test` installs; two minutes on an idle core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from generate import command_of, in_genai, save_smollm2, timed
from modelexport import export_package, quantize_package

METHOD = "int4:symmetric=true,embeddings=true"
OPSET = 21
"""The first with tables of int4."""


def save_experts(folder: Path) -> None:
    """A mixture of 8 experts, of which a token takes 2."""
    save_smollm2(folder, 1, 4096)  # its tokenizer
    torch.manual_seed(0)
    config = transformers.Lfm2MoeConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=8,
        num_dense_layers=1,
        layer_types=["full_attention"] * 8,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.Lfm2MoeForCausalLM(config).save_pretrained(folder)


def built(model: Path, folder: Path) -> None:
    command, environment = command_of("builder", model, folder)
    command[command.index("fp32")] = "int4"
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])


def megabytes(folder: Path) -> float:
    files = {file.stat().st_ino: file for file in folder.rglob("*") if ".onnx" in file.name or file.suffix == ".data"}
    return sum(file.stat().st_size for file in files.values()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print("| model | package | tokens/s | MB | left in float |\n|---|---|--:|--:|---|")
    for name, save in (("decoder", lambda folder: save_smollm2(folder, 12, 16384)), ("experts", save_experts)):
        with tempfile.TemporaryDirectory() as place:
            model, ours, theirs, fused = (Path(place) / part for part in ("model", "ours", "theirs", "fused"))
            save(model)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            export_package(loaded, fused, directory=model, fuse="ort-cpu", opset=OPSET)
            result = quantize_package(fused, ours, to=METHOD)["decode"]
            built(model, theirs)
            runs = {"ours": in_genai(ours), "builder": in_genai(theirs)}
            rates: dict[str, list[float]] = {kind: [] for kind in runs}
            for turn in range(options.rounds + 1):
                for kind, run in runs.items():
                    _, rate, _ = timed(run, options.tokens)
                    if turn:
                        rates[kind].append(rate)
            share = sum(result.left.values()) / result.bytes_after
            left = f"{share:.0%}: {', '.join(list(result.left)[:2])}"
            for kind, folder, told in (("builder", theirs, ""), ("ours", ours, left)):
                rate, size = max(rates[kind]), megabytes(folder)
                print(f"| {name} | {kind} | {rate:,.0f} | {size:.1f} | {told} |")
            ratio = max(rates["ours"]) / max(rates["builder"])
            print(f"| {name} | ratio | {ratio:.2f} | {megabytes(theirs) / megabytes(ours):.2f} | |", flush=True)


if __name__ == "__main__":
    main()
