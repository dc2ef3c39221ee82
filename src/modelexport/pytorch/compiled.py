"""Runs of models that are compiled, or have compiled parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from modelexport.core.attributes import attribute_set
from modelexport.pytorch.private_torch import operator_utilities


@contextmanager
def run_as_python(*, bodies: bool = False) -> Iterator[None]:
    """Inside, what ``torch.compile`` made runs as the Python code that it was made from: its calls and operations are
    seen, and nothing is compiled.

    PyTorch compiles the branches of ``torch.cond``, and the bodies of its other operators with nested graphs, when they
    run. That stays as it is, so that modules that are called inside a branch are not recorded as calls of the run.

    Args:
        bodies: These run as Python, too, for a caller who tells their calls from others
            (:class:`modelexport.pytorch.bodies.Bodies`).
    """
    if bodies:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    whole = operator_utilities.setup_compilation_env

    @contextmanager
    def compiling() -> Iterator[object]:
        with whole() as backend, torch.compiler.set_stance("default"):
            yield backend

    with (
        attribute_set(operator_utilities, "setup_compilation_env", compiling),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
