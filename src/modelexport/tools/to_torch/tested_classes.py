"""Modules of ``torch.nn`` that exporters write as many nodes, and in several ways: classes are found by running both.

The class that the file names is made with sizes and numbers that occur in the module. Its nodes are run on random
numbers in float64, on both sides of each number that occurs in the module, and it is the module if all results are the
same.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.limits import COMPARED_ELEMENTS
from modelexport.errors import UsageError
from modelexport.tools.to_torch.call_layout import CallLayout
from modelexport.tools.to_torch.expressions import code, literal, type_name
from modelexport.tools.to_torch.module_nodes import ModuleNode
from modelexport.traces.file_run import FileRun


class _TooLargeError(Exception):
    """More elements would be computed than the limit allows: the module is written out."""


_CLASSES = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


@dataclass(frozen=True)
class RecurrentCall:
    """How a call gives its tensors to the class, and what it takes of the result."""

    states: tuple[int, ...]
    """Which of the call's inputs are the first states."""
    slots: tuple[int, ...]
    """For each output of the call: 0 for the sequence, 1 for the last state, 2 for the last cell state."""
    has_cell: bool

    def arguments(self, inputs: Sequence[ast.expr]) -> list[ast.expr]:
        """The arguments of the class, from the call's inputs."""
        states = [inputs[index] for index in self.states]
        return [inputs[0], *([literal(tuple(states))] if len(states) > 1 else states)]

    def results(self, names: Mapping[int, str]) -> str:
        """The left side of the assignment of the results, from the names by slot."""
        shown = [names.get(slot, "_") for slot in range(3)]
        return f"{shown[0]}, ({shown[1]}, {shown[2]})" if self.has_cell else f"{shown[0]}, {shown[1]}"

    def result(self, call: ast.expr, slot: int) -> ast.expr:
        """One of the tensors that a call returns."""
        return code("x[0]" if not slot else f"x[1][{slot - 1}]" if self.has_cell else "x[1]", x=call)


def recurrent_class(layout: CallLayout, module: ModuleNode) -> tuple[str, dict[ModuleCall, RecurrentCall]] | None:
    """The call that makes an equal module, and how each call of it is written; ``None`` if none is equal."""
    if module.class_name not in _CLASSES or not module.is_from_torch or module.children or not module.running:
        return None
    if "weight_ih_l0" not in module.entries or "weight_hh_l0" not in module.entries:
        return None
    state, samples = _state(layout, module), dict[ModuleCall, Sample | None]()
    with suppress(_TooLargeError):
        samples = {group.call: _sample(layout, group.call) for group in module.running}
    if state is None or not samples:
        return None
    for options in _options(module):
        candidate = _CLASSES[module.class_name](**options).double()
        if candidate.state_dict().keys() != state.keys():
            return None
        candidate.load_state_dict(state)
        calls = {call: sample and _compared(candidate, sample) for call, sample in samples.items()}
        if all(call is not None for call in calls.values()):
            return _text(module.class_name, options), {key: call for key, call in calls.items() if call is not None}
    return None


def _options(module: ModuleNode) -> Iterator[dict[str, Any]]:
    layers = sum(
        name.startswith("weight_ih_l") and name.removeprefix("weight_ih_l").isdigit() for name in module.entries
    )
    known = {
        "input_size": module.entries["weight_ih_l0"].shape[1],
        "hidden_size": module.entries["weight_hh_l0"].shape[1],
        "num_layers": layers,
        "bias": "bias_ih_l0" in module.entries,
        "bidirectional": "weight_ih_l0_reverse" in module.entries,
    }
    kinds = ({}, {"nonlinearity": "relu"}) if module.class_name == "RNN" else ({},)
    for batch_first, kind in itertools.product((True, False), kinds):
        yield {**known, "batch_first": batch_first, **kind}


def _text(name: str, options: Mapping[str, Any]) -> str:
    defaults = {"num_layers": 1, "bias": True, "bidirectional": False, "batch_first": False}
    named = [
        f"{k}={v!r}" for k, v in options.items() if k not in ("input_size", "hidden_size") and v != defaults.get(k)
    ]
    return f"nn.{name}({', '.join([str(options['input_size']), str(options['hidden_size']), *named])})"


Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""What a class needs, and its other arguments by name."""


def tested_class(layout: CallLayout, module: ModuleNode, found: list[Arguments]) -> str | None:
    """The call that makes an equal module of one tensor; ``None`` if none is found.

    Args:
        found: The arguments of other modules of the class, which are tried first; the module's are added.
    """
    kind, calls = getattr(nn, module.class_name, None), [group.call for group in module.running]
    takes_and_gives_one = all(len(layout.inputs[call]) == len(layout.outputs[call]) == 1 for call in calls)
    if not (module.is_from_torch and takes_and_gives_one and calls and isinstance(kind, type)) or module.children:
        return None
    if kind is nn.Module:  # a root without a class: nothing to try
        return None
    (integers, floats), state = _numbers(layout, module), _state(layout, module)
    defaults = [each.default for each in inspect.signature(kind).parameters.values() if type(each.default) is float]
    crossed = sorted({abs(number) for number in (*floats, *defaults) if number and np.isfinite(number)})
    if state is None or len(crossed) > _TRIED_NUMBERS:
        return None
    quietly = warnings.catch_warnings(action="error"), torch.random.fork_rng(devices=()), torch.no_grad()
    with suppress(_TooLargeError), quietly[0], quietly[1], quietly[2]:
        tried = itertools.islice(itertools.chain(list(found), _arguments(kind, integers, floats)), _MOST_ARGUMENTS)
        for arguments, candidate in _fitting(layout, kind, state, tried, _sample(layout, calls[0])):
            if all(_gives(candidate, sample) for call in calls for sample in _samples(layout, call, crossed)):
                found.append(arguments)
                given, named = arguments
                return ast.unparse(code(f"nn.{module.class_name}(*given, **named)", given=given, named=named))
    return None


_MOST_ARGUMENTS = 300
"""How many arguments of a class are tried before a module is written out."""


def _fitting(
    layout: CallLayout, kind: type, state: Mapping[str, torch.Tensor], tried: Iterable[Arguments], sample: Sample | None
) -> Iterator[tuple[Arguments, nn.Module]]:
    """The modules of a class that compute a sample with a ``state_dict``, with their arguments.

    Those with entries or a result of other shapes are never in memory.
    """
    if sample is None:
        return
    shapes = {name: tensor.shape for name, tensor in state.items()}
    for given, named in tried:
        try:
            with torch.device("meta"):
                candidate = kind(*given, **named).double().eval()
                if next(candidate.children(), None) is not None:
                    return
                if {name: tensor.shape for name, tensor in candidate.state_dict().items()} != shapes:
                    continue
                if candidate(torch.empty(sample[0][0].shape, dtype=torch.float64)).shape != sample[1][0].shape:
                    continue
            candidate.load_state_dict(state, assign=True)
        except Exception:  # each class refuses arguments in its own way, and warns of others
            continue
        _spend(layout, sample[0][0].size)
        if _gives(candidate, sample):
            yield (given, named), candidate


def _gives(module: nn.Module, sample: Sample | None) -> bool:
    """Whether a module computes one tensor of another."""
    try:
        return sample is not None and _equal(module(torch.from_numpy(sample[0][0])).numpy(), sample[1][0])
    except Exception:  # as in ``_fitting``
        return False


def _arguments(kind: type, integers: Sequence[int], floats: Sequence[Any]) -> Iterator[Arguments]:
    """Arguments of a class: numbers where it needs some, and elsewhere its defaults but for at most two."""
    parameters = inspect.signature(kind).parameters.items()
    known = {name: each for name, each in parameters if name not in ("device", "dtype", "inplace")}
    needed = [name for name, each in known.items() if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
    types = {int: integers, float: floats}
    numbers = {name: types.get(each.annotation, [*integers, *floats]) for name, each in known.items()}
    others = {name: [not each.default] if isinstance(each.default, bool) else numbers[name]
              for name, each in known.items() if isinstance(each.default, int | float | None)}  # fmt: skip
    for count in range(3):
        for names in itertools.combinations(others, count):
            choices = [*(numbers[name] for name in needed), *(others[name] for name in names)]
            for values in itertools.product(*choices):
                yield values[: len(needed)], dict(zip(names, values[len(needed) :], strict=True))


def _numbers(layout: CallLayout, module: ModuleNode) -> tuple[list[int], list[Any]]:
    """The whole numbers that occur in a module, sizes among them, and the others in attributes and small constants."""
    nodes = [item for group in module.running for item in group.items if isinstance(item, ir.Node)]
    values = dict.fromkeys(value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None)
    found: list[Any] = [size for entry in module.entries.values() for size in entry.shape]
    found += [size for value in values for size in value.shape or () if isinstance(size, int)]
    for node in nodes:
        found += [each.value for each in node.attributes.values() if isinstance(each.value, int | float)]
    for array in map(layout.array, values):
        if array is not None and (array.dtype.kind == "f" or array.size <= _TRIED_NUMBERS):
            found += np.unique(array).tolist()
    distinct = dict.fromkeys(np.float32(each) if isinstance(each, float) else each for each in found)
    return [each for each in distinct if type(each) is int], [each for each in distinct if isinstance(each, np.float32)]


_TRIED_NUMBERS = 16
"""How many numbers of a module are tried as arguments."""

Sample = tuple[list[np.ndarray[Any, Any]], Sequence[Any]]
"""Random inputs of a call, and what its nodes compute of them."""


def _state(layout: CallLayout, module: ModuleNode) -> dict[str, torch.Tensor] | None:
    """The ``state_dict`` of a module in float64; ``None`` if the file does not have it, or if it has integers."""
    keys = {name: f"{module.path}.{name}".lstrip(".") for name in module.entries}
    arrays = {name: layout.entries.arrays.get(key) for name, key in keys.items()}
    if any(array is None or not ir.DataType.from_numpy(array.dtype).is_floating_point() for array in arrays.values()):
        return None
    return {name: torch.from_numpy(np.array(array, np.float64)) for name, array in arrays.items()}


def _samples(layout: CallLayout, call: ModuleCall, crossed: Sequence[float]) -> Iterator[Sample | None]:
    """What a call computes of normal numbers, of numbers from 0.001 to 100, and of some on both sides of others.

    Dynamic axes have other sizes, too, where the file takes them: what halves or pads differs at odd ones.
    """
    shape = list(layout.inputs[call][0].shape or ())
    sizes = [size if isinstance(size, int) else _DYNAMIC for size in shape]
    repeated = -(-_LEAST // max(1, math.prod(sizes)))
    for seed, number in enumerate((None, *(0.0, *crossed) * repeated)):
        yield _sample(layout, call, seed, number)
    others = range(_DYNAMIC + 1, 2 * _DYNAMIC + 1) if sizes != shape else ()
    yield from filter(None, (_sample(layout, call, dynamic=size) for size in others))


_LEAST = 64
"""How many elements of the samples are near each number, at least."""
_DYNAMIC = 6
"""The size of a dynamic axis, which halves and thirds divide."""


def _sample(
    layout: CallLayout, call: ModuleCall, seed: int = 0, crossed: float | None = None, dynamic: int = _DYNAMIC
) -> Sample | None:
    inputs, outputs = layout.inputs[call], layout.outputs[call]
    nodes = [item for item in layout.groups[call].items if isinstance(item, ir.Node)]
    _spend(layout, sum(_elements(value, dynamic) for value in (*inputs, *(each for n in nodes for each in n.outputs))))
    generator = np.random.default_rng(seed)
    arrays = [array for value in inputs if (array := _random(value, generator, dynamic, crossed)) is not None]
    if not inputs or len(arrays) < len(inputs):
        return None
    stored = layout.entries.arrays
    entries = {value: stored[key] for value, key in layout.entries.values.items() if key in stored}
    given = {**entries, **dict(zip(inputs, arrays, strict=True))}
    try:
        with np.errstate(all="ignore"):
            run = FileRun(layout.tagged.model, in_float64_for=type_name(inputs[0].dtype or ir.DataType.FLOAT))
            return arrays, run.values(outputs, given)
    except UsageError:
        return None


def _elements(value: ir.Value, dynamic: int) -> int:
    return math.prod(size if isinstance(size, int) else dynamic for size in value.shape or ())


def _spend(layout: CallLayout, elements: int) -> None:
    """Count elements before they are computed.

    Raises:
        _TooLargeError: They are more than the limit leaves.
    """
    if elements > min(layout.elements_left, COMPARED_ELEMENTS):
        raise _TooLargeError
    layout.elements_left -= elements


def _compared(candidate: nn.Module, sample: Sample) -> RecurrentCall | None:
    """How a call is written with a recurrent class; ``None`` if the class computes something else."""
    tensors, wanted = [torch.from_numpy(array) for array in sample[0]], sample[1]
    has_cell = isinstance(candidate, nn.LSTM)
    for states in itertools.permutations(range(1, len(tensors))):
        first = [tensors[index] for index in states]
        try:
            with torch.no_grad():
                result, last = candidate(tensors[0], *([tuple(first)] if len(first) > 1 else first))
        except (RuntimeError, ValueError, TypeError, AttributeError):  # of shapes that do not fit
            continue
        found = [result, *last] if has_cell else [result, last]
        slots = [next((s for s, each in enumerate(found) if _equal(each.numpy(), array)), None) for array in wanted]
        if None not in slots:
            return RecurrentCall(states, tuple(slot for slot in slots if slot is not None), has_cell)
    return None


def _random(value: ir.Value, generator: np.random.Generator, dynamic: int, crossed: float | None) -> Any:
    """Random numbers for a value: normal ones, of many sizes for 0, or near another number and its negative.

    Args:
        dynamic: The size of each dynamic axis.
    """
    if value.shape is None or value.dtype is None or not value.dtype.is_floating_point():
        return None
    shape = [size if isinstance(size, int) else dynamic for size in value.shape]
    normal = generator.standard_normal(shape)
    if crossed is None:
        return normal
    if not crossed:
        return normal * 10 ** generator.uniform(-3, 2, shape)
    return crossed * generator.choice((-1, 1), shape) * (1 + normal * 10 ** generator.uniform(-3, 0, shape))


def _equal(one: Any, other: Any) -> bool:
    """Whether two arrays are the same but for the rounding of a file's numbers to float32."""
    return isinstance(other, np.ndarray) and one.shape == other.shape and bool(np.allclose(one, other, 1e-7, 1e-9))
