"""The shapes of recurrent layers while a model is captured: those of any number of steps.

PyTorch finds them by its decomposition of the layer, which runs each step. That fixes a dynamic number of steps to that
of the example: of the outputs alone in the first export of a process, and of the inputs as well in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from modelexport.capture.patches import private, usable
from modelexport.pytorch.private_torch import schema_of


def _shapes(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema_of(operator).arguments]

    def shapes(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        states = list(given["hx"]) if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
        steps = given["input"]
        width = states[0].shape[-1] * (2 if given["bidirectional"] else 1)
        return (steps.new_empty((*steps.shape[:-1], width)), *(torch.empty_like(state) for state in states))

    return shapes


@contextmanager
def steps_open() -> Iterator[None]:
    """Inside, nothing is computed by recurrent layers: the shapes of their results follow from those of their inputs.

    Only of the operators that are translated as they are.
    """
    if not usable("definitions", "kernels", "kernels' cache", "dispatch keys"):
        yield
        return
    table = private("definitions")
    operators = [one for one in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input) if one in table]
    before = {operator: (table[operator], dict(operator.py_kernels)) for operator in operators}
    dispatch = private("dispatch keys")
    keys = (dispatch.CompositeImplicitAutograd, dispatch.Autograd)
    try:
        for operator in operators:
            table[operator] = _shapes(operator)
            operator.py_kernels.update(dict.fromkeys(keys, table[operator]))
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, (decomposition, kernels) in before.items():
            table[operator] = decomposition
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
