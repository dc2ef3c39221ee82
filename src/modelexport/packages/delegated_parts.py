"""The parts of a model whose own ``generate`` prepares the inputs of one of its modules, and lets that generate.

BLIP encodes images, changes the prompt, and its text decoder generates. A first part does what is before.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from modelexport.errors import CaptureError
from modelexport.packages.generation_loop import BATCH, PROMPT, SEQUENCE
from modelexport.packages.greedy_reference import Delegation, given_to
from modelexport.packages.model_parts import ModelPart, with_forward
from modelexport.packages.observed_state import TEXT, find_state
from modelexport.packages.other_state_parts import other_state_parts
from modelexport.packages.prompts import PROMPT as TOKENS
from modelexport.packages.prompts import Example


def delegated_parts(model: nn.Module, example: Example, delegation: Delegation) -> list[list[ModelPart]]:
    """The parts in each form that computes what the model does, the best first.

    Raises:
        CaptureError: There is none, or the module's ``generate`` fails, or takes embeddings.
    """
    module, inputs = model.get_submodule(delegation.path), example.inputs
    tensors = {name: value for name, value in delegation.arguments.items() if isinstance(value, torch.Tensor)}
    if "input_ids" not in tensors or "inputs_embeds" in tensors:
        reason = (
            f"{type(model).__name__} lets its module {delegation.path} generate from embeddings, not from tokens alone"
        )
        raise CaptureError(f"{reason}, which a package does not support: use --parts whole", reason=reason)
    if tensors["input_ids"].shape[1] < TOKENS:  # a capture would treat an axis of size one as fixed
        tensors |= {name: tensor[:, :1].expand(-1, TOKENS) for name, tensor in tensors.items() if name in TEXT}
    state = find_state(module, Example(tensors))
    if state is None:
        return []
    again = [
        name
        for name, value in state.prompt.items()
        if name not in TEXT and isinstance(tensor := state.step.get(name), torch.Tensor) and torch.equal(tensor, value)
    ]
    axes = {(name, 0): BATCH for name in inputs}
    axes |= {(name, 1): SEQUENCE for name in inputs if inputs[name].shape[:2] == inputs["input_ids"].shape}
    first = ModelPart("encoder", with_forward(model, partial(_prepare, delegation.path)), inputs, axes=axes)
    return [
        [first, *(replace(part, model=_around(model, delegation.path, part.model)) for part in parts)]
        for parts in other_state_parts(module, replace(state, again=tuple(again)))
    ]


def _prepare(path: str, model: nn.Module, /, **inputs: torch.Tensor) -> dict[str, Any]:
    """The tokens that the module takes, and what it takes besides."""
    tensors = {name: value for name, value in given_to(path, model, inputs).items() if isinstance(value, torch.Tensor)}
    tensors.setdefault("attention_mask", torch.ones_like(tensors["input_ids"]))
    prompt = {name: tensors.pop(name).clone() for name in TEXT if name in tensors}
    return {**tensors, PROMPT: prompt}


def _around(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """A model with another module in place of one of its own, which is all that its ``forward`` runs."""
    return with_forward(
        _with_module(model, path, module), lambda whole, /, **inputs: whole.get_submodule(path)(**inputs)
    )


def _with_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    changed, (name, _, rest) = copy.copy(model), path.partition(".")
    changed._modules = dict(model._modules)
    changed._modules[name] = _with_module(model.get_submodule(name), rest, module) if rest else module
    return changed
