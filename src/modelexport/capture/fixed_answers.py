"""Finds the questions that a model's code asks of tensor values and that have one answer for all inputs.

No front end can follow ``assert mask.any()`` or ``if ids.max() > n: raise ValueError``. Since the model has no output
if the answer is the other one, a graph may take the one of the example. So it may where constants alone decide.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelexport.capture.arguments_and_parameters import variable_inputs
from modelexport.capture.value_decisions import READS_VALUES, WRITES_TEXT, selects
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import Inputs, run_arguments
from modelexport.pytorch.private_torch import tensor_leaves
from modelexport.pytorch.runs.questions_of_values import Site, asks, site_of


def fixed_answers(model: nn.Module, inputs: Inputs, constants: Collection[str], *, dynamic: bool) -> dict[Site, bool]:
    """Find the questions of a model's code that have one answer for all inputs: the place of each, to its answer.

    Runs the model once, and again for each place that asks about values that vary; its state is restored afterwards.

    Args:
        constants: Arguments whose values the graph keeps.
        dynamic: Sizes vary, and with them what Python makes of sizes.
    """
    args, kwargs = run_arguments(inputs)
    varying = [tensor for _, tensor in variable_inputs(model, args, kwargs, constants)]
    varying += [*model.parameters(), *model.buffers()]

    def error_with(answers: _Answers) -> BaseException | None:
        with untouched(model), answers:
            before = torch.get_rng_state()
            try:
                model(*args, **kwargs)
                answers.drew = not torch.equal(before, torch.get_rng_state())
            except (Exception, _AskedAgain) as error:  # of the model, for an answer that was changed
                return error
        return None

    asked = _Answers(varying, all_vary=dynamic)
    if error_with(asked) is not None:
        return {}
    return {
        site: truths.pop()
        for site, truths in asked.given.items()
        if len(truths) == 1
        and (
            (site not in asked.varying and not asked.drew)
            or _is_raised(error_with(_Answers((), all_vary=True, at=site)))
        )
    }


class _AskedAgain(BaseException):
    """After an answer was changed the model reads other values, which may decide otherwise for other inputs."""


class _Answers(TorchFunctionMode):
    """Notes what the tensors of a run answer to Python, or changes the first answer at one place.

    Args:
        varying: Tensors whose values another run may have others of.
        all_vary: So may all.
        at: The place.
    """

    def __init__(self, varying: Iterable[torch.Tensor], *, all_vary: bool, at: Site | None = None) -> None:
        super().__init__()
        self.given: dict[Site, set[bool]] = {}
        """Places that ask, to the answers."""
        self.varying: set[Site] = set()
        """The places that ask about values that vary with the inputs."""
        self.drew = False
        """Whether the run drew random numbers."""
        self._all_vary = all_vary
        self._at = at
        self._changed = False
        self._memories = {_memory(tensor): tensor for tensor in varying}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._changed and func in READS_VALUES - WRITES_TEXT and tensor_leaves(args):  # a text is for the error
            raise _AskedAgain
        output = func(*args, **(kwargs or {}))
        varies = self._all_vary or any(_memory(tensor) in self._memories for tensor in tensor_leaves((args, kwargs)))
        if asks(func, args):
            site = site_of()
            self.given.setdefault(site, set()).add(output)
            self.varying.update([site] if varies else [])
            self._changed = site == self._at
            return output != self._changed
        if varies:
            # What Python makes of a number, or of a size that depends on values, cannot be followed.
            self._all_vary |= func in READS_VALUES or selects(func, args)
            self._memories.update((_memory(tensor), tensor) for tensor in tensor_leaves((args, output)))
        return output


def _memory(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, which its views share: writing into one of them changes all."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # a sparse or packed one has none of its own
        return id(tensor)


def _is_raised(error: BaseException | None) -> bool:
    """Whether an error comes from a ``raise`` or an ``assert`` in Python: what C++ refuses may depend on values."""
    if error is None or isinstance(error, _AskedAgain) or error.__traceback__ is None:
        return False
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
