"""Parts that are ScriptModules, which no front end takes: while a model is captured they are graphs of torch.export.

A scripted part is one call, and stays one: its own parts are not called from Python. Its parameters keep their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from modelexport.capture.arguments_and_parameters import with_parameters
from modelexport.capture.patches import private, usable
from modelexport.core.collected_messages import collected
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import Inputs, copied, run_arguments, schema_of_forward
from modelexport.pytorch.private_torch import tree_leaves


@contextlib.contextmanager
def scripts_converted(model: nn.Module, inputs: Inputs) -> Iterator[nn.Module]:
    """Inside, the scripted parts of a model are converted, as far as that can be; gives the model to capture."""
    scripted = list(_outermost(model))
    if not scripted:
        yield model
        return
    calls = _calls_of(model, inputs, {module for _, module in scripted})
    with contextlib.ExitStack() as stack:
        for path, module in scripted:
            converted = _converted(module, calls.get(module, []))
            if converted is None:
                continue
            if not path:
                yield converted
                return
            parent, _, name = path.rpartition(".")
            parts = model.get_submodule(parent)._modules
            stack.callback(parts.__setitem__, name, module)
            parts[name] = converted
        yield model


def _outermost(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, torch.jit.ScriptModule):
        yield path, model
        return
    for name, part in model.named_children():
        yield from _outermost(part, f"{path}.{name}" if path else name)


def _calls_of(model: nn.Module, inputs: Inputs, modules: set[nn.Module]) -> dict[nn.Module, list[tuple[Any, ...]]]:
    """The arguments of each call of the modules in a run."""
    calls: dict[nn.Module, list[tuple[Any, ...]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module in modules:
            calls.setdefault(module, []).append(copied(args))

    args, kwargs = run_arguments(inputs)
    if isinstance(model, torch.jit.ScriptModule):
        bound = _with_defaults(model, args, kwargs)
        return {} if bound is None else {model: [bound]}
    handle = register_module_forward_pre_hook(note)
    try:
        with untouched(model), contextlib.suppress(Exception):  # the capture says why it does not run
            model(*args, **kwargs)
    finally:
        handle.remove()
    return calls


def _with_defaults(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> tuple[Any, ...] | None:
    """Every argument of a scripted ``forward`` by position; ``None`` where one is missing."""
    parameters = schema_of_forward(module).arguments[1:]
    names = [parameter.name for parameter in parameters]
    defaults = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    bound = {**defaults, **dict(zip(names, args, strict=False)), **(kwargs or {})}
    return tuple(bound[name] for name in names) if bound.keys() >= {*names} else None


def _converted(module: nn.Module, calls: Sequence[tuple[Any, ...]]) -> nn.Module | None:
    """A module as a graph for the shapes that it is called with; ``None`` where they differ or it cannot be."""
    if not usable("converter") or not calls or len({_shapes(call) for call in calls}) > 1:
        return None
    bound = _with_defaults(module, calls[0])
    if bound is None:
        return None
    try:
        with torch.no_grad(), collected():
            graph: nn.Module = private("converter")(module, bound, {}).convert().module(check_guards=False)
    except Exception:  # the front ends say what they say of a ScriptModule
        return None
    if any(isinstance(part, torch.fx.GraphModule) for part in graph.children()):
        return None  # a branch, which would be a module that the model does not have
    forward = graph.forward

    def with_defaults(*args: Any, **kwargs: Any) -> Any:
        return forward(*(_with_defaults(module, args, kwargs) or args))

    names = [parameter.name for parameter in schema_of_forward(module).arguments[1:]]
    graph.forward = with_parameters(with_defaults, names)
    # Of the sizes, which are those of the run; a trace has tensors in their place.
    graph._forward_pre_hooks.clear()
    # It is in evaluation mode as the module was, and refuses to be asked.
    graph.train = lambda mode=True: graph  # type: ignore[method-assign]  # its mode is fixed
    graph.eval = lambda: graph  # type: ignore[method-assign]  # its mode is fixed
    return graph


def _shapes(call: tuple[Any, ...]) -> str:
    leaves = tree_leaves(call)
    return str([(leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
