"""Parts of a model's behavior that change from run to run, which an exported file cannot reproduce."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch
from torch import nn

from modelexport.pytorch.calls.traced_tree import as_exported, untouched
from modelexport.pytorch.inputs.variations import padded_at_the_end
from modelexport.pytorch.nested_tensors import Inputs, output_tensors, run_arguments
from modelexport.traces.tolerances import SAME_BUT_ROUNDING

ChangedRun = Literal["mask", "fused", "autocast"]
"""The differences between a run of users and the run of an export that may change outputs."""
Kind = Literal["random", "state", "buffer", ChangedRun, "no output", "empty output"]
_INSTEAD: Mapping[Kind, str] = {
    "random": "the file draws its own numbers, or uses those of the captured run: it cannot agree with PyTorch",
    "state": "the file always computes what a first run does; in PyTorch, the next run with the same inputs differs",
    "mask": "the file computes with the attention mask; PyTorch leaves out a mask that hides nothing, and computes "
    "something else then",
    "fused": "the file computes every position; PyTorch's fused operator of encoder layers gives zeros where a mask "
    "hides padding",
    "autocast": "the file computes in the types of the weights; torch.autocast rounds to half precision",
    "buffer": "the file always computes with the value that the buffer had before the run",
    "no output": "the file returns nothing",
    "empty output": "the file returns an empty tensor, or omits the output",
}
"""What a file does instead, by kind."""


class Unrepeatable(msgspec.Struct, frozen=True, kw_only=True):
    """Behavior of the model that a file cannot reproduce."""

    kind: Kind
    where: str
    """The name of an output or a buffer."""

    @property
    def instead(self) -> str:
        """What the file does instead."""
        return _INSTEAD[self.kind]


def find_unrepeatable(model: nn.Module, inputs: Inputs) -> list[Unrepeatable]:
    """Run a model twice on the same inputs, with different random numbers; its state is restored afterwards.

    If it draws numbers, and the outputs are the same, it runs with more of them: a choice between two may be the same.

    The second run leaves out attention masks that hide nothing, where transformers does. Some models compute otherwise
    then: without a mask, attention follows a flag of the module that disagrees with it. A file has the mask. Nor does a
    file have PyTorch's fused operator for a ``TransformerEncoder``, which gives zeros for what is padded.

    Returns:
        Outputs that differ or are empty, and buffers that a run changes. Empty if the model does not run.
    """
    behaviors: list[Unrepeatable] = []
    with untouched(model, masks=False):
        runs = _Runs(model, inputs)
        try:
            first = runs.run(1, as_exported(model))
            draws = runs.drew
            behaviors += [Unrepeatable(kind="buffer", where=name) for name in runs.changed_buffers()]
            plain = runs.run(2)
            second, again, without = plain, plain, dict[ChangedRun, dict[str, torch.Tensor]]()
            if not _all_same(first, plain):
                second, again = runs.run(2, as_exported(model)), runs.run(2, as_exported(model))
                without = {kind: runs.run(2, as_exported(model, but=kind)) for kind in get_args(ChangedRun)}
            hidden = _hidden(runs, inputs)
            other = second
            if draws and _all_same(first, second):
                other = _first_other(first, (runs.run(seed, as_exported(model)) for seed in _MORE_SEEDS))
        except Exception:  # capture reports why a model does not run
            return []
    if not first:
        behaviors.append(Unrepeatable(kind="no output", where="."))
    behaviors += [Unrepeatable(kind="empty output", where=name) for name, tensor in first.items() if not tensor.numel()]
    if not any(behavior.kind == "buffer" for behavior in behaviors):
        behaviors += [
            Unrepeatable(kind="random" if draws else "state", where=name)
            for name, tensor in first.items()
            if name not in other or not _same(tensor, other[name])
        ]
        behaviors += [
            Unrepeatable(kind=_another_way(name, tensor, without), where=name)
            for name, tensor in second.items()
            if name in plain and not _close(tensor, plain[name]) and name in again and _close(tensor, again[name])
        ]
        named = {behavior.where for behavior in behaviors}
        behaviors += [Unrepeatable(kind="fused", where=name) for name in hidden if name not in named]
    return behaviors


class _Runs:
    """Runs of a model, each from the same buffers and from a seed."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self._inputs = model, inputs
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
        self.drew = False
        """Whether the last run drew numbers."""

    def run(
        self, seed: int, around: AbstractContextManager[Any] | None = None, inputs: Inputs | None = None
    ) -> dict[str, torch.Tensor]:
        """The outputs of a run, by name."""
        for name, buffer in self.model.named_buffers():
            if name in self._buffers and self._buffers[name].shape == buffer.shape:
                buffer.copy_(self._buffers[name])
        args, kwargs = run_arguments(self._inputs if inputs is None else inputs)  # anew: a run may write into them
        with around or nullcontext():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            before = _generator_states(self.model)
            outputs = {name: tensor.clone() for name, tensor in output_tensors(self.model(*args, **kwargs))}
            self.drew = _generator_states(self.model) != before
        return outputs

    def changed_buffers(self) -> list[str]:
        """The buffers that the last run changed."""
        kept = self._buffers
        return [name for name, now in self.model.named_buffers() if name in kept and not _same(kept[name], now)]


def _another_way(
    name: str, right: torch.Tensor, without: Mapping[ChangedRun, Mapping[str, torch.Tensor]]
) -> ChangedRun:
    """The difference that explains an output: the first without which the export's run gives other numbers."""
    kinds = (kind for kind, outputs in without.items() if name not in outputs or not _close(right, outputs[name]))
    return next(kinds, "fused")


def _hidden(runs: _Runs, inputs: Inputs) -> list[str]:
    """The outputs that PyTorch's fused operator changes where a mask hides padding, as the example's may not do."""
    layers = nn.TransformerEncoderLayer | nn.TransformerEncoder
    if not any(isinstance(module, layers) for module in runs.model.modules()):
        return []
    padded = padded_at_the_end(inputs)
    fused, plain = runs.run(2, None, padded), runs.run(2, as_exported(runs.model), padded)
    return [name for name, tensor in plain.items() if name in fused and not _close(tensor, fused[name])]


def _first_other(
    first: Mapping[str, torch.Tensor], others: Iterable[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The outputs of the first run that differs from ``first``, or of the last run."""
    outputs: dict[str, torch.Tensor] = {}
    for outputs in others:
        if not _all_same(first, outputs):
            break
    return outputs


_MORE_SEEDS = range(3, 19)
"""So many that a choice between two is the same in all runs in one of 100,000 models."""


def _generator_states(model: nn.Module) -> list[Any]:
    """What changes when numbers are drawn: the states of the generators of torch, Python, NumPy and the model."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    of_model = [value for value in attributes if isinstance(value, torch.Generator)]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    states += [generator.get_state() for generator in of_model]
    return [random.getstate(), pickle.dumps(np.random.get_state()), *(state.numpy().tobytes() for state in states)]


def _all_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return all(name in second and _same(tensor, second[name]) for name, tensor in first.items())


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether no more than rounding is between two tensors."""
    if first.shape != second.shape or first.dtype != second.dtype or not first.is_floating_point():
        return _same(first, second)
    a, b = (torch.nan_to_num(tensor.double(), posinf=0.0, neginf=0.0) for tensor in (first, second))
    return bool((a - b).norm() <= SAME_BUT_ROUNDING * max(float(a.norm()), 1e-6))


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    same = tensor.shape == other.shape and tensor.dtype == other.dtype
    return same and bool(torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(other)))
