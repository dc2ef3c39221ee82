"""Forward hooks that record the calls of a run."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from modelexport.core.calls import ROOT, ModuleCall, Side, TensorSpec, TracedCall
from modelexport.pytorch.nested_tensors import (
    NamedTensors,
    has_elements,
    input_tensors,
    output_tensors,
    tensor_specs,
    tensors_held,
)
from modelexport.pytorch.private_torch import DisableTorchFunction, peek_interpreter_stack

_CALLS_OF_A_BODY = 2**32
"""More than the calls of a module in the body of a branch or loop; these are numbered in the end."""


class CallRecorder:
    """Records the calls of a model while it is attached, in the order in which they begin.

    Args:
        around: Returns a context that is entered when a call begins and left when it ends.
        watch: Called with the tensors that each call gets (``inputs``) and returns (``outputs``).
        apart: Whether an object's tensors are recorded only where the root's call gets or returns it.
    """

    def __init__(
        self,
        model: nn.Module,
        around: Callable[[ModuleCall], AbstractContextManager[Any]] = lambda call: nullcontext(),
        watch: Callable[[ModuleCall, Side, NamedTensors], None] = lambda call, side, tensors: None,
        apart: Callable[[object], bool] | None = None,
    ) -> None:
        self.seen: list[TracedCall] = []
        self.results: list[object] = []
        """The results of the branches of the last condition, for a caller that runs both branches."""
        self._model = model
        self._around = around
        self._watch = watch
        self._apart = apart
        self._running: list[tuple[int, ExitStack]] = []
        self._counts: Counter[str] = Counter()
        self._first = 0
        self._bodies = 0
        self._suspended = False
        self.observing = False
        """Whether what runs is the recorder, and not the model."""
        self._working: set[int] = set()
        self._step = 0
        self._outer_error = sys.exception()
        self._raised: tuple[BaseException | None, ModuleCall | None] = (None, None)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach hooks to every module inside the block; they are always removed."""
        with ExitStack() as handles:
            scripted: dict[nn.Module, Any] = {}
            for path, module in self._model.named_modules():
                enter, leave = self._hooks(path)
                if isinstance(module, torch.jit.ScriptModule):  # does not accept hooks of its own
                    scripted[module] = enter, leave
                    continue
                # The last to see the inputs and the first to see the outputs: those of forward itself. The root's are
                # what a file takes and returns, with what hooks of the model do to them.
                before = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=not path)
                after = module.register_forward_hook(leave, prepend=bool(path), always_call=True)
                handles.callback(before.remove)
                handles.callback(after.remove)
            if scripted:
                self._watch_everywhere(scripted, handles)
            try:
                yield
            finally:
                while self._running:
                    self._running.pop()[1].close()

    @staticmethod
    def _watch_everywhere(hooks: Mapping[nn.Module, Any], handles: ExitStack) -> None:
        """Attach global hooks, for modules that do not accept hooks of their own."""

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module in hooks:
                hooks[module][0](module, args, {})

        def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if module in hooks:
                hooks[module][1](module, args, output)

        handles.callback(register_module_forward_pre_hook(enter).remove)
        handles.callback(register_module_forward_hook(leave, always_call=True).remove)

    def raised_in(self, error: BaseException) -> ModuleCall | None:
        """The innermost call that an exception was raised in; ``None`` if it was not raised in a call."""
        return self._raised[1] if self._raised[0] is error else None

    @property
    def running(self) -> ModuleCall | None:
        """The innermost call that has begun and not ended. It is still set when torch.export has failed."""
        return self.seen[self._running[-1][0]].call if self._running and not self._suspended else None

    @contextmanager
    def body(self) -> Iterator[None]:
        """Number the calls inside apart from others: they are in the body of a branch or loop."""
        if self._suspended:
            yield
            return
        counts, first, running = self._counts, self._first, len(self._running)
        self._bodies += 1
        self._counts, self._first = Counter(), self._bodies * _CALLS_OF_A_BODY
        try:
            yield
        finally:
            while len(self._running) > running:
                self._running.pop()[1].close()
            self._counts, self._first = counts, first

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Record no calls inside."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def note_work(self) -> None:
        """Note that the running calls computed something."""
        if self._first and not (self._suspended or self.observing):
            self._working.update(position for position, _ in self._running)

    def numbers(self) -> dict[ModuleCall, ModuleCall | None]:
        """The calls in bodies to the calls that they are in a file; ``None`` for one that it does not have.

        A file numbers them after the others, in the order of the bodies, and has no call that computes nothing.
        """
        calls = [traced.call for traced in self.seen]
        counts: Counter[str] = Counter(call.path for call in calls if call.index < _CALLS_OF_A_BODY)
        numbers: dict[ModuleCall, ModuleCall | None] = {}
        inside = [(position, call) for position, call in enumerate(calls) if call.index >= _CALLS_OF_A_BODY]
        for position, call in sorted(inside, key=lambda placed: placed[1].index // _CALLS_OF_A_BODY):
            numbers[call] = ModuleCall(call.path, counts[call.path]) if position in self._working else None
            counts[call.path] += position in self._working
        return numbers

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        # By path, not by module: torch.export passes proxies to the hooks for modules that have several names.
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (self._suspended or torch.compiler.is_dynamo_compiling()):
                self._enter(path, module, args, kwargs)

        def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
            if not (self._suspended or torch.compiler.is_dynamo_compiling()):
                self._leave(path, output)

        return enter, leave

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = ModuleCall(path, self._first + self._counts[path])
        self._counts[path] += 1
        parent = self.seen[self._running[-1][0]].call if self._running else None
        specs = self._described(call, "inputs", input_tensors(module, args, kwargs), (args, kwargs))
        self.seen.append(TracedCall(call, parent, len(self._running), self._next_step(), None, specs))
        context = ExitStack()
        context.enter_context(self._around(call))
        self._running.append((len(self.seen) - 1, context))

    def _leave(self, path: str, output: object) -> None:
        """Also called, with ``None`` for the output, when ``forward`` raised."""
        if all(self.seen[position].call.path != path for position, _ in self._running):
            return  # another hook raised before forward began
        position, context = self._running.pop()
        while self.seen[position].call.path != path:  # it raised under torch.export, and its caller continued
            context.close()
            position, context = self._running.pop()
        traced = self.seen[position]
        specs = self._described(traced.call, "outputs", output_tensors(output), output)
        self.seen[position] = dataclasses.replace(traced, exit=self._next_step(), outputs=specs)
        context.close()
        error = sys.exception()
        if error is not None and error is not self._outer_error and error is not self._raised[0]:
            self._raised = (error, traced.call)

    def _described(self, call: ModuleCall, side: Side, named: NamedTensors, held_by: object) -> tuple[TensorSpec, ...]:
        """The tensors that a call gets or returns."""
        self.observing = True
        try:
            with DisableTorchFunction():  # torch.export has four modes that would see each question for a shape
                tensors = self._recorded(named, call, held_by)
                self._watch(call, side, tensors)
                return tensor_specs(tensors)
        finally:
            self.observing = False

    def _recorded(self, tensors: NamedTensors, call: ModuleCall, held_by: object) -> NamedTensors:
        """The tensors that can be compared: neither nested tensors, nor those of a call inside ``torch.func``."""
        if peek_interpreter_stack() is not None:
            return []
        tensors = [(name, tensor) for name, tensor in tensors if has_elements(tensor)]
        if self._apart is None or call == ROOT:
            return tensors
        apart = {id(tensor) for tensor in tensors_held(held_by, self._apart)}
        return [(name, tensor) for name, tensor in tensors if id(tensor) not in apart]

    def _next_step(self) -> int:
        self._step += 1
        return self._step - 1
