"""What the code of a model asks of tensor values (``if mask.any()``): the places that ask, and the answers of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import Inputs, run_arguments


def asks(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function gives Python a truth value."""
    return func in TRUTHS or (func is torch.Tensor.item and args[0].dtype is torch.bool)


Site = tuple[tuple[str, int], ...]
"""A place in the code of a model, and where it was called from: files and positions of instructions."""


_CALL_MODELS = {"torch", "sympy", "modelexport", *sys.stdlib_module_names}
_EXPORTERS = "transformers.exporters."
"""Modules that are between those who export a model and the model."""


def site_of() -> Site:
    """The place in the model's code that runs now."""
    return tuple((frame.f_code.co_filename, frame.f_lasti) for frame in frames_of_model(sys._getframe(1)))


def frames_of_model(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the model's code, the innermost first, among a frame and those that called it.

    What called the front end is not of the model.
    """
    while frame is not None and frame.f_globals.get("__name__") != "modelexport.capture.front_ends":
        if is_of_model(frame):
            yield frame
        frame = frame.f_back


def is_of_model(frame: FrameType) -> bool:
    """Whether a frame is of the model's code, not of PyTorch's, of Python's or of what exports it."""
    return is_module_of_model(str(frame.f_globals.get("__name__", "")))  # none in code that PyTorch writes


def is_module_of_model(module: str) -> bool:
    """The same for the name of a module of Python."""
    return bool(module) and not module.startswith(_EXPORTERS) and module.partition(".")[0] not in _CALL_MODELS


TRUTHS = {
    torch.Tensor.__bool__,
    torch.Tensor.equal,
    torch.equal,
    torch.Tensor.allclose,
    torch.allclose,
    torch.is_nonzero,
    torch.Tensor.is_nonzero,
}


class TimesAsked:
    """Counts how often one place asks while the function that it is in runs, as the condition of a loop does."""

    def __init__(self) -> None:
        self.most = 0
        """The largest count."""
        self._counts: dict[tuple[FrameType, int], int] = {}

    def note(self) -> int:
        """Note that the code of the model asks now; how often the place did."""
        running = list(frames_of_model(sys._getframe(1)))
        if not running:
            return 0
        counts = {key: count for key, count in self._counts.items() if key[0] in running}
        place = running[0], running[0].f_lasti
        counts[place] = counts.get(place, 0) + 1
        self._counts, self.most = counts, max(self.most, counts[place])
        return counts[place]


class _Answers(TorchFunctionMode):
    """Notes the truth values that the model's code gets."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[tuple[Site, bool]] = set()
        self.times = TimesAsked()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if asks(func, args):
            self.given.add((site_of(), bool(output)))
            self.times.note()
        return output


def answers_of_run(model: nn.Module, inputs: Inputs) -> frozenset[tuple[Site, bool]] | None:
    """The places that ask in a run, with their answers; ``None`` if the run fails. Leaves the model as it is."""
    answers = _Answers()
    return frozenset(answers.given) if _runs(model, inputs, answers) else None


def most_times_asked(model: nn.Module, inputs: Inputs) -> int:
    """How often one place in a running function asks, at most. Leaves the model as it is."""
    answers = _Answers()
    _runs(model, inputs, answers)
    return answers.times.most


def _runs(model: nn.Module, inputs: Inputs, answers: _Answers) -> bool:
    args, kwargs = run_arguments(inputs)
    try:
        with untouched(model), torch.no_grad(), answers:
            model(*args, **kwargs)
    except Exception:  # a model may raise anything for inputs that it does not accept
        return False
    return True
