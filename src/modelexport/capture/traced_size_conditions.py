"""The conditions of sizes of a model that was traced: a trace records none, so the model runs a few times more.

A run with symbolic sizes records them as torch.export does, as far as it gets. Runs with other sizes show what Python
decides by tensors made of sizes (``if torch.arange(n).max() > 5``): other instructions of the model's code run then.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modelexport.capture.recorded_conditions import line_of_code
from modelexport.capture.symbolic_runs import conditions_by_symbols, decides, with_implied
from modelexport.graph.size_bounds import bounds_of
from modelexport.graph.size_conditions import SizeCondition, broken, next_odd, simplified
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.inputs.other_sizes import changeable_sizes, symbol_sizes, too_large, with_sizes
from modelexport.pytorch.nested_tensors import Inputs, run_arguments
from modelexport.pytorch.runs.questions_of_values import is_of_model


def size_conditions_of_trace(model: nn.Module, inputs: Inputs, graph: ir.Model) -> tuple[SizeCondition, ...]:
    """The conditions of the sizes of a traced graph, in its symbols.

    Args:
        inputs: The example inputs; not changed.
        graph: The traced graph.
    """
    recorded = with_implied(model, inputs, graph, conditions_by_symbols(model, inputs, graph))
    known = [condition for condition in recorded if decides(condition)]
    return simplified([*recorded, *_by_instructions(model, inputs, graph, known)])


def _by_instructions(
    model: nn.Module, inputs: Inputs, graph: ir.Model, known: Collection[SizeCondition]
) -> Iterator[SizeCondition]:
    """A condition for each axis with whose other sizes, if the known ones hold, other instructions of the model run."""
    sizes, before = symbol_sizes(inputs, graph), list(changeable_sizes(inputs, graph))
    path = _instructions(model, inputs)

    def deciding(changed: Mapping[str, int]) -> tuple[str, str] | bool | None:
        """The line that decides otherwise, ``None`` if none does; False if the sizes are not accepted."""
        if broken(known, {**sizes, **changed}) or too_large(inputs, graph, {**sizes, **changed}):
            return False
        other = _instructions(model, with_sizes(inputs, graph, {**sizes, **changed}))
        if path is None or other is None:
            return False
        at = next((index for index, both in enumerate(zip(path, other, strict=False)) if both[0] != both[1]), None)
        if at is None and len(path) == len(other):
            return None
        code, _, number = path[(min(len(path), len(other)) if at is None else at) - 1]
        return line_of_code(code, number)

    def decides_alike(symbol: str, size: int) -> bool:
        return deciding({symbol: size}) is None

    changes = (next_odd, lambda n: 4 * n, lambda n: max(n // 2, 1))
    together = [{symbol: change(sizes[symbol]) for symbol in before} for change in changes]
    if not any(deciding(changed) is not None for changed in together if changed):
        return
    for symbol in before:
        size = sizes[symbol]
        values = [size + 1, size + 2, size + 3, size - 1, 2 * size, 2 * size + 1, 4 * size, size // 2]
        tried = {n: deciding({symbol: n}) for n in dict.fromkeys(values) if n > 0}
        lines = [line for line in tried.values() if isinstance(line, tuple)]
        if lines:
            alike = {size: True, **{n: line is None for n, line in tried.items() if line is not False}}
            where, source = lines[0]
            bounds = bounds_of(alike, size, partial(decides_alike, symbol))
            yield SizeCondition(f"{bounds.format(symbol)}", where, source, in_model=True)


_Path = list[tuple[str, int, int]]


def _instructions(model: nn.Module, inputs: Inputs) -> _Path | None:
    """The instructions of the model's code in a run: files, positions and lines. ``None`` if the run fails."""
    path: _Path = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_of_model(frame):
            return None
        # Python 3.13 sends the instructions of frames that are traced when they are asked for.
        frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = trace, True, False
        if event == "opcode":
            path.append((frame.f_code.co_filename, frame.f_lasti, frame.f_lineno))
        return trace

    args, kwargs = run_arguments(inputs)
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 sends instructions if a frame asked before `settrace`
    with untouched(model), torch.no_grad():
        sys.settrace(trace)
        try:
            model(*args, **kwargs)
        except Exception:  # a model may raise anything for sizes that it does not accept
            return None
        finally:
            sys.settrace(before)
    return path
