"""Verify every module of BERT-sized models: the cost above one run in PyTorch, one in ONNX Runtime, and loading.

    OMP_NUM_THREADS=1 python benchmarks/verify.py

Both parts of a ratio are medians, measured alternately in the same process. The baseline is the unavoidable work: one
PyTorch run, one ONNX Runtime run with its session, and reading the tagged file.

Needs only the project; about two minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

import modelexport
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.reference import reference_path
from modelexport.verify.feeding import feeds
from modelexport.verify.outputs import run_module
from modelexport.verify.reference import verify_reference

LAYERS = (2, 6, 12)
RUNS = 3


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(layers: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=layers)).eval()
    inputs = {"input_ids": torch.randint(0, 30000, (2, 64)), "attention_mask": torch.ones(2, 64, dtype=torch.long)}
    path = folder / f"bert{layers}.onnx"
    modelexport.export(model, inputs, path, reference=True)

    def in_onnx_runtime() -> None:
        runs = open_session(path, optimized=True)
        run_session(runs, feeds(inputs, runs))

    def verified() -> None:
        assert modelexport.verify(model, inputs, path).agrees

    work: dict[str, Callable[[], object]] = {
        "load": lambda: modelexport.load(path).hierarchy,
        "PyTorch": lambda: run_module(model, inputs),
        "ONNX Runtime": in_onnx_runtime,
        "verify": verified,
        "with reference values": lambda: verify_reference(path),
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(RUNS):
        for name, one in work.items():
            taken[name].append(seconds(one))
    median = {name: statistics.median(times) for name, times in taken.items()}
    base = median["load"] + median["PyTorch"] + median["ONNX Runtime"]
    calls = len(modelexport.load(path).calls)
    weights, kept = path.stat().st_size / 1e6, reference_path(path).stat().st_size / 1e6
    columns = " | ".join(f"{median[name]:.2f}" for name in work)
    ratios = f"{median['verify'] / base:.1f} | {median['with reference values'] / base:.1f}"
    print(f"| {layers} | {calls} | {weights:,.0f} | {kept:,.0f} | {columns} | {ratios} |", flush=True)


def main() -> None:
    print(
        "| layers | calls | file, MB | reference values, MB | reading, s | PyTorch, s | ONNX Runtime, s | `verify`, s "
        "| with reference values, s | ratio | ratio |"
    )
    print("|---" * 11 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for layers in [int(argument) for argument in sys.argv[1:]] or LAYERS:
            measure(layers, Path(folder))


if __name__ == "__main__":
    main()
