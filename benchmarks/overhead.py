"""The cost of tags: `modelexport.export`, with both front ends, compared with the bare exporter, export and save.

Time, peak memory and the size of the graph file; each ratio compares the column before it with the bare exporter's.

    python benchmarks/overhead.py [--runs N] [--cpu] [NAME ...]

Each run is a separate process, which builds the model, exports a tiny one to warm up, and then measures. The sides
alternate, and the ratios are those of the medians in the same table. Seconds are wall time; `--cpu` measures processor
time, for a machine that has other work.

Needs the project alone; about fifteen minutes for all models, five with `--runs 1`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Built = tuple[Any, dict[str, Any]]


def encoder(hidden: int, layers: int) -> Built:
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, intermediate_size=4 * hidden
    )
    ids = torch.randint(0, 1000, (2, 16))
    return BertModel(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def decoder(layers: int) -> Built:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 100, (2, 16))
    return LlamaForCausalLM(config).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


MODELS: dict[str, Callable[[], Built]] = {
    "bert-tiny (4 M)": lambda: encoder(128, 2),
    "bert-small (29 M)": lambda: encoder(512, 4),
    "bert-base (110 M)": lambda: encoder(768, 12),
    "decoder, 2 layers": lambda: decoder(2),
    "decoder, 8 layers": lambda: decoder(8),
    "decoder, 24 layers": lambda: decoder(24),
}


def bare(model: Any, inputs: dict[str, Any], path: Path) -> None:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    exporter = OnnxExporter()
    program = exporter.export(model, inputs, OnnxConfig()).program
    exporter.save_program(program, path)


def ours(frontend: str) -> Callable[[Any, dict[str, Any], Path], None]:
    def run(model: Any, inputs: dict[str, Any], path: Path) -> None:
        import modelexport

        # As the bare exporter saves: the weights in a separate file.
        modelexport.export(model, inputs, path, frontend=frontend, weights="copy")

    return run


SIDES = {"bare": bare, "dynamo": ours("dynamo"), "torchscript": ours("torchscript")}


def measure(side: str, name: str) -> None:
    """In a separate process: export one model and print seconds, peak memory and the size of the graph file."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    run = SIDES[side]
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        run(*decoder(1), Path(folder) / "warm.onnx")
        began, cpu = time.perf_counter(), time.process_time()
        run(model, inputs, Path(folder) / "model.onnx")
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        size = (Path(folder) / "model.onnx").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("\n" + json.dumps({"seconds": seconds, "cpu": cpu, "megabytes": peak, "graph": size}))


def in_process(side: str, name: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", side, name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="measure processor time, not wall time")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in arguments.names or MODELS:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(arguments.runs):
            for side, done in runs.items():
                done.append(in_process(side, name))
        print(name, file=sys.stderr)
        results[name] = {
            side: {key: statistics.median(one[key] for one in done) for key in done[0]} for side, done in runs.items()
        }
    print(table(results, "cpu" if arguments.cpu else "seconds", "s", 1, ".2f"), end="\n\n")
    print(table(results, "megabytes", "peak MB", 1, ",.0f"), end="\n\n")
    print(table(results, "graph", "graph kB", 1000, ",.0f"))


def table(results: dict[str, dict[str, dict[str, float]]], key: str, unit: str, scale: int, form: str) -> str:
    """One figure of all sides, and its ratio to the bare exporter's, as Markdown."""
    others = [side for side in SIDES if side != "bare"]
    lines = [f"| model, {unit} | bare |" + "".join(f" `{side}` | ratio |" for side in others)]
    lines.append("|---|---|" + "---|---|" * len(others))
    for name, sides in results.items():
        bare = sides["bare"][key]
        cells = "".join(f" {sides[side][key] / scale:{form}} | {sides[side][key] / bare:.2f} |" for side in others)
        lines.append(f"| {name} | {bare / scale:{form}} |{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
