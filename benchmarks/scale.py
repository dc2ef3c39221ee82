"""The cost of an export for models of growing size: linked, copied, and by the bare exporter with loaded weights.

For each size a Llama checkpoint with random weights is written in shards of at most 1 GB, never whole in memory. Each
export is a separate process: wall time from start to end, with imports and loading, peak memory as measured by the
kernel (with pages of mapped files), and the bytes of the files that it wrote; a hard link writes none.

    python benchmarks/scale.py [--sizes 0.1 1 3 7] [--ways link copy bare] [--folder DIR] [--bare-limit GB]

Needs only the project, 40 GB of disk and 16 GB of memory for all sizes; `--sizes 0.1` takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from outcomes import measured

SIZES = {  # billions of parameters: hidden size, intermediate size, layers, heads, key heads
    "0.1": (640, 1728, 12, 10, 5),
    "1": (2048, 5504, 18, 16, 8),
    "3": (3072, 8192, 26, 24, 8),
    "7": (4096, 11008, 32, 32, 32),
}
SHARD = 10**9
TOKENS = 16
CHUNK = 1 << 22
"""The number of elements that are drawn at a time."""


def config_of(size: str) -> dict[str, object]:
    hidden, between, layers, heads, key_heads = SIZES[size]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": False,
    }


def shapes_of(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, between = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    vocabulary = int(str(config["vocab_size"]))
    keys = hidden // int(str(config["num_attention_heads"])) * int(str(config["num_key_value_heads"]))
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(int(str(config["num_hidden_layers"]))):
        inside = f"model.layers.{layer}"
        for name, size in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"{inside}.self_attn.{name}_proj.weight", (size, hidden)
        yield f"{inside}.mlp.gate_proj.weight", (between, hidden)
        yield f"{inside}.mlp.up_proj.weight", (between, hidden)
        yield f"{inside}.mlp.down_proj.weight", (hidden, between)
        yield f"{inside}.input_layernorm.weight", (hidden,)
        yield f"{inside}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def write_checkpoint(folder: Path, size: str, *, sparse: bool = False) -> tuple[int, int]:
    """Write a checkpoint; returns its parameters and its bytes.

    Args:
        sparse: Write files of zeros that take no space on the disk.
    """
    folder.mkdir()
    config = config_of(size)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    held = 0
    for name, shape in shapes_of(config):
        nbytes = 4 * int(np.prod(shape))
        if shards[-1] and held + nbytes > SHARD:
            shards.append([])
            held = 0
        shards[-1].append((name, shape))
        held += nbytes
    random = None if sparse else np.random.default_rng(0)
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        index.update((name, file) for name, _ in tensors)
        write_shard(folder / file, tensors, random)
    total = sum(4 * int(np.prod(shape)) for tensors in shards for _, shape in tensors)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total // 4, total


def write_shard(path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], random: np.random.Generator | None) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if random is None:
            file.truncate(8 + len(text) + offset)
            return
        for _, shape in tensors:
            left = int(np.prod(shape))
            while left:
                drawn = random.standard_normal(min(left, CHUNK), dtype=np.float32)
                drawn *= 0.02
                drawn += float(len(shape) == 1)  # norms are about one
                drawn.tofile(file)
                left -= len(drawn)


BARE = """
import sys, time, json, onnx_ir, torch
from transformers import AutoModelForCausalLM
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
began = time.perf_counter()
ids = torch.randint(0, 32000, (2, int(sys.argv[3])))
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
program = OnnxExporter().export(model, inputs, OnnxConfig()).program
onnx_ir.save(program, sys.argv[2], external_data="model.onnx.data")
print(json.dumps(time.perf_counter() - began))
"""


def command_of(way: str, checkpoint: Path, output: Path) -> list[str]:
    if way == "bare":
        return [sys.executable, "-c", BARE, str(checkpoint), str(output), str(TOKENS)]
    export = [sys.executable, "-m", "modelexport", "export", str(checkpoint), "-o", str(output), "--json"]
    return [*export, "--weights", way]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.1", "1", "3"], choices=SIZES)
    parser.add_argument("--ways", nargs="+", default=["link", "copy", "bare"], choices=["link", "copy", "bare"])
    parser.add_argument("--folder", type=Path, help="where to write; the files are removed afterwards")
    parser.add_argument("--bare-limit", type=float, default=6, help="GB of the largest checkpoint to load whole")
    options = parser.parse_args()
    print("| parameters | weights, GB | | wall, s | CPU, s | peak memory, GB | written, GB | of the weights |")
    print("|---|---|---|---|---|---|---|---|")
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            checkpoint = Path(folder, "checkpoint")
            _, weights = write_checkpoint(checkpoint, size)
            ways = [way for way in options.ways if way != "bare" or weights < options.bare_limit * 1e9]
            model = f"{size} billion | {weights / 1e9:.1f}"
            for way in sorted(ways):  # bare first
                output = Path(folder, way)
                output.mkdir()
                seconds, busy, peak, said = measured(command_of(way, checkpoint, output / "model.onnx"))
                written = sum(file.stat().st_size for file in output.iterdir() if file.stat().st_nlink == 1)
                costs = f"{seconds:.1f} | {busy:.1f} | {peak / 1e9:.2f}"
                files = f"{written / 1e9:.3f} | {100 * written / weights:.2f} %"
                name = "bare exporter" if way == "bare" else f"`{way}`"
                print(f"| {model} | {name} | {costs} | {files} |", flush=True)
                model = " | "
                details = json.loads(said.splitlines()[-1] if way == "bare" else said)
                stages = {"export and save alone": details} if isinstance(details, float) else details["seconds"]
                told = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in stages.items())
                print(f"{size} billion, {way}: {told}", file=sys.stderr)
                shutil.rmtree(output)


if __name__ == "__main__":
    main()
