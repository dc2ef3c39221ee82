"""What both front ends need from a module: its arguments by name, its parameters with all their names."""

from __future__ import annotations

import inspect
import keyword
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from modelexport.pytorch.inputs.prepared_inputs import arguments_by_name, has_names_for, is_constant
from modelexport.pytorch.nested_tensors import (
    Inputs,
    NamedTensors,
    copied,
    input_tensors,
    output_tensors,
    run_arguments,
    tensors_in,
)
from modelexport.pytorch.private_torch import tree_leaves


def by_name(model: nn.Module, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs by name, so that the graph's inputs get those names; unchanged if they cannot be named.

    Unchanged as well if the model has hooks, which take arguments as they are given.
    """
    args, kwargs = run_arguments(inputs)
    if args and (model._forward_pre_hooks or model._forward_hooks or not has_names_for(model, args)):
        return args, kwargs
    named = arguments_by_name(model, inputs)
    # The model itself will raise a clearer error for arguments that do not fit.
    return ((), named) if len(named) == len(args) + len(kwargs) else (args, kwargs)


def with_parameters(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Wrap a function so that ``inspect.signature``, which exporters call, lists these parameters."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(forward)["__signature__"] = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return forward


def state_dict_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every ``state_dict`` key to all keys of the same tensor, itself included: tied parameters have several."""
    tensors = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for key, tensor in tensors.items():
        if torch.is_tensor(tensor):
            names.setdefault(id(tensor), []).append(key)
    return {key: tuple(keys) for keys in names.values() for key in keys}


PLAIN = (torch.Tensor, bool, int, float, str, type(None))
"""The types of arguments that ``torch.export`` takes."""
READABLE = 100_000
"""Elements of a constant whose values Python may read while a model is captured."""


def variable_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], constants: Collection[str] = ()
) -> NamedTensors:
    """The tensors in a model's arguments that are inputs of its graph: those of no argument that is a constant."""
    return [(name, tensor) for name, tensor in input_tensors(model, args, kwargs) if not is_constant(name, constants)]


class Bound(nn.Module):
    """What is captured in the place of a model: takes its variable inputs by name, returns the tensors in its result.

    A tensor that is a constant is made anew inside, so that Python can read its values while the model is captured.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], constants: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self.training = False
        self._arguments = args, dict(kwargs)
        variable = variable_inputs(model, args, kwargs, constants)
        ids = {id(tensor) for _, tensor in variable}
        self._fixed = [tensor for _, tensor in tensors_in((args, kwargs)) if id(tensor) not in ids]
        names = _identifiers([name for name, _ in variable])
        self.given = {name: tensor for name, (_, tensor) in zip(names, variable, strict=True)}
        """Name of a parameter of ``forward`` to the tensor of the example."""
        self.forward = with_parameters(self._run, names)

    def _run(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memo: dict[int, Any] = {id(self.given[name]): tensor for name, tensor in tensors.items()}
        memo |= {id(tensor): torch.ops.aten.lift_fresh_copy.default(tensor) for tensor in self._fixed}
        args, kwargs = copied(self._arguments, memo)
        return tuple(tensor for _, tensor in output_tensors(self.model(*args, **kwargs)))


def _identifiers(names: list[str]) -> list[str]:
    """Names as Python takes them, each once: ``batch.x`` is ``batch_x``."""
    identifiers: list[str] = []
    counts: Counter[str] = Counter()
    for name in names:
        plain = re.sub(r"\W", "_", name)
        plain = f"_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain
        identifiers.append(f"{plain}_{counts[plain]}" if counts[plain] else plain)
        counts[plain] += 1
    return identifiers


def only_tensors(module: nn.Module, args: Any, output: Any) -> tuple[torch.Tensor, ...] | None:
    """A forward hook: the tensors in a result that holds anything else, which ``torch.onnx`` cannot give out."""
    if torch.compiler.is_dynamo_compiling():
        return None
    if all(isinstance(leaf, torch.Tensor) or leaf is None for leaf in tree_leaves(output)):
        return None
    return tuple(tensor for _, tensor in output_tensors(output))
