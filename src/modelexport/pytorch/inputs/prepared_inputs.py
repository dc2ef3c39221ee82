"""Example inputs as a model is exported with them: what exporters leave out or compute is done here, once, for all.

A file is compared with PyTorch on the same inputs that it was captured with, so that they are prepared in one place:
``export``, ``verify`` and reference values all begin here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.pytorch.calls.module_tree_of_model import check_has_forward
from modelexport.pytorch.nested_tensors import (
    Inputs,
    arguments_of,
    input_tensors,
    run_arguments,
    tensors_in,
    with_each_tensor_once,
)
from modelexport.pytorch.pretrained import is_pretrained

AUTO = "auto"
"""A word in the place of an argument's name: all arguments that must be constants for a capture."""
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Prepared:
    """The inputs that a model is captured and run with."""

    inputs: Inputs
    constants: Mapping[str, str]
    """Arguments that are constants of the file, with their values: those that are not tensors, and those named."""
    notes: tuple[str, ...] = ()
    """What was left out or added, a line each."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """Inputs that were computed from the others."""


def prepare_inputs(model: nn.Module, inputs: Inputs | torch.Tensor, constants: Collection[str] = ()) -> Prepared:
    """Bring example inputs into the form in which exporters take them. They are not changed themselves.

    Args:
        constants: Arguments whose values a file keeps, by the names of ``forward``'s parameters or of tensors in them.

    Raises:
        InputsError: The model has no ``forward``.
        UsageError: There is no such argument.
    """
    check_has_forward(model)
    used, notes, added = _as_transformers_has_them(model, with_each_tensor_once(arguments_of(inputs)))
    bound = arguments_by_name(model, used)
    if isinstance(used, Mapping) and bound.keys() == used.keys():
        used = bound  # in the order of the parameters, which is that of a graph's inputs
    elif constants and not isinstance(used, Mapping) and has_names_for(model, used):
        used = bound  # a file without some of the inputs does not know the others by their order
    known = dict.fromkeys([*bound, *(name for name, _ in input_tensors(model, *run_arguments(used)))])
    for name in constants:
        if name != AUTO and name not in known:
            has = ", ".join(dict.fromkeys(bound)) or "none by name"
            raise UsageError(
                f"the model is given no argument {name}{suggest(name, list(known))} that could be a constant: {has}"
            )
    kept = {
        name: _shown(value)
        for name, value in bound.items()
        if value is not None and (name in constants or not any(True for _ in tensors_in(value)))
    }
    kept |= {name: _shown(tensor) for name, tensor in tensors_in(bound) if name in constants}
    return Prepared(used, kept, tuple(notes), added)


def arguments_by_name(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The arguments of a run under the names of ``forward``'s parameters, as far as they have names."""
    args, kwargs = run_arguments(inputs)
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the run says it better
        return dict(kwargs)
    kind = inspect.Parameter
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is kind.VAR_KEYWORD:
            named.update(value)
        elif signature.parameters[name].kind is not kind.VAR_POSITIONAL:
            named[name] = value
    return named


def has_names_for(model: nn.Module, args: Sequence[Any]) -> bool:
    """Whether ``forward`` takes these positional arguments by name as well."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())[: len(args)]
    except (TypeError, ValueError):  # it has no signature
        return False
    return len(parameters) == len(args) and all(
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters
    )


def is_constant(name: str, constants: Collection[str]) -> bool:
    """Whether a tensor is, or is in, an argument that is a constant."""
    return any(name == constant or name.startswith(f"{constant}.") for constant in constants)


def kept_tensors(model: nn.Module, inputs: Inputs, constants: Collection[str]) -> frozenset[str]:
    """The names of the tensors in inputs that are constants of a file, as :func:`tensors_in` names them."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    kept = {id(tensor) for name, tensor in input_tensors(model, args, kwargs) if is_constant(name, constants)}
    return frozenset(name for name, tensor in tensors_in(inputs) if id(tensor) in kept)


def _as_transformers_has_them(model: nn.Module, inputs: Inputs) -> tuple[Inputs, list[str], dict[str, Any]]:
    """Without labels, and with what its exporter computes from the inputs' values before it captures a model."""
    named = arguments_by_name(model, inputs) if is_pretrained(model) else {}
    if not named:
        return inputs, [], {}
    from transformers.exporters.utils import precompute_export_inputs

    labels = [name for name in _LABELS if named.get(name) is not None]
    used = {name: value for name, value in named.items() if name not in labels}
    before = dict(used)
    try:
        with torch.no_grad(), collected():
            precompute_export_inputs(model, used)
    except Exception:  # the capture does the same, and says where it fails
        used = before
    notes = [f"{name} left out: transformers does not export the computation of a loss" for name in labels]
    added = [name for name in used if name not in before]
    if added:
        them = "them" if len(added) > 1 else "it"
        how = "transformers.exporters.utils.precompute_export_inputs(model, inputs)"
        takes = f"the file takes {them} as well, and {how} adds {them} to other inputs"
        notes.append(f"{', '.join(added)} computed from the other inputs: {takes}")
    changed = [name for name in before if used.get(name) is not before[name]]
    notes += [f"{name} kept as it is: the file holds its value" for name in changed]
    given: Inputs = used if labels or added or changed else inputs
    return given, notes, {name: used[name] for name in added}


_LABELS = ("labels", "future_values")
"""The arguments that transformers' exporter refuses."""


def _shown(value: object) -> str:
    """A value in a few words that are the same in every process."""
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {value.flatten()[:8].tolist()}"
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(_shown, value))}]"
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{key}: {_shown(part)}' for key, part in value.items())}}}"
    elif isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))):
        text = repr(value)
    else:
        text = getattr(value, "__name__", type(value).__name__)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
