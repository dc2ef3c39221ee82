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

from sympy import And, Eq, Not, sympify

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
        self.kernels_take_numbers = True
        """Whether C++ code gets a number for a symbolic size in a run with the answers of the example, or fails."""

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

    def answering(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method with which a ``ShapeEnv`` answers comparisons, for a run whose answers are those of the
        example: nothing follows from them, and each is recorded. The run ends where formulas get long, as those of
        padded windows do: PyTorch would compute with them for minutes.
        """

        def evaluate_expr(env: Any, orig_expr: Any, hint: Any = None, *more: Any, **options: Any) -> Any:
            if hint is None or not orig_expr.free_symbols:
                return evaluate(env, orig_expr, hint, *more, **options)
            if orig_expr.count_ops() > _OPERATIONS:
                raise ArithmeticError(f"more than {_OPERATIONS} operations: {orig_expr}")
            line, in_model = _asking(sys._getframe(1))
            if not (in_model or isinstance(hint, bool) or self.kernels_take_numbers):
                raise RuntimeError(f"a number is needed for {orig_expr}")
            self._note(env, orig_expr, hint, line, in_model)
            return sympify(hint)

        return evaluate_expr

    def _note(self, env: Any, expression: Any, hint: Any, line: tuple[str, int], in_model: bool) -> None:
        """Note an answer, unless it is the same for all sizes above 1: PyTorch excludes 0 and 1 by itself."""
        shapes = private("symbols")
        ranges = tuple((symbol, shapes.ValueRanges(2, shapes.int_oo)) for symbol in expression.free_symbols)
        if private("ranges")(env, expression, axioms=(), var_to_range=ranges) is None:
            guard = Eq(expression, hint) if not isinstance(hint, bool) else expression if hint else Not(expression)
            self._guards.append((env, guard, line, in_model, False))

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
        for env, guard, (file, number), in_model, makes_number in dict.fromkeys(self._guards):
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
    caller = asked = frame
    while caller.f_back is not None and caller.f_globals.get("__name__") in _COMPARE:
        caller, asked = caller.f_back, caller
    model = next(frames_of_model(frame), None)
    line = (model.f_code.co_filename, model.f_lineno) if model is not None else _interpreted_line()
    return line, caller is model and asked.f_globals.get("__name__") != _BY_KERNELS


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


_BY_KERNELS = "torch.fx.experimental.sym_node"
"""The module of the first frame where PyTorch's C++ code compares sizes; where Python does, it is a method."""
_COMPARE = {
    "torch",
    _BY_KERNELS,
    *(f"torch.fx.experimental.{name}" for name in ("symbolic_shapes", "recording")),
    __name__,
    "modelexport.capture.presumed_answers",
    "modelexport.capture.symbolic_runs",
}
"""Modules whose frames are on the stack between a comparison of sizes and its record; they are skipped."""
_OPERATIONS = 48
"""The most operations of a formula in a run with symbolic sizes."""
_TEXT = 120
"""The largest number of characters of a line that is quoted."""
