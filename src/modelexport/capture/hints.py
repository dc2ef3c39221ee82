"""What to do when a front end fails on something that no front end supports, decided by objects, not by text."""

from __future__ import annotations

import traceback

import onnx_ir as ir
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from modelexport.errors import UsageError


def way_out(model: nn.Module, error: BaseException) -> str:
    """What the user can do about a failed capture, as the end of a sentence; empty if that is not known."""
    if any(_is_packed(module) for module in model.modules()):
        return "; weights are quantized and packed: export the model before quantizing it, and quantize the file"
    if _has_local(error, PackedSequence):
        return "; packed sequences cannot be exported: give the model padded sequences with a mask"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "; a module is a ScriptModule: export the model as it was before torch.jit.script"
    return ""


def check_returned(graph: ir.Model) -> None:
    """Refuse a graph without outputs.

    Raises:
        UsageError: The model returns no tensor.
    """
    if not graph.graph.outputs:
        raise UsageError("the model returns no tensor, so there is nothing to export: let forward return a tensor")


def _is_packed(module: nn.Module) -> bool:
    """Whether a module has a TorchScript object instead of its weights, as quantized modules do."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return any(isinstance(value, torch.ScriptObject) for value in vars(module).values())


def _has_local(error: BaseException | None, kind: type) -> bool:
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if any(isinstance(value, kind) for value in frame.f_locals.values()):
                return True
        error = error.__cause__ or error.__context__
    return False
