"""Does `verify` accuse a sound file? Every model of the tests' table, in every way in which it is exported and changed.

    OMP_NUM_THREADS=1 python benchmarks/false_alarms.py [MODEL,...] [--exports FOLDER] [--quick] [--types TYPE,...]

Ways: both front ends; static and dynamic; fresh weights, and *other* ones, of which no two are equal, put into the file
with `update-weights` and verified as they are; after each tool of `optimize` that keeps the numbers. `--quick` leaves
out the tools. With `--types`, the models in half precision instead (`float16,bfloat16`), by one front end and without
tools. What the exporter or a tool refuses is listed, and no run. Ends with status 1 if a sound file is accused, if
nothing of it was compared, or without any run; prints the table of alarms by runs.

Needs what `make test` installs; about forty minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

import modelexport
import models
from building import built
from modelexport.errors import ModelExportError
from modelexport.tools.optimizers.optimize_tools import optimize_file

Frontend = Literal["dynamo", "torchscript"]
FRONTENDS: Sequence[Frontend] = ("dynamo", "torchscript")
LOSSLESS = ("ort-basic", "ort-extended", "ort-bert", "ort-gpt2", "onnxslim", "onnxsim", "version-converter",
            "onnxscript", "inliner")  # fmt: skip
"""The tools that keep every number. `ort-all` writes a file for this processor alone, which no reader can open."""


def other_weights(model: torch.nn.Module) -> None:
    """As after training: no two numbers are equal, and none is zero."""
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and tensor.data_ptr() not in seen and tensor.numel():
            seen.add(tensor.data_ptr())
            noise = torch.rand(tensor.shape, generator=generator).to(tensor.dtype) * 0.1 + 0.02
            with torch.no_grad():
                tensor.add_(noise if "var" in key or tensor.ndim < 2 else noise - 0.07)


def verified(model: Any, inputs: Any, path: Path) -> str:
    """Empty, or what a sound file is accused of."""
    try:
        report = modelexport.verify(model, inputs, path)
    except ModelExportError as error:
        return f"refused: {error}"
    if report.agrees:
        return ""
    calls = [f"{call.address or '.'} {call.reason}" for call in report.calls if call.status == "differ"]
    outputs = [f"{one.name} {one.reason}" for one in report.outputs if one.status == "differ"]
    others = [f"{one.what} {one.reason}" for one in report.others if one.status == "differ"]
    claims = [f"{one.where}: {one.claimed} is {one.found}" for one in report.claims]
    return f"{report.verdict}: " + "; ".join([*calls, *outputs, *others, *claims])[:400]


def runs(
    case: models.ModelCase, folder: Path, tools: bool, dtype: str = "", frontends: Sequence[Frontend] = FRONTENDS
) -> Iterator[tuple[str, str]]:
    """Each way, and what its file is accused of."""
    for frontend in frontends:
        for dynamic in (False, True):
            if dynamic and case.dynamic is None:
                continue
            way = f"{dtype or frontend}, {'dynamic' if dynamic else 'static'}"
            model, inputs = built(case, dtype)
            path = folder / f"{case.name}-{dtype or frontend}{'-dynamic' if dynamic else ''}.onnx"
            if not path.exists():
                try:
                    modelexport.export(model, inputs, path, frontend=frontend, dynamic=dynamic)
                except ModelExportError as error:
                    print(f"  {case.name}: {way}: {str(error)[:150]}", file=sys.stderr, flush=True)
                    continue
            yield f"{way}, fresh", verified(model, inputs, path)
            changed = path.with_name(f"{path.stem}-other.onnx")
            other_weights(model)
            try:
                modelexport.update_weights(path, model.state_dict(), changed)
            except ModelExportError as error:
                print(f"  {case.name}: {way}: update-weights: {error}", file=sys.stderr, flush=True)
            else:
                yield f"{way}, other weights", verified(model, inputs, changed)
            if tools and frontend == "dynamo" and not dynamic:
                yield from after_tools(case, path)


def after_tools(case: models.ModelCase, path: Path) -> Iterator[tuple[str, str]]:
    for tool in LOSSLESS:
        output = path.with_name(f"{path.stem}-{tool}.onnx")
        try:
            optimize_file(path, tool, output)
        except ModelExportError as error:
            print(f"  {case.name}: {tool}: {str(error)[:150]}", file=sys.stderr, flush=True)
            continue
        yield f"after {tool}", verified(case.build(), case.inputs(), output)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="?", default=",".join(c.name for c in (*models.CASES, *models.TRAINED)))
    parser.add_argument("--exports", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--types", default="")
    arguments = parser.parse_args()
    if arguments.exports:
        arguments.exports.mkdir(parents=True, exist_ok=True)
    count: Counter[str] = Counter()
    alarms: dict[str, list[str]] = defaultdict(list)
    for name in arguments.models.split(","):
        case, start = models.case(name), time.perf_counter()
        if case.missing:
            print(f"{name}: needs {', '.join(case.missing)}", file=sys.stderr, flush=True)
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.exports or Path(temporary)
            ways = (
                chain.from_iterable(runs(case, folder, False, one, ("dynamo",)) for one in arguments.types.split(","))
                if arguments.types
                else runs(case, folder, not arguments.quick)
            )
            for way, accused in ways:
                count[way] += 1
                if accused:
                    alarms[way].append(f"{name}: {accused}")
                    print(f"  ALARM {name}, {way}: {accused}", file=sys.stderr, flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print("| way | runs | false alarms |\n|---|---|---|")
    for way, total in count.items():
        print(f"| {way} | {total} | {len(alarms[way])} |")
    print(f"| all | {count.total()} | {sum(map(len, alarms.values()))} |")
    return any(alarms.values()) or not count


if __name__ == "__main__":
    sys.exit(main())
