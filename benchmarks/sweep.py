"""Many models through `modelexport.export` and through the bare `torch.onnx.export(dynamo=True)`, side by side.

    OMP_NUM_THREADS=1 python benchmarks/sweep.py [FAMILY ...] [--models NAME,...] [--ways ours,bare] [--seconds N]
                                                 [--results FILE.jsonl] [--write] [--untried]

The models are those of `tests/zoo`, with random weights. Each export runs in a process of its own, which is ended after
N seconds. A file counts as loaded if ONNX Runtime opens it, and as agreeing if it computes PyTorch's outputs, judged
here with NumPy alone: the norm of the difference is at most a thousandth of the output's, or, of a random model, twice
that between two runs of PyTorch. What was found is appended to FILE, and a model and way that are in it are not run
again, so that the table can be made in slices. `--write` puts the table into
`docs/evidence/sweep.md`. All families take about an hour. `--untried` takes types of transformers that no test,
benchmark or page names, shrunk, instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from outcomes import in_slices, isolated, write_table  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "sweep.md"
BEGIN = "<!-- figures: sweep.py -->"
WAYS = ("ours", "bare")
CLOSE = 1e-3


@dataclasses.dataclass
class Outcome:
    """What a way of exporting gave for a model."""

    family: str
    name: str
    way: str
    exported: bool = False
    loads: bool = False
    agrees: bool = False
    tagged: bool = True
    """Every node has an owner, none of them inferred."""
    intact: bool = True
    """The model is as it was."""
    frontend: str = ""
    reason: str = ""
    seconds: float = 0.0


def tensors(value: Any, name: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nested value with the way to each."""
    if isinstance(value, torch.Tensor):
        yield name, value
    if isinstance(value, (torch.Tensor, type, nn.Module)) or id(value) in around:
        return
    inside: Iterator[tuple[Any, Any]] | Any = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    elif hasattr(value, "__dict__"):
        inside = vars(value).items()
    for key, part in inside:
        yield from tensors(part, f"{name}_{key}".lstrip("_"), (*around, id(value)))


def feeds_of(model: nn.Module, inputs: Any, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of a model's inputs under the names that a file has for them."""
    given = {name.replace(".", "_"): tensor for name, tensor in tensors(named(model, inputs))}
    plain = [name.removeprefix("input.").replace(".", "_") for name in wanted]
    if set(plain) <= set(given):
        return {name: given[key] for name, key in zip(wanted, plain, strict=True)}
    if len(wanted) == len(given):
        return dict(zip(wanted, given.values(), strict=True))
    raise ValueError(f"the file takes {', '.join(wanted)}, and the model {', '.join(given)}")


def without_losses(case: Any) -> tuple[nn.Module, Any]:
    """A model and its inputs without labels: transformers exports no losses, and we say so."""
    model, inputs = case()
    if hasattr(model, "config") and isinstance(inputs, Mapping):
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "future_values")}
    return model, inputs


def judge(outcome: Outcome, path: Path, model: nn.Module, inputs: Any) -> None:
    """Run a file beside the model."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outcome.loads = True
    feeds = feeds_of(model, inputs, [value.name for value in session.get_inputs()])
    actual = session.run(None, {name: as_numpy(tensor) for name, tensor in feeds.items()})
    expected, again = (made(model, inputs, seed) for seed in range(2))
    if len(actual) != len(expected):
        raise ValueError(f"PyTorch gives {len(expected)} tensors, the file {len(actual)}")
    for one, same, other in zip(expected, again, actual, strict=True):
        # Of a random model no file is nearer to PyTorch than PyTorch is to itself.
        if one.shape != other.shape or not (close(one, other) or 2 * distance(one, same) >= distance(one, other) > 0):
            raise ValueError(f"{one.dtype}{list(one.shape)} is {other.dtype}{list(other.shape)} and not as in PyTorch")
    outcome.agrees = True


def made(model: nn.Module, inputs: Any, seed: int) -> list[Any]:
    """What the model returns, with the random numbers of a seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return [as_numpy(one) for _, one in tensors(model(**inputs) if isinstance(inputs, Mapping) else model(*inputs))]


def distance(one: Any, other: Any) -> float:
    """The norm of the difference of two arrays; none of integers, or of numbers that are not finite."""
    if one.shape != other.shape or one.dtype.kind not in "fc":
        return 0.0
    found = float(np.linalg.norm((one - other).astype(np.float64)))
    return found if np.isfinite(found) else 0.0


def close(one: Any, other: Any) -> bool:
    if one.dtype.kind not in "fc":
        return bool(np.mean(one != other) <= CLOSE) if one.size else True
    if not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return False
    finite = np.isfinite(one)
    difference = np.linalg.norm((one - other)[finite].astype(np.float64))
    return bool(difference <= CLOSE * max(float(np.linalg.norm(one[finite].astype(np.float64))), 1e-3))


def as_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.resolve_conj().numpy()


def named(model: nn.Module, inputs: Any) -> Any:
    """Positional inputs under the names of ``forward``'s arguments, where it has such."""
    if isinstance(inputs, Mapping):
        return inputs
    import inspect

    with contextlib.suppress(TypeError, ValueError):
        bound = inspect.signature(model.forward).bind(*inputs)
        if not any(isinstance(value, tuple) and value is not inputs for value in bound.arguments.values()):
            return dict(bound.arguments)
    return list(inputs)


def by_ours(outcome: Outcome, case: Any, path: Path) -> None:
    from modelexport import export

    model, inputs = case()
    before = {key: value.clone() for key, value in state(model).items()}
    held = {name: {**vars(module)} for name, module in model.named_modules()}
    try:
        result = export(model, inputs, path, verify=True, **({"constants": case.constants} if case.constants else {}))
    finally:
        after = state(model)
        outcome.intact = list(after) == list(before) and all(torch.equal(before[key], after[key]) for key in before)
        for name, module in model.named_modules():
            now = vars(module)
            outcome.intact &= now.keys() == held[name].keys() and all(now[k] is held[name][k] for k in now)
    outcome.exported = True
    outcome.frontend = result.hierarchy.settings.frontend
    outcome.tagged = not (result.coverage.inferred or result.coverage.untagged)
    if result.verified is not None and not result.verified.agrees:
        outcome.reason = f"verify: {result.verified.outputs[0].reason or 'a call differs'}"
    judge(outcome, path, *without_losses(case))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}


def by_bare(outcome: Outcome, case: Any, path: Path) -> None:
    model, inputs = case()
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    program = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))
    outcome.exported = True
    judge(outcome, path, *case())


def attempt(case: Any, way: str) -> Outcome:
    """One export, judged."""
    outcome = Outcome(case.family, case.name, way)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            {"ours": by_ours, "bare": by_bare}[way](outcome, case, Path(folder) / "m.onnx")
    except BaseException as error:
        last: BaseException = error
        while way == "bare" and last.__cause__ is not None:
            last = last.__cause__
        outcome.reason = f"{type(last).__name__}: {' '.join(str(last).split())[:600]}"
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def run(case: Any, way: str, seconds: float) -> Outcome:
    made, reason = isolated(partial(attempt, case, way), seconds)
    return made or Outcome(case.family, case.name, way, reason=reason)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown: figures by family, then every model that a way does not export rightly."""
    families = list(dict.fromkeys(outcome.family for outcome in outcomes))
    lines = [
        "| family | models | ours: exported | loads | agrees | verified | tagged | bare: exported | loads | agrees |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for family in [*families, None]:
        of = {way: [o for o in outcomes if o.way == way and family in (o.family, None)] for way in WAYS}
        ours, bare = of["ours"], of["bare"]
        cells = [
            family or "all", len(ours),
            *(sum(getattr(o, field) for o in ours) for field in ("exported", "loads", "agrees")),
            sum(o.agrees and not o.reason for o in ours),
            sum(o.exported and o.tagged for o in ours),
            *(sum(getattr(o, field) for o in bare) for field in ("exported", "loads", "agrees")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| model | way | exported | why it does not agree |", "|---|---|---|---|"]
    lines += [
        f"| {o.family}: {o.name} | {o.way} | {'yes' if o.exported else 'no'} | {short(o)} |"
        for o in sorted(outcomes, key=lambda o: (families.index(o.family), o.name, o.way != "ours"))
        if not o.agrees or o.reason
    ]
    return "\n".join(lines)


def line_of(outcome: Outcome) -> str:
    """An outcome while the sweep runs: exported, loads, agrees, tagged."""
    facts = (outcome.exported, outcome.loads, outcome.agrees, outcome.tagged)
    marks = "".join(mark if fact else "-" for mark, fact in zip("elat", facts, strict=True))
    changed = "" if outcome.intact else "CHANGED "
    what = f"{outcome.family}: {outcome.name} {outcome.frontend}"
    return f"{outcome.seconds:6.1f} {outcome.way} {marks} {what} {changed}{outcome.reason}"


def short(outcome: Outcome) -> str:
    text = re.sub(r"/(?:[\w.+-]+/)+", "", outcome.reason).replace("|", "\\|").replace("<", "\\<")
    return text if len(text) <= 160 else f"{text[:157]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--models", default="")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--untried", action="store_true", help="types of transformers that nothing else names, instead")
    options = parser.parse_args()
    if options.untried:
        from untried_types import cases
    else:
        from zoo import cases
    works = [
        ((case.family, case.name, way), partial(run, case, way, options.seconds))
        for case in cases()
        if not options.families or case.family in options.families
        if not options.models or case.name in options.models.split(",")
        for way in options.ways.split(",")
    ]
    made = in_slices(options.results, Outcome, works, line_of)
    outcomes = [outcome for outcome in made if not outcome.reason.startswith("UnbuiltError")]
    print(table(outcomes))
    if options.write:
        write_table(PAGE, BEGIN, table(outcomes))


if __name__ == "__main__":
    import modelexport.exporting.pipeline
    import modelexport.verify.verify  # noqa: F401

    main()
