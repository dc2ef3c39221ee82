"""What to do when a front end fails on something that no front end supports."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from modelexport.capture.quantizers_in_training import STILL_OBSERVED
from modelexport.core.calls import ModuleCall
from modelexport.core.text import chained, name_of_code
from modelexport.errors import CaptureError, UsageError
from modelexport.pytorch.private_torch import DynamicOutputShapeException


def way_out(model: nn.Module, error: BaseException) -> str:
    """What the user can do about a failed capture, as the end of a sentence; empty if that is not known."""
    modules = list(model.modules())
    hints = {
        "; weights are quantized and packed: export the model before quantizing it, and quantize the file": any(
            map(_is_packed, modules)
        ),
        f"; a module {STILL_OBSERVED}": any(
            name.endswith("observer_enabled") and bool(flag.any()) for name, flag in model.named_buffers()
        ),
        "; of packed sequences, those are exported that forward packs itself, by the front end dynamo": _has_local(
            error, PackedSequence
        ),
        f"; {_SCRIPTED}": any(isinstance(module, torch.jit.ScriptModule) for module in modules),
        "; the size of its result depends on the values of the inputs: leave it out of forward, as a loss that "
        "only training needs, and compute it from the model's outputs": any(
            isinstance(cause, DynamicOutputShapeException) for cause in chained(error)
        ),
        "; a trace cannot see through torch.compile: compile the model after the export": "dynamo-optimized"
        in str(error),
    }
    return next((hint for hint, applies in hints.items() if applies), "")


_SCRIPTED = (
    "a module is a ScriptModule with loops, or called with several sizes: export the model as it was before "
    "torch.jit.script"
)


def failure(error: BaseException, call: ModuleCall | None, reason: str, explanation: str) -> CaptureError:
    """The error of a front end: what failed, the call, the model's own line of code, and what is told of the reason."""
    where = f" in {call}" if call is not None else ""
    line = line_of(traceback.extract_tb(error.__traceback__))
    explanation = _SCRIPTED if explanation.endswith(_SCRIPTED) else explanation  # its reasons are of the interpreter
    problem = f"{type(error).__name__}{where}{f' ({line})' if line else ''}: {explanation}"
    return CaptureError(problem, address=None if call is None else call.address, reason=reason)


def line_of(frames: traceback.StackSummary) -> str:
    """The innermost line of the model's own code on a stack: ``net.py:12``; empty if there is none."""
    lines = [f"{name_of_code(frame.filename)}:{frame.lineno}" for frame in frames if not is_of_exporter(frame)]
    return lines[-1] if lines else ""


def is_of_exporter(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of PyTorch's code or of what exports a model."""
    return frame.filename.startswith(_NOT_THE_MODEL)


_NOT_THE_MODEL = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))
"""Folders of code that no model is in."""


def capture_reason(cause: BaseException) -> str:
    """Why a capture failed, in as many lines as fit a screen."""
    if isinstance(cause, GuardOnDataDependentSymNode):
        return (
            f"data-dependent: Python decides by values that are computed from the inputs ({cause.cond}); "
            f"torch.where and torch.cond decide in the graph"
        )
    text = str(cause).partition("\nWhile executing ")[0]  # what torch.fx adds of the node that it ran
    text = text.partition("\nException raised from ")[0]  # the stack of C++
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(line[:200] for line in lines[:_REASON_LINES])


def in_one_line(reason: str) -> str:
    """A reason as the part of a line; the rest of a long one is in the chained exception (``--debug``)."""
    text = " ".join(reason.split()).removesuffix(".")
    return text if len(text) <= _LINE_CHARACTERS else f"{text[:_LINE_CHARACTERS].rpartition(' ')[0]} ..."


def translated_node(error: BaseException) -> torch.fx.Node | None:
    """The node that was decomposed or translated when an export failed, read from the stack frame."""
    for chain in chained(error):
        for frame, _ in traceback.walk_tb(chain.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node) and frame.f_globals.get("__name__", "").startswith(_WORKS_ON_NODES):
                return node
    return None


_WORKS_ON_NODES = (torch.onnx.__name__, torch.fx.interpreter.__name__)
OTHER_OPERATIONS = "; compute it with other operations in the model's code"
"""What to do about an operation that a front end has no translation for."""
_LINE_CHARACTERS = 400
_REASON_LINES = 12
"""What fits a screen; the rest is in the chained exception."""


def check_returned(graph: ir.Model) -> None:
    """Refuse a graph without outputs."""
    if not graph.graph.outputs:
        raise UsageError("the model returns no tensor, so there is nothing to export: let forward return a tensor")


def _is_packed(module: nn.Module) -> bool:
    """Whether a module has a TorchScript object instead of its weights, as quantized modules do."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return any(isinstance(value, torch.ScriptObject) for value in vars(module).values())


def _has_local(error: BaseException, kind: type) -> bool:
    """Whether a function that an exception came through has a variable of this type."""
    frames = (frame for cause in chained(error) for frame, _ in traceback.walk_tb(cause.__traceback__))
    return any(isinstance(value, kind) for frame in frames for value in frame.f_locals.values())
