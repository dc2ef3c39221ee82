"""Finds what a model asks of values whose answer is that of the example, whatever the inputs.

No front end can follow ``assert mask.any()`` or ``if ids.max() > n: raise ValueError``. Since the model has no output
if the answer is the other one, a graph may take the one of the example. So it may where constants alone decide.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelexport.capture.arguments_and_parameters import variable_inputs
from modelexport.capture.failure_hints import line_of
from modelexport.capture.value_decisions import asks
from modelexport.core.collected_messages import collected
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import run_arguments
from modelexport.pytorch.private_torch import tree_leaves


def fixed_answers(
    model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any], constants: Collection[str]
) -> dict[str, bool]:
    """Lines of the model, ``net.py:12``, to the truth of what they ask, where it is always the same.

    Runs the model, and once more for each line that asks of values which vary. It is as before afterwards.
    """
    args, kwargs = run_arguments(inputs)
    varying = [tensor for _, tensor in variable_inputs(model, args, kwargs, constants)]
    varying += [*model.parameters(), *model.buffers()]

    def error_with(answers: _Answers) -> Exception | None:
        with untouched(model), collected(), answers:
            try:
                model(*args, **kwargs)
            except Exception as error:  # of the model, for an answer that was changed
                return error
        return None

    asked = _Answers(varying)
    if error_with(asked) is not None:
        return {}
    return {
        line: truths.pop()
        for line, truths in asked.given.items()
        if len(truths) == 1 and (line not in asked.varying or _raises_itself(error_with(_Answers((), line))))
    }


class _Answers(TorchFunctionMode):
    """Notes what the tensors of a run answer to Python, and changes the answers of one line.

    Args:
        varying: Tensors whose values another run may have others of.
        changed: The line.
    """

    def __init__(self, varying: Iterable[torch.Tensor], changed: str | None = None) -> None:
        super().__init__()
        self.given: dict[str, set[bool]] = {}
        """Lines that ask, to the answers."""
        self.varying: set[str] = set()
        """Those of them that ask of values which vary."""
        self._changed = changed
        self._memories = {_memory(tensor): tensor for tensor in varying}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        varies = any(_memory(one) in self._memories for one in _tensors((args, kwargs)))
        if asks(func, args):
            line = line_of(traceback.extract_stack())
            self.given.setdefault(line, set()).add(output)
            self.varying.update([line] if varies else [])
            return output != (line == self._changed)
        if varies:
            self._memories.update((_memory(one), one) for one in _tensors((args, output)))
        return output


def _memory(tensor: torch.Tensor) -> int:
    """Tells the memories of tensors apart: what is written into one changes its views."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _tensors(value: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def _raises_itself(error: Exception | None) -> bool:
    """Whether an error comes from a ``raise`` or an ``assert`` in the code of the model."""
    if error is None or error.__traceback__ is None:
        return False
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and bool(line_of(traceback.extract_tb(last)))
