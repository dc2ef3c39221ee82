"""Plant faults in files and documents, one at a time, and ask `verify` for them: found, and in the right call?

    OMP_NUM_THREADS=1 python benchmarks/faults.py [MODEL,...] [--exports FOLDER] [--kinds KIND,...] [--each N]
                                                  [--results FOLDER] [--by-model]

A model is a case of the tests' table, or `zoo/NAME`, one of those of `sweep.py`; `bert+dynamic` has dynamic axes,
`bert+float16` and `bert+bfloat16` are in half precision; the file of `bert+ort-bert` is the result of that tool of
`optimize`, in which only faults of values are planted, and which is compared with the exported file if the tool
quantizes. For each of them the kinds of `tests/planted/`: `plants.py`, `later_plants.py`
and `rare_plants.py` are planted where they can be, at N places each (1 if left out), drawn by a seed. A fault is
*found* if the verdict is `differ`, and *located* if what the report puts on top is the call that owns the changed node,
or a call inside it. A call that differs although neither it nor a call inside or around it owns the node is
*accused*, which ends with status 1 as well. Faults of tags' text and of names are located if the report names what was
changed. A document that differs is a note: its fault is found if there is a note, and located if the note names it. A
file that ONNX Runtime or the reader refuses fools nobody and is not counted, but for a document that is refused by
name. With `--results` what became of them is kept in FOLDER, a file a model: models that have one are not run again, so
that the whole can be run in pieces, and ends as one table. `--by-model` prints the table of models alone.

What is not found is run again, both files in ONNX Runtime: where the outputs are the same within rounding, for the
example inputs and for three others, the fault computes the same by its nature and is listed apart, with the largest
difference measured. So is another owner of a node that only moves elements, where PyTorch's tensors show that this call
gets or returns those very elements: the node may be in either; and so are declared sizes that are true for dozens of
sizes of each axis, where model and file run. Everything else that is not found or not located ends with status 1, and
so does a report on the sound file that does not agree.

Needs what `make test` installs; about forty minutes on a fast machine, and twice that on a slow one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import modelexport
import models
from building import ZOO, build
from modelexport.errors import FileFormatError, ModelExportError, UsageError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.graph.properties import forget_values
from modelexport.pytorch.inputs.named_inputs import under_names
from modelexport.pytorch.nested_tensors import as_array
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.optimizers.optimize_tools import TOOLS, optimize_file
from modelexport.traces.array_differences import is_floating
from modelexport.verify.model_and_file import ModelRuns
from modelexport.verify.verify import verify
from modelexport.verify.verify_report import CallVerdict, VerifyReport
from planted import later_plants, plants, rare_plants
from planted.plants import Place

MODELS = (
    "blocks", "equal-values", "unet", "recurrent", "bert", "albert", "gpt2", "llama", "t5", "mixtral", "vit", "resnet",
    "clip", "whisper", "minilm", "bert+dynamic", "llama+dynamic", "condition", "nested-branches", "loop",
)  # fmt: skip
"""Cases of the tests' table, some of them with dynamic axes."""
SAME = 4e-6
"""Up to here, in norms, the outputs of a file are what they were: 64 units of roundoff of float32."""
SUFFIXES = (".hierarchy.json", ".dag.json", ".operations.json")


def named(report: VerifyReport) -> set[str]:
    """What the report says is wrong, besides calls that compute other values."""
    found = {name for claim in report.claims for name in (claim.where, claim.where.partition(", ")[0])}
    if report.parameters is not None:
        found |= {*report.parameters.unaccounted, *report.parameters.differing}
    return found


def differences(report: VerifyReport, sound: VerifyReport) -> list[CallVerdict]:
    """The calls that differ otherwise than in the file without the fault, which may be that of a quantizer."""
    before = {one.address: one.reason for one in sound.calls if one.status == "differ"}
    return [one for one in report.calls if one.status == "differ" and before.get(one.address) != one.reason]


def is_located(place: Place, report: VerifyReport, sound: VerifyReport) -> bool:
    """Whether the report points at the right call before any other, or names what was changed."""
    expected = {address or "." for address in place.expected}
    if "*" in expected or expected & named(report):
        return True
    wrong = differences(report, sound)
    top = report.diverging if sound.agrees else min(wrong, key=lambda one: one.position or 0, default=None)
    if top is None:
        return False
    first = top.address or "."
    return any(first == one or first.startswith(f"{one}.") for one in expected)


def accused(place: Place, report: VerifyReport, sound: VerifyReport) -> list[str]:
    """The calls that differ because of a fault although they do not own it, and neither contain nor call who does."""
    if "*" in place.expected or not place.expected & {one.address for one in report.calls}:
        return []
    before = {one.address for one in sound.calls if one.status == "differ"}
    wrong = {one.address for one in report.calls if one.status == "differ"} - before

    def is_within(inner: str, outer: str) -> bool:
        return not outer or inner == outer or inner.startswith(f"{outer}.")

    return sorted(one for one in wrong if not any(is_within(one, own) or is_within(own, one) for own in place.expected))


def largest_difference(original: Path, changed: Path, feeds: dict[str, Any]) -> float:
    """How far the outputs of two files are apart, in norms: for the example inputs, and for others."""
    largest = 0.0
    for seed in range(4):
        one, other = (run_with_others(path, feeds, seed) for path in (original, changed))
        for right, wrong in zip(one, other, strict=True):
            if right.shape != wrong.shape or (not is_floating(right) and not np.array_equal(right, wrong)):
                return float("inf")
            a, b = (np.clip(np.nan_to_num(x.astype(np.float64)), -1e30, 1e30) for x in (right, wrong))
            norm = float(np.linalg.norm(a))
            largest = max(largest, float(np.linalg.norm(a - b)) / norm if norm else float(np.linalg.norm(b)))
    return largest


def run_with_others(path: Path, feeds: dict[str, Any], seed: int) -> list[Any]:
    """The outputs of a file; from seed 1 on for inputs that depend on their names and the seed alone."""
    model = load_onnx(path)
    given = {}
    for name, array in feeds.items():
        random = np.random.default_rng([seed, *name.encode()])
        other = array
        if seed and is_floating(array):
            other = random.standard_normal(array.shape) * 3
        elif seed and array.dtype.kind == "i":
            other = random.integers(0, array.max() + 1, array.shape)
        given[name] = other.astype(array.dtype)
    session = open_session(model, folder=path.parent)
    outputs = [value.name for value in session.get_outputs()]
    return list(session.run(outputs, {v.name: given[v.name] for v in session.get_inputs()}))


def tensors_of(model: torch.nn.Module, inputs: Any, address: str) -> list[Any]:
    """The tensors that a call gets and returns, as hooks see them."""
    path, _, number = address.partition("@")
    seen: list[list[Any]] = []

    def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, output))
        seen.append([as_array(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)])

    handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(*([] if isinstance(inputs, dict) else inputs), **(inputs if isinstance(inputs, dict) else {}))
    handle.remove()
    return seen[int(number or 0)] if len(seen) > int(number or 0) else []


def same_elements(one: Any, other: Any) -> bool:
    """Whether two arrays have the same elements, in any order."""
    if one.size != other.size:
        return False
    one, other = (np.sort(x.astype(np.float64) if is_floating(x) else x, axis=None) for x in (one, other))
    return np.allclose(one, other, atol=1e-5)


def sizes_that_hold(path: Path, model: torch.nn.Module, inputs: Any) -> int:
    """For how many sizes of inputs the outputs of a file have the sizes that it declares; 0 if not for one.

    Every symbol of the inputs has each size up to forty, and some multiples, the others staying as they are. Those with
    which the model or the file does not run are not counted; nor does a size with a symbol that no input has claim
    anything.
    """
    session = open_session(path)
    declared = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
    sizes = {said: size for name, tensor in inputs.items()
             for said, size in zip(declared[name], tensor.shape, strict=True) if isinstance(said, str)}  # fmt: skip
    held = 0
    for now in ({**sizes, symbol: size} for symbol in sizes
                for size in (*range(1, 41), *(sizes[symbol] * k // 4 for k in range(1, 13)))):  # fmt: skip
        other = dict(inputs)
        for name, tensor in inputs.items():
            for axis, said in enumerate(declared[name]):
                if isinstance(said, str):
                    other[name] = other[name].index_select(axis, torch.arange(now[said]) % tensor.shape[axis])
        try:
            with torch.no_grad():
                model(**other)
            outputs = run_session(session, under_names(other, list(other))).values()
        except Exception:
            continue
        for value, array in zip(session.get_outputs(), outputs, strict=True):
            for said, size in zip(value.shape, array.shape, strict=True):
                with contextlib.suppress(NameError):
                    if eval(str(said), {}, dict(now)) != size:
                        return 0
        held += 1
    return held


def places_of(
    model: ir.Model,
    path: Path,
    each: int,
    kinds: set[str],
    run: Callable[..., Any],
    feeds: dict[str, Any],
    *,
    values: bool,
) -> list[Place]:
    by_kind: dict[str, list[Place]] = defaultdict(list)
    of_values = (plants.weights, plants.more_weights, plants.swapped_weights, plants.attributes, plants.edges,
                 plants.more_edges)  # fmt: skip
    of_graphs = (plants.crossed, plants.outputs, plants.conditions, plants.bodies, plants.tags, plants.moves,
                 plants.more_tags)  # fmt: skip
    found = [each(model) for each in (of_values if values else of_values + of_graphs)]
    if not values:
        found += [each(model, run) for each in (plants.more_outputs, plants.sizes, rare_plants.rare)]
        found += [plants.documents(model, path), later_plants.later(model, path, feeds)]
    for place in chain.from_iterable(found):
        if not kinds or place.kind in kinds:
            by_kind[place.kind].append(place)
    chosen = []
    for kind, places in by_kind.items():
        # More than are wanted: some turn out not to be possible.
        random.Random(f"{path.name}{kind}").shuffle(places)
        chosen += places[: 6 * each]
    return chosen


def run_values(path: Path, feeds: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Values of a sound file, also of one in a type for which ONNX Runtime has no kernels."""
    model = load_onnx(path)
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.clear()
    model.graph.outputs.extend(by_name[name] for name in names)
    return dict(zip(names, open_session(model, folder=path.parent).run(names, feeds), strict=True))


class Planted(msgspec.Struct, frozen=True):
    """What became of a fault."""

    kind: str
    found: bool
    located: bool
    accused: int = 0
    """How many calls differ that have nothing to do with it."""
    same: str = ""
    """For one that computes the same values: the proof."""
    wrong: str = ""
    """For one that was missed, or not located: what and where."""


class Result(msgspec.Struct):
    """What became of the faults of a model."""

    model: str
    placements: list[Planted] = []
    alarm: bool = False
    """Whether the sound file was accused."""


def cells(those: Sequence[Planted]) -> str:
    """The figures of some faults, as columns."""
    found, located, accused, same = (
        sum(map(bool, of)) for of in zip(*((p.found, p.located, p.accused, p.same) for p in those), strict=True)
    )
    return f"{len(those)} | {found} | {located} | {accused} | {same}"


COLUMNS = "planted | found | located | with innocent calls accused | same values"


class Bench:
    """All placements in one model, and what became of them."""

    def __init__(self, folder: Path, each: int, kinds: set[str]) -> None:
        self.folder, self.each, self.kinds = folder, each, kinds
        self.result = Result("")
        self.sound: VerifyReport

    def model(self, name: str) -> Result | None:
        """Plant faults in one model; nothing if its packages are not there."""
        start = time.perf_counter()
        if not name.startswith(ZOO) and (missing := models.case(name.partition("+")[0]).missing):
            print(f"{name}: needs {', '.join(missing)}", file=sys.stderr, flush=True)
            return None
        self.result = Result(name)
        source = self.folder / f"{name.replace('+', '-').replace('/', '-')}.onnx"
        ways = name.split("+")[1:]
        tool = next((way for way in ways if way in TOOLS), None)
        if not source.exists():
            exported = source if tool is None else source.with_suffix(".exported.onnx")
            modelexport.export(*build(name), exported, dynamic="dynamic" in ways)
            if tool is not None:
                optimize_file(exported, tool, source)
        model, inputs = build(name)
        runs = ModelRuns(model)
        self.sound = verify(model, inputs, source, runs=runs)
        if not self.sound.agrees and not (tool or "").startswith("quantize"):
            self.result.alarm = True
            print(f"  FALSE ALARM: {name}", file=sys.stderr, flush=True)
        sound = load_onnx(source)
        names = [value.name or "" for value in sound.graph.inputs]
        feeds = under_names(inputs, names)
        done: Counter[str] = Counter()
        run = lambda wanted: run_values(source, feeds, wanted)  # noqa: E731
        for place in places_of(sound, source, self.each, self.kinds, run, feeds, values=tool is not None):
            if done[place.kind] < self.each and self.place(
                name, place, source, partial(verify, model, inputs, runs=runs), feeds
            ):
                done[place.kind] += 1
        told = f"{name}: {done.total()} placements of {len(done)} kinds, {time.perf_counter() - start:.0f} s"
        print(told, file=sys.stderr, flush=True)
        return self.result

    def place(self, name: str, place: Place, source: Path, ask: Callable[..., VerifyReport], feeds: Any) -> bool:
        """Plant a fault and ask for it; says whether it could be planted."""
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            path = Path(temporary, source.name)
            for suffix in SUFFIXES if place.documents else ():
                shutil.copyfile(source.with_suffix(suffix), path.with_suffix(suffix))
            faulty = load_onnx(source)
            forget_values(faulty)  # the text of their properties stays, which faults change
            if not place.plant(faulty, path):
                return False
            save_model(faulty, path, same_graph=place.documents)  # with the digests that were planted
            what = f"{name}: {place.kind}, {place.what}, in {sorted(place.expected)}"
            try:
                report = ask(path)
            except (UsageError, FileFormatError) as error:
                if not place.documents:
                    return False  # nobody can be fooled by it
                located = "*" in place.expected or any(one in str(error) for one in place.expected)
                return self.counted(place, found=True, located=located, wrong="" if located else f"{what}: {error}")
            except ModelExportError as error:
                return self.counted(place, found=False, located=False, wrong=f"{what}: {error}")
            noted = place.documents and any(claim not in self.sound.claims for claim in report.claims)
            is_found = report.verdict == "differ" and (self.sound.agrees or bool(differences(report, self.sound)))
            is_found = is_found or noted
            located = is_found and is_located(place, report, self.sound)
            innocent = accused(place, report, self.sound)
            top = report.diverging
            line = f"{what}: {report.verdict}, {top.address if top else None!r} {top.reason[:120] if top else ''}"
            if not is_found:
                is_tag = place.documents or place.tags or "given to" in place.kind
                difference = float("inf") if is_tag else largest_difference(source, path, feeds)
                same = f"{what}: largest difference {difference:.1e}" if difference < SAME else ""
                if is_tag and (moved := self.moved_by(name, place, source, feeds)):
                    same = f"{what}: it moves elements that {moved} gets or returns"
                if place.sizes and (held := sizes_that_hold(path, *build(name))):
                    same = f"{what}: true for all {held} sizes with which the model and the file run"
                if same:
                    return self.counted(place, found=False, located=False, same=same)
            wrong = ""
            if not located or innocent:
                what = "MISSED" if not is_found else f"accuses {', '.join(innocent)}" if innocent else "not located"
                wrong = f"{what}: {line}"
                print(f"  {wrong}", file=sys.stderr, flush=True)
            return self.counted(place, found=is_found, located=located, accused=len(innocent), wrong=wrong)

    def moved_by(self, name: str, place: Place, source: Path, feeds: Any) -> str:
        """The calls that a node was given to, if the node only moves elements that each of them gets or returns."""
        node = next((node for node in load_onnx(source).graph if node.name == place.node), None)
        if node is None or node.op_type not in plants.COPIES:
            return ""
        given = sorted(place.expected - plants.owners(node))
        value = node.outputs[0].name or ""
        moved = run_values(source, feeds, [value])[value]
        passed = all(any(same_elements(moved, one) for one in tensors_of(*build(name), call)) for call in given)
        return " and ".join(given) if passed else ""

    def counted(
        self, place: Place, *, found: bool, located: bool, accused: int = 0, same: str = "", wrong: str = ""
    ) -> bool:
        self.result.placements.append(Planted(place.kind, found, located, accused, same, wrong))
        return True


def table(results: Sequence[Result], *, by_model: bool) -> str:
    """The results as Markdown."""
    everything = [one for result in results for one in result.placements]
    by_kind: dict[str, list[Planted]] = defaultdict(list)
    for one in everything:
        by_kind[one.kind].append(one)
    models = {result.model: result.placements for result in results}
    rows = {"model": models} if by_model else {"kind of fault": by_kind, "model": models}
    lines = []
    for title, groups in rows.items():
        lines += [f"| {title} | {COLUMNS} |", "|---|---|---|---|---|---|"]
        lines += [f"| {key} | {cells(those)} |" for key, those in groups.items() if those]
        lines += [f"| **all** | {cells(everything)} |", ""]
    if by_model:
        return "\n".join(lines).strip()
    lines.append(f"{sum(result.alarm for result in results)} false alarms on {len(results)} sound files.")
    same = [one.same for one in everything if one.same]
    wrong = [one.wrong for one in everything if one.wrong]
    lines += ["", f"{len(same)} compute the same values:", *(f"- {one}" for one in same)]
    lines += ["", f"{len(wrong)} were missed, or not located:", *(f"- {one}" for one in wrong)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="?", default=",".join(MODELS))
    parser.add_argument("--exports", type=Path)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--by-model", action="store_true")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        kept = arguments.results or Path(temporary)
        for folder in filter(None, (kept, arguments.exports)):
            folder.mkdir(parents=True, exist_ok=True)
        kinds = set(filter(None, arguments.kinds.split(",")))
        for name in arguments.models.split(","):
            file = kept / f"{name.replace('/', '-')}.json"
            if not file.exists():
                result = Bench(arguments.exports or Path(temporary), arguments.each, kinds).model(name)
                if result is None:
                    continue
                file.write_bytes(msgspec.json.encode(result))
            results.append(msgspec.json.decode(file.read_bytes(), type=Result))
    print(table(results, by_model=arguments.by_model))
    return any(result.alarm or any(one.wrong for one in result.placements) for result in results)


if __name__ == "__main__":
    sys.exit(main())
