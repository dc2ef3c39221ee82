"""Modules that are ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``: what is assumed of one is tested by running both.

Exporters write a recurrent layer as many nodes, and in several ways. So the class is made with the sizes that its
entries have, its nodes are run on random numbers in float64, and it is the module if all results are the same.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.torch_source.call_layout import CallLayout
from modelexport.torch_source.expressions import code, literal
from modelexport.torch_source.module_nodes import ModuleNode
from modelexport.traces.file_run import FileRun

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
        """What stands before the equals sign: the names by slot."""
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
    keys = {name: f"{module.path}.{name}".lstrip(".") for name in module.entries}
    arrays = {name: layout.entries.arrays.get(key) for name, key in keys.items()}
    if any(array is None or array.dtype != np.float32 for array in arrays.values()):
        return None
    state = {name: torch.from_numpy(np.array(array, np.float64)) for name, array in arrays.items()}
    for options in _options(module):
        candidate = _CLASSES[module.class_name](**options).double()
        if candidate.state_dict().keys() != state.keys():
            return None
        candidate.load_state_dict(state)
        calls = {group.call: _compared(layout, candidate, group.call) for group in module.running}
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


def _compared(layout: CallLayout, candidate: nn.Module, call: ModuleCall) -> RecurrentCall | None:
    """How a call is written with a class; ``None`` if the class computes something else."""
    inputs, outputs = layout.inputs[call], layout.outputs[call]
    generator = np.random.default_rng(0)
    arrays = [_random(value, generator) for value in inputs]
    if not inputs or any(array is None for array in arrays):
        return None
    entries = {
        value: layout.entries.arrays[key]
        for value, key in layout.entries.values.items()
        if key in layout.entries.arrays
    }
    given = {**entries, **dict(zip(inputs, arrays, strict=True))}
    try:
        wanted = FileRun(layout.tagged.model, in_float64_for="float32").values(outputs, given)
    except UsageError:
        return None
    tensors = [torch.from_numpy(array) for array in arrays if array is not None]
    has_cell = isinstance(candidate, nn.LSTM)
    for states in itertools.permutations(range(1, len(inputs))):
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


def _random(value: ir.Value, generator: np.random.Generator) -> Any:
    """Random numbers for a value; a dynamic axis has three elements."""
    if value.shape is None or value.dtype != ir.DataType.FLOAT:
        return None
    return generator.standard_normal([size if isinstance(size, int) else 3 for size in value.shape])


def _equal(one: Any, other: Any) -> bool:
    return isinstance(other, np.ndarray) and one.shape == other.shape and bool(np.allclose(one, other, 0, 1e-9))
