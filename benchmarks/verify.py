"""What `verify` takes: processor time of trained models, static and dynamic, over a plain run of both sides.

    OMP_NUM_THREADS=1 python benchmarks/verify.py [--smollm2 FOLDER] [--runs N] [--exports FOLDER]

Processor seconds of the process, the least of N runs (3 if left out). *plain* is what nobody can do without: one run of
the PyTorch model, one session of ONNX Runtime loaded as people run the file, and one run of it. `verify` compares the
parameters, the outputs on several inputs, and every call. MiniLM comes from a package (see `tests/models.py`); SmolLM2
is a checkpoint folder, and is left out without `--smollm2`.

A minute for MiniLM, and about three for SmolLM2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import onnxruntime
import torch

import modelexport
import models
from modelexport.core.garbage_collection import only_new_garbage
from modelexport.pytorch.inputs.named_inputs import feeds
from outcomes import least_seconds


def measure(name: str, model: Any, inputs: Any, folder: Path, runs: int) -> None:
    for dynamic in (False, True):
        path = folder / f"{name}{'-dynamic' if dynamic else ''}.onnx"
        if not path.exists():
            modelexport.export(model, inputs, path, dynamic=dynamic)

        def plain(path: Path = path) -> None:
            with torch.no_grad():
                model(**inputs)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            session.run(None, feeds(inputs, session))

        def verified(path: Path = path) -> None:
            report = modelexport.verify(model, inputs, path)
            assert report.agrees, [call.reason for call in report.calls if call.reason]

        verified()
        with only_new_garbage():  # as in the command
            both = least_seconds(plain, verified, runs=runs)
        calls = len(modelexport.load(path).calls)
        size = sum(tensor.numel() for tensor in model.parameters()) / 1e6
        way = "dynamic" if dynamic else "static"
        print(
            f"| {name}, {size:.1f} M | {way} | {calls} | {both[0]:.2f} | {both[1]:.2f} | {both[1] / both[0]:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--exports", type=Path)
    arguments = parser.parse_args()
    print("| model | axes | calls | plain, s | verify, s | ratio |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.exports or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        case = models.case("minilm")
        if not case.missing:
            ids = torch.randint(1000, 30000, (2, 64))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            measure("MiniLM", case.build(), inputs, folder, arguments.runs)
        if arguments.smollm2:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(arguments.smollm2).eval()
            model.config.use_cache = False
            ids = torch.randint(1000, 40000, (2, 64))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            measure("SmolLM2", model, inputs, folder, arguments.runs)


if __name__ == "__main__":
    main()
