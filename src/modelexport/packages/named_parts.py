"""Parts that a person names: methods of a model or of a module in it, and functions of the model.

Each part is the whole model with another ``forward``, so that modules and entries keep their names in every part.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line, first_few, plural, suggest
from modelexport.errors import InputsError, UsageError
from modelexport.packages.model_parts import ModelPart, with_forward
from modelexport.packages.part_runs import NEXT
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.inputs.generated_inputs import describe, generate_inputs
from modelexport.pytorch.nested_tensors import as_array, copied, tensors_in, with_each_tensor_once

FORWARD = "forward"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One graph of a package: what it runs, and how its inputs and outputs are made and named."""

    method: str | Callable[..., Any] = FORWARD
    """A method of the model (``encode_image``) or of a module in it (``encoder.step``); a module (``encoder``), whose
    ``forward`` runs; or a function whose first argument is the model."""
    inputs: Mapping[str, Any] | None = None
    """Example inputs by argument. Those that are missing are outputs of earlier parts with the same name, or made."""
    outputs: Sequence[str] | None = None
    """Names of what it returns, if this is a tensor or a tuple; by default the fields of what it returns, or its own
    name."""
    described: Mapping[str, Any] | None = None
    """Descriptions of example inputs, as ``--inputs`` takes them: ``{"x": {"dtype": "float32", "shape": [2, 80]}}``."""
    state: bool | Mapping[str, str] = False
    """Whether it takes some of its outputs again in the next run: all that have the name, or the type and the shape, of
    an input that no other part makes; or the names of such outputs to those of the inputs."""
    dynamic: bool = True
    """Whether its axes stay dynamic; otherwise they have the sizes of the example."""


Method = str | Callable[..., Any]
PartLike = Part | Method
"""A part, or only what it runs."""


def as_part(part: PartLike) -> Part:
    """A part with the defaults of :class:`Part` for all but what it runs."""
    return part if isinstance(part, Part) else Part(method=part)


def named_parts(model: nn.Module, parts: Mapping[str, PartLike], directory: Path | None = None) -> Iterator[ModelPart]:
    """The parts of a model in their order, each with example inputs that it ran with.

    Args:
        directory: The model's folder, whose configurations tell sizes of inputs.

    Raises:
        InputsError: A method does not exist, an input is missing or unknown, a part fails with its inputs, or returns
            no tensors. The message has the signature.
    """
    earlier: dict[str, torch.Tensor] = {}
    for name, given in parts.items():
        part = as_part(given)
        path, run = _resolved(model, part.method)
        runs = _with_signature(with_forward(model, partial(_run, name, path, run, part.outputs)), run)
        own = {*(part.inputs or {}), *(part.described or {})}
        known = {key: value for key, value in earlier.items() if key not in own}
        inputs = _inputs(name, part, runs, known, directory)
        earlier |= _outputs(name, runs, inputs)
        taken = frozenset(inputs).intersection(known)
        yield ModelPart(name, runs, inputs, module=path, taken=taken, dynamic=part.dynamic)


def method_name(part: PartLike) -> str:
    """The method that a part runs as a text that finds it again; empty for a function."""
    method = as_part(part).method
    return method if isinstance(method, str) else ""


def _resolved(model: nn.Module, method: Method) -> tuple[str, Callable[..., Any]]:
    """The path of the module that a method belongs to, and the bound method; a function belongs to the root."""
    if not isinstance(method, str):
        return "", method
    module, words = model, method.split(".") if method else []
    path: list[str] = []
    while words and isinstance(inside := getattr(module, words[0], None), nn.Module):
        module, path, words = inside, [*path, words[0]], words[1:]
    name = ".".join(words) or FORWARD
    found = getattr(module, name, None)
    if not callable(found):
        where = f"{type(model).__name__}{''.join(f'.{word}' for word in path)}"
        defined = [each for cls in type(module).__mro__ for each in vars(cls)]  # those of its own class first
        names = [each for each in dict.fromkeys(defined) if not each.startswith("_") and each not in dir(nn.Module)]
        has = f"it has {first_few([*dict(module.named_children()), *names], 8)}" if names else "it has no methods"
        raise InputsError(f"{where} has no method {name}{suggest(name, names)}; {has}")
    return ".".join(path), found


def _with_signature(part: nn.Module, run: Callable[..., Any]) -> nn.Module:
    """The part, whose ``forward`` shows the arguments of what it runs."""
    parameters = list(inspect.signature(run).parameters.values())
    if not inspect.ismethod(run) and not isinstance(run, nn.Module):  # a function of the model
        parameters = parameters[1:]
    signature = inspect.Signature(parameters)
    vars(part.forward)["__signature__"] = signature
    return part


def _run(
    name: str, path: str, run: Callable[..., Any], outputs: Sequence[str] | None, model: nn.Module, /, **inputs: Any
) -> dict[str, torch.Tensor]:
    """What a part returns, by name. Modules below ``model`` record their calls, that at ``path`` included."""
    if not inspect.ismethod(run):
        result = run(_without_hooks(model), **inputs)
    elif not path:
        result = run.__func__(_without_hooks(model), **inputs)
    else:
        module = model.get_submodule(path)
        with attribute_set(module, FORWARD, run):
            result = module(**inputs)
    taken = {key for key, _ in tensors_in(inputs)}
    return {NEXT * (key in taken) + key: value for key, value in _named(name, outputs, result)}


def _without_hooks(part: nn.Module) -> nn.Module:
    """The model of a part, for what the part runs: it may call the model, whose ``forward`` is its own there.

    Such a call is not a call of a module: it is in that of the part. So no hook sees it.
    """
    model, cls = copy.copy(part), type(part)
    del model.forward
    model.__class__ = type(cls.__name__, (cls,), {"__call__": cls.forward, "__module__": cls.__module__})
    return model


def _named(name: str, outputs: Sequence[str] | None, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        result = {(outputs or [name])[0]: result}
    elif isinstance(result, (tuple, list)) and not hasattr(result, "_fields"):
        names = outputs or [f"{name}.{index}" for index in range(len(result))]
        if len(names) != len(result):
            raise UsageError(
                f"{name} returns {plural(len(result), 'value')}, and {plural(len(names), 'name', 'are')} given"
            )
        result = dict(zip(names, result, strict=True))
    yield from tensors_in(result)


def _inputs(
    name: str, part: Part, runs: nn.Module, earlier: Mapping[str, torch.Tensor], directory: Path | None
) -> dict[str, Any]:
    """The example inputs of a part: given ones, outputs of earlier parts, and others that are made."""
    signature = inspect.signature(runs.forward)
    parameters = signature.parameters
    variadic = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    given, described = with_each_tensor_once(dict(part.inputs or {})), dict(part.described or {})
    if unknown := [] if variadic else [key for key in (*given, *described) if key not in parameters]:
        shown = f"{name}{signature}"
        raise InputsError(f"{name} takes no input {unknown[0]}{suggest(unknown[0], parameters)}: it is {shown}")
    known = {key: earlier[key] for key in parameters if key in earlier} | given
    required = [key for key, each in parameters.items() if _is_required(each) and key not in known]
    if not required and not described:
        return known
    arrays = {key: as_array(value) for key, value in known.items() if isinstance(value, torch.Tensor)}
    try:
        made = generate_inputs(runs, spec=arrays | described, directory=directory)
    except InputsError as error:
        raise InputsError(
            f"{name} needs {', '.join(required)}, which no earlier part returns and which could not be made "
            f"({error_line(error)}): give its inputs; it is {name}{signature}"
        ) from error
    return {key: known.get(key, value) for key, value in made.items()} | known


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and not variadic


def _outputs(name: str, runs: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What a part returns for its example inputs."""
    signature = inspect.signature(runs.forward)
    try:
        with untouched(runs), torch.no_grad():
            outputs: dict[str, torch.Tensor] = runs(**copied(dict(inputs)))
    except UsageError:
        raise
    except Exception as error:
        raise InputsError(
            f"{name} does not run with {describe(inputs)}: {error_line(error)}; it is {name}{signature}"
        ) from error
    if not outputs:
        raise InputsError(f"{name} returns no tensors: a part is a function that returns some; it is {name}{signature}")
    return outputs
