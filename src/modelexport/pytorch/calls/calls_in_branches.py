"""Records the calls in the nested functions of ``torch.cond``, ``torch.while_loop`` and ``scan``.

A file has the calls of both branches of a condition and of one iteration of a loop. So both branches are run, whichever
is taken, and the first iteration is recorded. The result is that of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelexport.pytorch.calls.call_recorder import CallRecorder
from modelexport.pytorch.dispatch_modes import OperationMode
from modelexport.pytorch.nested_tensors import memory_of
from modelexport.pytorch.private_torch import tensor_leaves, written_by


class BodyError(Exception):
    """A branch that was not taken cannot be run, so that its calls cannot be numbered."""


class Bodies(OperationMode):
    """Records the calls in nested functions, as those of bodies of the recorder.

    Args:
        recorder: Records the calls of the run.
    """

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._made: set[int | None] | None = None
        """The memory that a branch that is not taken has made, the only one that it may write to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.higher_order.cond:
            return self._run_branches(*args)
        if func is torch.ops.higher_order.while_loop:
            return self._run_while(func, *args, **kwargs)
        if func is torch.ops.higher_order.scan:
            return func(self._once(args[0], set()), *args[1:], **kwargs)
        if self._made is not None and _memory(written_by(func, args, kwargs)) - self._made:
            raise BodyError(f"{func} writes to a tensor from outside of the branch")
        output = func(*args, **kwargs)
        if self._made is not None:
            self._made |= _memory(output) - _memory((args, kwargs))
        self._recorder.note_work()
        return output

    def _run_branches(self, taken: Any, *branches_and_operands: Any) -> Any:
        *branches, operands = branches_and_operands
        chosen = branches[0 if bool(taken) else 1]
        results = []
        for branch in branches:
            if branch is chosen:
                with self._recorder.body(), self:
                    results.append(branch(*operands))
            else:
                results.append(self._run_beside(branch, operands))
        self._recorder.results = results
        return results[branches.index(chosen)]

    def _run_beside(self, function: Callable[..., Any], operands: Any) -> Any:
        """Run what the model does not run with these values, without effects on it.

        Raises:
            BodyError: It fails, or would write to a tensor from outside.
        """
        before, self._made = self._made, set() if self._made is None else self._made
        try:
            with torch.random.fork_rng(devices=[]), self._recorder.body(), self:
                return function(*operands)
        except Exception as error:  # any code of the model, which relies on not being run
            raise BodyError(str(error)) from error
        finally:
            self._made = before

    def _run_while(self, func: Any, condition: Any, body: Any, *rest: Any, **kwargs: Any) -> Any:
        begun: set[str] = set()
        result = func(self._once(condition, begun, after="body"), self._once(body, begun, "body"), *rest, **kwargs)
        if "body" not in begun:
            carried = [value for values in rest[:2] for value in values]
            self._run_beside(body, carried)
            self._run_beside(condition, carried)
        return result

    def _once(self, function: Any, begun: set[str], name: str = "condition", *, after: str = "") -> Any:
        """A function whose first run is recorded, or the first after another function's."""

        def run(*args: Any) -> Any:
            if name not in begun and (not after or after in begun):
                begun.add(name)
                with self._recorder.body(), self:
                    return function(*args)
            with self._recorder.suspended(), self:
                return function(*args)

        return run


def _memory(value: Any) -> set[int | None]:
    """Where the elements of the tensors in a value are."""
    return {*map(memory_of, tensor_leaves(value))} - {None}
