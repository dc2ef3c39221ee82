"""Cut one layer out of a small Llama: modelexport against ``onnx.utils.extract_model``, in time and in memory.

    OMP_NUM_THREADS=1 python benchmarks/extract.py

Both cut the same layer at the same values, from a file to a file. Times are medians of alternating runs in one process,
with loading; peaks are measured in separate processes, above the memory before the work.
Needs only the project, and 6 GB of disk; about three minutes.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from modelexport.tagged_model import load
from outcomes import measured

LAYER = "model.layers.12"
RUNS = 9
MODELS = {
    "24 layers of 320, embedded": (24, 320, 1000, False),
    "24 layers of 320, external": (24, 320, 1000, True),
    "the same with a vocabulary of 500,000": (24, 320, 500_000, True),
    "48 layers of 320, external": (48, 320, 1000, True),
    "24 layers of 1024, external": (24, 1024, 1000, True),
}
"""Name to the number of layers, their width, the vocabulary, and whether the weights are in a separate file."""


def build(path: Path, layers: int, width: int, vocabulary: int, external: bool) -> None:
    """Export the model, and save the boundary of the layer for ``extract_model``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from modelexport import export, load

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 12 // 5,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    inputs = {name: torch.ones(1, 16, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    export(LlamaForCausalLM(config).eval(), inputs, path, weights="copy" if external else "auto")
    extracted = load(path).extract(LAYER, path.with_name("layer.onnx"))
    boundary = [[value.value for value in extracted.inputs], [value.value for value in extracted.outputs]]
    path.with_name("boundary.json").write_text(json.dumps(boundary))


def tools(path: Path) -> dict[str, Callable[[], object]]:
    import onnx.utils

    from modelexport.tools.cut.extraction import extract

    output = path.with_name("layer.onnx")
    inputs, outputs = json.loads(path.with_name("boundary.json").read_text())
    return {
        "modelexport": lambda: extract(load(path), LAYER, output),
        "onnx": lambda: onnx.utils.extract_model(path, output, inputs, outputs),
    }


def seconds(path: Path) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in tools(path)}
    for _ in range(RUNS):
        for name, work in tools(path).items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak(path: Path, tool: str) -> float:
    """Megabytes that one extraction adds to the peak of this process."""
    work = tools(path)[tool]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def in_process(what: str, path: Path, *arguments: object) -> object:
    """Run a function of this file in a new process, since a peak covers the whole life of a process."""
    said = measured([sys.executable, __file__, what, str(path), json.dumps(arguments)])[-1]
    return json.loads(said.splitlines()[-1])


def main() -> None:
    print("| model | weights, MB | seconds | `extract_model` | ratio | peak, MB | `extract_model` |")
    print("|---|---|---|---|---|---|---|")
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            in_process("build", path, *sizes)
            weights = sum(file.stat().st_size for file in Path(folder).glob("model.onnx*")) / 1e6
            taken = in_process("seconds", path)
            peaks = [in_process("peak", path, tool) for tool in ("modelexport", "onnx")]
            ours, theirs = taken["modelexport"], taken["onnx"]
            times = f"{ours:.2f} | {theirs:.2f} | {theirs / ours:.1f}"
            print(f"| {name} | {weights:,.0f} | {times} | {peaks[0]:,.0f} | {peaks[1]:,.0f} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        function = {"build": build, "seconds": seconds, "peak": peak}[sys.argv[1]]
        print(json.dumps(function(Path(sys.argv[2]), *json.loads(sys.argv[3]))))
    else:
        main()
