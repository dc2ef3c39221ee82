"""The conditions of sizes that torch.export records: what Python, and torch itself, decided by a size.

A capture follows one side of each comparison of a size, and its ``ShapeEnv`` records which.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from sympy import And, Eq

from modelexport.capture.failure_hints import is_of_exporter
from modelexport.capture.patches import private, usable
from modelexport.core.text import name_of_code
from modelexport.graph.size_conditions import SizeCondition, simplified
from modelexport.pytorch.runs.questions_of_values import frames_of_model, is_of_model


class RecordedConditions:
    """Notes what a capture records of sizes, with the line of the model that runs."""

    def __init__(self) -> None:
        self._guards: list[tuple[Any, Any, tuple[str, int], bool, bool]] = []
        """The ``ShapeEnv``, what holds, the file and line, whether the model's own code compares, or makes a number."""

    def exporting(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.export.export``, at which the notes of an earlier attempt end."""

        def export(*args: Any, **kwargs: Any) -> Any:
            self._guards.clear()
            return capture(*args, **kwargs)

        return export

    def logging(self, log: Callable[..., Any]) -> Callable[..., None]:
        """Wrap the method with which a ``ShapeEnv`` logs a guard, so that its condition is recorded with its line."""

        def log_guard(env: Any, prefix: str, g: Any, forcing_spec: bool) -> None:
            if "suppressed" not in prefix:
                self._guards.append((env, g, *_asking(sys._getframe(1)), False))
            log(env, prefix, g, forcing_spec)

        return log_guard

    def note_number(self, size: Any) -> bool:
        """Note that the model's own code makes a plain number of a symbolic size; False if it is code of torch."""
        line, in_model = _asking(sys._getframe(1))
        if is_noted := in_model and size.node.hint is not None:
            self._note_number(size, line)
        return is_noted

    def note_end(self, error: Exception, sizes: Iterable[Any]) -> None:
        """Note that a run ended in the model's own code, which needs plain numbers in place of symbolic sizes."""
        frames = traceback.walk_tb(error.__traceback__)
        *_, (frame, line) = (each for each in frames if each[0].f_globals.get("__name__") not in _COMPARE)
        for size in sizes if is_of_model(frame) else ():
            self._note_number(size, (frame.f_code.co_filename, line))

    def _note_number(self, size: Any, line: tuple[str, int]) -> None:
        self._guards.append((size.node.shape_env, Eq(size.node.expr, size.node.hint), line, True, True))

    def conditions(self) -> tuple[SizeCondition, ...]:
        """The conditions, in the symbols of the capture."""
        return simplified(list(self._recorded()))

    def _recorded(self) -> Iterator[SizeCondition]:
        printer = private("formulas")()
        for env, guard, (file, number), in_model, makes_number in self._guards:
            expression = guard if makes_number else guard.xreplace(env.replacements)  # torch may fix the size later
            where, source = line_of_code(file, number)
            for part in expression.args if isinstance(expression, And) else [expression]:
                if part.free_symbols:
                    formula = re.sub(
                        r"\d+\.\d+(e-?\d+)?",
                        lambda number: repr(float(number[0])),
                        printer.doprint(_without_factors(part)),
                    )
                    formula = formula.replace("torch.sym_float(", "float(").replace("torch._sym_sqrt(", "math.sqrt(")
                    yield SizeCondition(formula, where, source, in_model, makes_number)


def _asking(frame: FrameType) -> tuple[tuple[str, int], bool]:
    """The file and line of the model that runs in a frame, and whether it asks for the size itself, not by torch."""
    caller = frame
    while caller.f_back is not None and caller.f_globals.get("__name__") in _COMPARE:
        caller = caller.f_back
    model = next(frames_of_model(frame), None)
    line = (model.f_code.co_filename, model.f_lineno) if model is not None else _interpreted_line()
    return line, caller is model


def _without_factors(condition: Any) -> Any:
    """``n == 25`` of ``batch * n == 25 * batch``: sizes are not zero."""
    if not isinstance(condition, Eq) or not (condition.lhs.is_Mul and condition.rhs.is_Mul):
        return condition
    return Eq(*(condition.lhs / condition.rhs).as_numer_denom())


def _interpreted_line() -> tuple[str, int]:
    """The file and line of the model's code that dynamo interprets; ``("", 0)`` if it interprets none."""
    stack = private("interpreted frames")() if usable("interpreted frames") else ()
    frames = [frame for frame in stack if not is_of_exporter(frame)]
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def line_of_code(file: str, number: int) -> tuple[str, str]:
    """A line of code as messages name it, ``net.py:12``, and its text; both empty if the line is not known."""
    if not file:
        return "", ""
    return f"{name_of_code(file)}:{number}", linecache.getline(file, number).strip()[:_TEXT]


_COMPARE = {
    "torch",
    *(f"torch.fx.experimental.{name}" for name in ("symbolic_shapes", "recording", "sym_node")),
    __name__,
    "modelexport.capture.presumed_answers",
    "modelexport.capture.traced_size_conditions",
}
"""Modules whose frames are on the stack between a comparison of sizes and its record; they are skipped."""
_TEXT = 120
"""The largest number of characters of a line that is quoted."""
