"""The calls that a pipeline makes to its models while it runs, recorded or answered by something else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line, suggest
from modelexport.errors import InputsError, raised_as
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import copied
from modelexport.tools.pipelines.components_module import PipelineModules

Change = Callable[[str, Any], Any]
"""A function of the dotted name of a leaf and the leaf; returns the leaf to put in its place."""
_ROWS = 2
"""Prompts of the example run: a capture would treat a batch of one as fixed."""
_LATENTS = ((15, 21), (14, 22), (16, 24), None)
"""Sizes of the example latents, the first that a pipeline accepts. A model that halves odd sizes is captured as code
that accepts all; one that divides an image into patches refuses them. ``None``: the pipeline's own size."""
_SIZES = ("height", "width")
_PROMPTS = ("a cat on a red mat", "two small boats at sea in the evening")


def rebuilt(value: Any, change: Change, name: str = "") -> Any:
    """A structure of the same types with other leaves.

    Mappings, lists, tuples and the outputs of transformers and diffusers are followed, and objects that their class
    makes from attributes with tensors (a distribution from its ``parameters``); all else is a leaf.
    """
    parts = _parts(value)
    if parts is None:
        return change(name, value)
    changed = {key: rebuilt(part, change, f"{name}.{key}" if name else str(key)) for key, part in parts.items()}
    if isinstance(value, (list, tuple)):
        items = changed.values()
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return changed if type(value) is dict else type(value)(**changed)


def leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of a structure with their dotted names, in order."""
    parts = _parts(value)
    if parts is None:
        return [(name, value)]
    return [leaf for key, part in parts.items() for leaf in leaves(part, f"{name}.{key}" if name else str(key))]


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """The elements of a structure by their keys; ``None`` for a leaf."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, (torch.Tensor, torch.Generator, torch.nn.Module, type)) or not hasattr(value, "__dict__"):
        return None
    try:
        parameters = inspect.signature(type(value)).parameters
    except (TypeError, ValueError):
        return None
    attributes = {key: vars(value)[key] for key in parameters if key in vars(value)}
    return attributes if any(isinstance(part, torch.Tensor) for part in attributes.values()) else None


@dataclass(frozen=True, order=True)
class Entry:
    """A method of a model that its pipeline calls."""

    component: str
    method: str


@dataclass(frozen=True)
class ObservedCall:
    """One call from a pipeline to a model."""

    entry: Entry
    arguments: Mapping[str, Any]
    """The arguments by the names of the method's parameters."""
    output: Any
    """The result; with ``return_dict=True`` if the method has this parameter."""


Handler = Callable[[Entry, dict[str, Any], Callable[[], Any]], Any]
"""A function of an entry, its arguments and a function that runs the model; returns the result."""


def _methods(component: nn.Module) -> list[str]:
    """``forward``, and the public methods that every module does not have."""
    cls = type(component)
    public = [name for name in dir(cls) if not name.startswith("_") and not hasattr(nn.Module, name)]
    return ["forward", *(name for name in public if inspect.isfunction(inspect.getattr_static(cls, name)))]


def _answering(component: nn.Module, entry: Entry, running: list[str], handler: Handler) -> Callable[..., Any]:
    """A method that asks the handler; calls from inside the model pass through."""
    method = getattr(component, entry.method)
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if running:
            return method(*args, **kwargs)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name, {})
        as_dict = arguments.pop("return_dict", None)
        if "return_dict" in signature.parameters:  # so that what it returns has names
            arguments["return_dict"] = True
        running.append(entry.method)
        try:
            output = handler(entry, arguments, lambda: method(**arguments))
        finally:
            running.pop()
        return output.to_tuple() if as_dict is False and hasattr(output, "to_tuple") else output

    return call


def observe_example(
    modules: PipelineModules, user_inputs: Mapping[str, Any] | None = None, *, steps: int, seed: int = 0
) -> tuple[Observed, dict[str, Any]]:
    """Run a pipeline with example arguments: two rows, images that are not square. Returns the arguments as well.

    Args:
        user_inputs: Arguments that replace or complete them.
    """
    pipeline, user_inputs = modules.pipeline, dict(user_inputs or {})
    parameters = inspect.signature(pipeline.__call__).parameters
    scale = int(getattr(pipeline, "vae_scale_factor", 0) or 1)
    known: dict[str, Any] = {
        "prompt": list(_PROMPTS),
        "class_labels": list(range(_ROWS)),
        "batch_size": _ROWS,
        "num_inference_steps": steps,
        "output_type": "np",
        "use_resolution_binning": False,
    }
    for name in user_inputs:
        if name not in parameters:
            raise InputsError(
                f"{type(pipeline).__name__} takes no argument {name}{suggest(name, list(parameters))}: "
                f"it takes {', '.join(parameters)}"
            )
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind in plain
        if needed and name not in {*known, *_SIZES, *user_inputs}:
            raise InputsError(
                f"{type(pipeline).__name__} needs the argument {name}: give it in a JSON file with --inputs"
            )
    failure: InputsError | None = None
    for latents in _LATENTS:
        sizes = dict(zip(_SIZES, [size * scale for size in latents], strict=True)) if latents else {}
        arguments = {name: value for name, value in {**known, **sizes}.items() if name in parameters} | user_inputs
        try:
            return observe(modules, arguments, seed=seed), arguments
        except InputsError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def run_pipeline(
    modules: PipelineModules,
    arguments: Mapping[str, Any],
    handler: Handler,
    entries: Collection[Entry] | None = None,
    *,
    seed: int = 0,
) -> Any:
    """Run a pipeline whose models a handler answers for.

    Args:
        entries: The methods that it answers for; by default all public ones.

    Raises:
        InputsError: The pipeline fails with these arguments.
    """
    takes = inspect.signature(modules.pipeline.__call__).parameters
    drawn = {"generator": torch.Generator().manual_seed(seed)} if "generator" in takes else {}

    def fails(error: Exception) -> InputsError:
        problem = f"{type(modules).__name__} fails with the example arguments: {error_line(error)}"
        return InputsError(f"{problem}; give others with --inputs")

    with untouched(modules, runs=False, masks=False), ExitStack() as stack, raised_as(fails):
        for name, component in modules.named_children():
            running: list[str] = []
            for method in _methods(component):
                if entries is None or Entry(name, method) in entries:
                    answer = _answering(component, Entry(name, method), running, handler)
                    stack.enter_context(attribute_set(component, method, answer))
        torch.manual_seed(seed)
        return modules.pipeline(**drawn, **copied(arguments))


@dataclass(frozen=True)
class Observed:
    """One run of a pipeline."""

    calls: Sequence[ObservedCall]
    """The calls to its models, in order."""
    result: Any
    """What the pipeline returned."""
    inside: Sequence[str]
    """The addresses of modules that the pipeline called by themselves, not through a method of their model."""


def observe(modules: PipelineModules, arguments: Mapping[str, Any], *, seed: int = 0) -> Observed:
    """Run a pipeline, and record what it calls its models with and what they return."""
    calls: list[ObservedCall] = []
    inside: dict[str, None] = {}
    ran: list[bool] = [False]
    busy: list[bool] = [False]

    def note(address: str, *_: Any) -> None:
        ran[0] = True
        if not busy[0]:
            inside[address] = None

    def record(entry: Entry, arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
        kept = copied(arguments)
        outer, busy[0], ran[0] = busy[0], True, False
        try:
            output = run()
        finally:
            busy[0] = outer
        if ran[0]:
            calls.append(ObservedCall(entry, kept, copied(output)))
        return output

    with ExitStack() as stack:
        for address, module in modules.named_modules():
            if "." in address:  # not the models themselves
                stack.callback(module.register_forward_pre_hook(functools.partial(note, address)).remove)
        result = run_pipeline(modules, arguments, record, seed=seed)
    return Observed(calls, result, list(inside))
