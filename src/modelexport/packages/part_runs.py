"""Runs the parts of a package one after the other, and a part with a state step by step, beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from modelexport.errors import ModelExportError
from modelexport.files.onnx_models import load_onnx
from modelexport.format.documents import Value
from modelexport.packages.model_parts import ModelPart
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.inputs.named_inputs import under_names
from modelexport.pytorch.inputs.other_sizes import resized
from modelexport.pytorch.inputs.prepared_inputs import prepare_inputs
from modelexport.pytorch.nested_tensors import as_array, copied, tensors_in
from modelexport.runtime.sessions import input_names, open_session, run_session
from modelexport.traces.array_differences import Difference, compare_arrays
from modelexport.traces.tolerances import PIPELINE_RESULT

NEXT = "next."
"""What comes before the name of an output that has the name of an input of its part."""
_STEPS = 3


class PartRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a part returned in one run beside what PyTorch returned."""

    part: str
    step: int
    """The number of the step, from 0; 0 for a part without a state."""
    sequence: str
    """Whether it is the example, or inputs of another length, which begin with the first state again."""
    outputs: list[Difference]


def state_of(
    inputs: Sequence[Value], outputs: Sequence[Value], asked: Mapping[str, str] | bool, elsewhere: set[str]
) -> dict[str, str]:
    """The outputs of a part that it takes again, and the inputs that take them.

    An output belongs to the input of its name. If no output has one, each belongs to the input of its type that has
    most of its sizes.

    Args:
        asked: The pairs that are known, or whether there are any.
        elsewhere: Names of inputs that other parts make, and of outputs that other parts take.
    """
    if not asked:
        return {}
    pairs = dict(asked) if isinstance(asked, Mapping) else {}
    names = {_plain(value.name): value.name for value in inputs}
    for output in outputs:
        if output.name.startswith(NEXT) and (name := names.get(_plain(output.name.removeprefix(NEXT)))) is not None:
            pairs.setdefault(output.name, name)
    if pairs:
        return pairs
    free = [value for value in inputs if value.name not in {*pairs.values(), *elsewhere}]
    left = [value for value in outputs if value.name not in {*pairs, *elsewhere}]
    alike = [(out, taken) for out in left for taken in free if out.dtype == taken.dtype and _may_be(out, taken)]
    for out, taken in sorted(alike, key=lambda pair: -_equal_sizes(*pair)):  # stable: in order where alike as much
        if out.name not in pairs and taken.name not in pairs.values():
            pairs[out.name] = taken.name
    return pairs


def _plain(name: str) -> str:
    """A name as exporters write it: ``cache.0`` is ``cache_0``."""
    return name.replace(".", "_")


def _may_be(first: Value, second: Value) -> bool:
    """Whether two shapes can be equal: a dynamic size may have any value."""
    sizes = list(zip(first.shape, second.shape, strict=False))
    fixed = [(a, b) for a, b in sizes if isinstance(a, int) and isinstance(b, int)]
    return len(first.shape) == len(second.shape) and all(a == b for a, b in fixed)


def _equal_sizes(first: Value, second: Value) -> int:
    return sum(a == b for a, b in zip(first.shape, second.shape, strict=True))


def compare_chain(parts: Sequence[ModelPart], files: Mapping[str, Path]) -> Iterator[PartRun]:
    """Run the parts in their order; each takes what earlier ones computed, as the parts in PyTorch do."""
    computed: dict[str, np.ndarray] = {}
    for part in parts:
        session = open_session(files[part.name], optimized=True)
        names = input_names(session)
        feeds = _feeds(part, part.inputs, names) | {name: computed[name] for name in names if name in part.taken}
        results = run_session(session, feeds)
        yield PartRun(part=part.name, step=0, sequence="example", outputs=_compared(_right(part, part.inputs), results))
        computed |= results


def compare_steps(part: ModelPart, state: Mapping[str, str], file: Path) -> Iterator[PartRun]:
    """Run a part with a state over several steps, twice: with the example inputs, and with others of another length.

    Each step has other numbers. The second run begins with the first state again, in the same session.
    """
    session, model = open_session(file, optimized=True), load_onnx(file)
    names = input_names(session)
    own = [value for value in model.graph.inputs if value.name not in state.values()]
    symbols = {str(size) for value in own for size in value.shape or () if not isinstance(size, int)}
    longer = resized(part.inputs, model, symbols=symbols)
    sequences = {"example": part.inputs} | ({"another length": longer} if longer is not part.inputs else {})
    for name, first in sequences.items():
        inputs: Any = first
        feeds = _feeds(part, inputs, names)
        for step in range(_STEPS):
            try:
                right = _right(part, inputs)
            except Exception:
                if name == "example":
                    raise
                break  # the model takes no such length
            results = run_session(session, feeds)
            yield PartRun(part=part.name, step=step, sequence=name, outputs=_compared(right, results))
            computed = {_plain(name): tensor for name, tensor in right.items()}
            new = {_plain(state[output]): computed[_plain(output)] for output in state if _plain(output) in computed}
            inputs = _next_inputs(first, new, step)
            feeds = _feeds(part, inputs, names) | {state[output]: results[output] for output in state}


def _feeds(part: ModelPart, inputs: Any, names: Sequence[str]) -> dict[str, Any]:
    """The arrays that a file takes: inputs, and what an exporter computes ahead from them."""
    return under_names(prepare_inputs(part.model, inputs).inputs, names)


def _right(part: ModelPart, inputs: Any) -> dict[str, torch.Tensor]:
    with untouched(part.model), torch.no_grad():
        outputs: dict[str, torch.Tensor] = part.model(**copied(dict(inputs)))
    return outputs


def _compared(right: Mapping[str, torch.Tensor], actual: Mapping[str, np.ndarray]) -> list[Difference]:
    """The outputs of both; integers are equal, other numbers as far apart as the rounding of a chain allows."""
    plain = {_plain(name): array for name, array in actual.items()}
    differences = []
    for name, tensor in right.items():
        array = plain.get(_plain(name))
        if array is None:
            differences.append(Difference(name=name, status="not compared", reason="the file does not return it"))
            continue
        differences.append(compare_arrays(name, as_array(tensor), array, allowed=PIPELINE_RESULT))
    return differences


def _next_inputs(first: Any, state: Mapping[str, torch.Tensor], step: int) -> Any:
    """The inputs of the next step: the new state, and the example's other inputs, every second time backwards."""
    changed: dict[int, Any] = {}
    for name, tensor in tensors_in(first):
        new = state.get(_plain(name))
        if new is None:
            new = tensor.flip(-1) if step % 2 == 0 and tensor.ndim > 1 else tensor.clone()
        changed[id(tensor)] = new
    return copied(first, changed)


def first_fault(runs: Iterator[PartRun]) -> str:
    """What differs first in some runs, as text; empty if nothing does."""
    try:
        for run in runs:
            for difference in run.outputs:
                if difference.status == "differ":
                    where = f" in step {run.step} of {run.sequence}" if run.step or run.sequence != "example" else ""
                    return f"{run.part}: {difference.name} differs{where} ({difference.reason})"
    except ModelExportError as error:
        return str(error)
    return ""
