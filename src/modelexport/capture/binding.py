"""A model as a function of tensors: what else its ``forward`` takes is bound, and so are the inputs that are constants.

``torch.export`` takes nested lists and dictionaries of tensors and plain numbers, and refuses every other object among
the inputs and outputs. A model that takes such is captured inside a module that takes its tensors one by one.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from modelexport.capture.arguments import with_parameters
from modelexport.pytorch.private_torch import tree_leaves
from modelexport.pytorch.values import NamedTensors, copied, input_tensors, output_tensors, tensors_in

_PLAIN = (torch.Tensor, bool, int, float, str, type(None))
READABLE = 100_000
"""Elements of a constant whose values Python may read while a model is captured."""


def needs_binding(args: tuple[Any, ...], kwargs: Mapping[str, Any], constants: Collection[str] = ()) -> bool:
    """Whether ``torch.export`` would refuse these arguments, or some of them are constants."""
    return bool(constants) or not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves((args, kwargs)))


def variable_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], constants: Collection[str] = ()
) -> NamedTensors:
    """The tensors in a model's arguments that are inputs of its graph: those of no argument that is a constant."""
    return [(name, tensor) for name, tensor in input_tensors(model, args, kwargs) if not _is_constant(name, constants)]


def _is_constant(name: str, constants: Collection[str]) -> bool:
    return any(name == constant or name.startswith(f"{constant}.") for constant in constants)


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
        given = variable_inputs(model, args, kwargs, constants)
        ids = {id(tensor) for _, tensor in given}
        self._fixed = [tensor for _, tensor in tensors_in((args, kwargs)) if id(tensor) not in ids]
        names = _identifiers([name for name, _ in given])
        self.given = {name: tensor for name, (_, tensor) in zip(names, given, strict=True)}
        """Name of a parameter of ``forward`` to the tensor of the example."""
        self.forward = with_parameters(self._run, names)

    def _run(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memo: dict[int, Any] = {id(self.given[name]): tensor for name, tensor in tensors.items()}
        memo |= {id(tensor): torch.ops.aten.lift_fresh_copy.default(tensor) for tensor in self._fixed}
        args, kwargs = copied(self._arguments, memo)
        return tuple(tensor for _, tensor in output_tensors(self.model(*args, **kwargs)))


def _identifiers(names: list[str]) -> list[str]:
    """Names as Python takes them, each once: ``batch.x`` is ``batch_x``."""
    found: list[str] = []
    counts: Counter[str] = Counter()
    for name in names:
        plain = re.sub(r"\W", "_", name)
        plain = f"_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain
        found.append(f"{plain}_{counts[plain]}" if counts[plain] else plain)
        counts[plain] += 1
    return found


def only_tensors(module: nn.Module, args: Any, output: Any) -> tuple[torch.Tensor, ...] | None:
    """A forward hook: the tensors in a result that holds anything else, which ``torch.onnx`` cannot give out."""
    if torch.compiler.is_dynamo_compiling():
        return None
    if all(isinstance(leaf, torch.Tensor) or leaf is None for leaf in tree_leaves(output)):
        return None
    return tuple(tensor for _, tensor in output_tensors(output))
