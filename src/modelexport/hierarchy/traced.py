"""The traced tree: every module call of one run, seen through forward hooks."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from modelexport.core import CallTree, ModuleCall, TensorSpec, TracedCall
from modelexport.errors import InputsError


def trace(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> CallTree:
    """Run the model once, in evaluation mode and without gradients, and return its calls.

    The model is left as it was, also when the run fails: each module's mode and hooks, parameters, buffers,
    ``requires_grad``, torch's random number generators. The one thing that is not put back is a parameter that is
    overwritten in place by a module other than the one that holds it: that would take a copy of all the weights.

    Args:
        args: What ``forward`` takes by position.
        kwargs: What it takes by name.

    Returns:
        The calls in the order in which they began. Inputs are named as ``forward``'s arguments (``hidden_states``,
        ``past.0``), outputs by the field of a mapping or dataclass, or ``output``, ``output.0``, ...

    Raises:
        InputsError: The model raised; names the innermost call that was running. The model's exception is chained.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise InputsError("the model has lazy parameters, which its first run makes: run it once, then trace it")
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    recorder = _Recorder({module: path for path, module in model.named_modules()})
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        changed = stack.enter_context(_model_kept(model))
        for module in recorder.paths:
            keeper = _OwnParameters(changed)
            # The last to see the inputs and the first to see the outputs: what forward itself takes and gives.
            for handle in (
                module.register_forward_pre_hook(keeper.before),
                module.register_forward_pre_hook(recorder.enter, with_kwargs=True),
                module.register_forward_hook(recorder.leave, prepend=True, always_call=True),
                module.register_forward_hook(keeper.after, always_call=True),
            ):
                stack.callback(handle.remove)
        try:
            model(*args, **(kwargs or {}))
        except Exception as error:
            call = recorder.raised_in(error)
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            raise InputsError(
                f"the model raised {type(error).__name__} while running {call} "
                f"({type(model.get_submodule(call.path)).__name__}): {reason}; check the example inputs"
            ) from error
    return CallTree(tuple(recorder.seen))


class _Recorder:
    """The hooks that write down the calls."""

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self.paths = paths
        self.seen: list[TracedCall] = []
        self._running: list[int] = []
        self._counts: Counter[str] = Counter()
        self._step = 0
        self._outer_error = sys.exception()
        self._raised: tuple[BaseException | None, ModuleCall] = (None, ModuleCall(""))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = self.paths[module]
        self.seen.append(
            TracedCall(
                call=ModuleCall(path, self._counts[path]),
                parent=self.seen[self._running[-1]].call if self._running else None,
                depth=len(self._running),
                enter=self._next_step(),
                exit=None,
                inputs=_input_specs(module, args, kwargs),
            )
        )
        self._counts[path] += 1
        self._running.append(len(self.seen) - 1)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Also called, with ``None`` for the output, when ``forward`` raised."""
        if not self._running or self.seen[self._running[-1]].call.path != self.paths[module]:
            return  # another hook raised before forward began
        position = self._running.pop()
        traced = self.seen[position]
        self.seen[position] = dataclasses.replace(traced, exit=self._next_step(), outputs=_output_specs(output))
        error = sys.exception()
        if error is not None and error is not self._outer_error and error is not self._raised[0]:
            self._raised = (error, traced.call)

    def raised_in(self, error: BaseException) -> ModuleCall:
        """The innermost call that an exception came out of."""
        return self._raised[1] if self._raised[0] is error else ModuleCall("")

    def _next_step(self) -> int:
        self._step += 1
        return self._step - 1


class _OwnParameters:
    """The hooks that notice when a module overwrites its own parameters, as ``Embedding(max_norm=...)`` does."""

    def __init__(self, changed: dict[torch.Tensor, torch.Tensor]) -> None:
        self._changed = changed
        self._copies: list[dict[torch.Tensor, torch.Tensor]] = []

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        own = module.parameters(recurse=False)
        self._copies.append({parameter: parameter.clone() for parameter in own if _has_values(parameter)})

    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for parameter, copy in (self._copies.pop() if self._copies else {}).items():
            if not torch.equal(parameter, copy):
                self._changed.setdefault(parameter, copy)


@contextmanager
def _model_kept(model: nn.Module) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Evaluation mode inside, everything as it was afterwards; gives a place for the parameters found to be changed."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    registered = [(entries, dict(entries)) for module in modules for entries in (module._parameters, module._buffers)]
    tensors = [(tensor, tensor.data, tensor.requires_grad) for tensor in [*model.parameters(), *model.buffers()]]
    values = {buffer: buffer.clone() for buffer in model.buffers() if _has_values(buffer)}
    changed: dict[torch.Tensor, torch.Tensor] = {}
    try:
        for module in modules:
            module.training = False  # not eval(), which models override to do more
        yield changed
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for entries, before in registered:
            entries.clear()
            entries.update(before)
        for tensor, data, requires_grad in tensors:
            tensor.data = data
            tensor.requires_grad_(requires_grad)
        for tensor, value in {**values, **changed}.items():
            if not torch.equal(tensor, value):
                tensor.copy_(value)


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _input_specs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TensorSpec, ...]:
    try:
        signature = inspect.signature(module.forward)
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or arguments that forward is about to refuse
        return (*_specs("args", args), *_specs("", kwargs))
    variadic = inspect.Parameter.VAR_KEYWORD
    return tuple(
        spec
        for name, value in arguments.items()
        for spec in _specs("" if signature.parameters[name].kind is variadic else name, value)
    )


def _output_specs(output: object) -> tuple[TensorSpec, ...]:
    return tuple(_specs("" if _fields(output) else "output", output))


def _specs(name: str, value: object) -> Iterator[TensorSpec]:
    """The tensors in a value, named by the way to them: ``past.0.key``."""
    if isinstance(value, torch.Tensor):
        shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        yield TensorSpec(name, str(value.dtype).removeprefix("torch."), shape)
        return
    parts = _fields(value)
    if parts is None and isinstance(value, (list, tuple)):
        parts = {str(index): part for index, part in enumerate(value)}
    for part_name, part in (parts or {}).items():
        yield from _specs(f"{name}.{part_name}" if name else part_name, part)


def _fields(value: object) -> dict[str, Any] | None:
    """The parts of a value that has names for them: a mapping, a dataclass or a named tuple."""
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {str(field): part for field, part in zip(value._fields, value, strict=True)}
    return None
