"""The parts of a model whose state is more than keys and values: a prompt, and one token after it.

The forms that compute what the model does are tried in order. A prompt of any length, where the model's code does the
same for all lengths. Every token by itself, from a state of zeros. The same with a first token without a state, where a
model begins with another one. Tokens that are padding keep a state as it is, or do not, as in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line
from modelexport.errors import CaptureError
from modelexport.format.package_manifest import Generation, Rows, Start
from modelexport.packages.generation_loop import BATCH, PAST, PAST_SEQUENCE, PRESENT, SEQUENCE, TokenLoop
from modelexport.packages.model_parts import ModelPart, with_forward
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.dispatch_modes import OperationMode
from modelexport.pytorch.nested_tensors import as_array
from modelexport.tools.generate.greedy_reference import Reference, first_difference, generate_greedily
from modelexport.tools.generate.observed_state import State, growing, named_tensors, with_tensors
from modelexport.tools.generate.prompts import prompts_like

_LONG = (9, 7, 70, 299)
"""Lengths of prompts with which the operations of a model are compared: chunks of scans have up to 256 tokens."""
_LENGTHS: Mapping[Rows, Sequence[Sequence[int]]] = {
    "padded": ((3, 9, 1, 6),),
    "equal": ((6, 6, 6), (1,), (9,)),
    "one": ((6,), (1,), (9,)),
}
"""The lengths of the prompts in the batches with which forms are tried."""
_TOKENS_OF_STATES = 3
_ROWS: Mapping[Rows, tuple[str, ...]] = {
    "equal": ("the prompts of a batch have one length: the model computes something else for padded rows",),
    "one": ("takes one prompt at a time: the model computes something else for several rows",),
}


@dataclass(frozen=True)
class Form:
    """How prompts and tokens run."""

    what: str
    prefill: int | None = None
    """The tokens of a first part: 0 for any number; ``None``: there is none."""
    padding: int = 0
    """How much padding the first part puts before a prompt, so that none is too short for the model's code."""
    holds: bool = False
    """Whether a token of padding keeps the state of its row as it is."""


def _run(
    state: State,
    model: nn.Module,
    began: Mapping[str, Any],
    inputs: Mapping[str, Any],
    cache: Any,
    held: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits and the tensors of the state, from tokens and a state.

    Args:
        began: The arguments of such a call in ``generate``.
        inputs: Those that are inputs; what the call did not have is left out.
        cache: The state.
        held: The tensors of modules.
    """
    flags = {name: value for name, value in began.items() if isinstance(value, bool) and name != "return_dict"}
    taken = {name: value for name, value in inputs.items() if began.get(name) is not None}
    passed = {} if cache is None else {state.argument: cache}
    with growing(), ExitStack() as stack:
        for name, (path, attribute) in state.held.items():
            stack.enter_context(attribute_set(model.get_submodule(path), attribute, held.get(name)))
        output = type(model).forward(model, **flags, **taken, **passed)
        present = named_tensors(output.get(state.argument, cache))
        present |= {name: getattr(model.get_submodule(path), key) for name, (path, key) in state.held.items()}
    return output["logits"], {name: tensor for name, tensor in present.items() if name in state.axes}


def _run_prompt(state: State, padding: int, model: nn.Module, /, **inputs: torch.Tensor) -> dict[str, Any]:
    """The first tokens, without a state."""
    for name in state.of_text if padding else ():
        zeros = torch.zeros_like(inputs[name][:, :1].expand(-1, padding, *inputs[name].shape[2:]))
        inputs[name] = torch.cat([zeros, inputs[name]], 1)
    carried = {name: inputs[name][:, -1:] for name in state.carried}
    before = with_tensors(state.prompt.get(state.argument), {})
    logits, present = _run(state, model, state.prompt, inputs, before, {})
    if padding:
        logits = logits[:, padding:]
        present = {
            name: tensor.narrow(axis, padding, tensor.shape[axis] - padding)
            if (axis := state.past_axis(name))
            else tensor
            for name, tensor in present.items()
        }
    return {"logits": logits, PRESENT: present | carried}


def _run_step(state: State, holds: bool, model: nn.Module, /, **inputs: Any) -> dict[str, Any]:
    """One more token of each row."""
    past = inputs.pop(PAST)
    for name, sizes in state.axes.items():
        for size, actual in zip(sizes, past[name].shape, strict=True):
            torch._check(not isinstance(size, int) or actual == size)  # a capture leaves unread sizes open
    copies = {name: tensor.clone() for name, tensor in past.items()}
    carried = {name: copies.pop(name) for name in state.carried}
    cache = with_tensors(state.template, copies)
    logits, present = _run(state, model, state.step, inputs | carried, cache, copies)
    if holds:
        new = inputs["attention_mask"][:, -1] != 0
        for name, sizes in state.axes.items():
            if PAST_SEQUENCE not in sizes:
                rows = new.view([-1 if size == BATCH else 1 for size in sizes])
                present[name] = torch.where(rows, present[name], past[name])
    return {"logits": logits, PRESENT: present | carried}


def other_state_parts(model: nn.Module, state: State, notes: tuple[str, ...] = ()) -> list[list[ModelPart]]:
    """The parts of each form that computes what the model does, the best first.

    A model that computes something else for padded rows, or for several, has forms for less.
    """
    reasons, padding = [], _padding(model, state)
    forms = [] if padding is None else [Form(what="the prompt at once", prefill=0, padding=padding)]
    if not state.example.beside:
        forms += [
            Form(what="every token by itself, and padding keeps the state", holds=True),
            Form(what="every token by itself"),
            Form(what="every token by itself, the first without a state", prefill=1),
        ]
    for rows, batches in _LENGTHS.items():
        references = [
            generate_greedily(model, prompts_like(model, state.example, lengths, 1), _TOKENS_OF_STATES)
            for lengths in batches
        ]
        right_forms = []
        for form in forms:
            parts = _parts(model, state, form, rows, notes)
            differences = (_difference(model, state, form, parts, reference) for reference in references)
            reason = next(filter(None, differences), "")
            if not reason:
                right_forms.append(parts)
            reasons.append(f"{form.what}: {reason}")
        if right_forms:
            return right_forms
    problem = f"no loop over its tokens computes what {type(model).__name__}.generate does ({'; '.join(reasons[:3])})"
    raise CaptureError(f"{problem}; use --parts whole", reason=problem)


def _padding(model: nn.Module, state: State) -> int | None:
    """How much longer than one token a prompt has to be for the model to run the same operations as on a long one.

    Returns:
        ``None`` if there is no such length: a loop in Python over tokens, or over chunks of them.
    """
    head, (usual_length, *others) = state.example.head, _LONG
    usual = _operations(model, state, head + usual_length)
    for length in others:
        try:
            if _operations(model, state, head + length) != usual:
                return None
        except Exception:  # whatever the model's own code raises: it takes no prompt of this length
            break
    lengths = range(1, usual_length + 1)
    return next(length for length in lengths if _operations(model, state, head + length) == usual) - 1


def _operations(model: nn.Module, state: State, length: int) -> list[str]:
    """The operations of a prompt of a length, in their order."""
    part = with_forward(model, partial(_run_prompt, state, 0))
    mode, inputs = _OperationNames(), _prompt_inputs(state, length)
    with untouched(model), mode:
        part(**inputs)
    return mode.seen


class _OperationNames(OperationMode):
    """The names of the operations of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*self.inside(func, args), **(kwargs or {}))


def _prompt_inputs(state: State, length: int) -> dict[str, torch.Tensor]:
    """The inputs of the example prompt with its text repeated to a length, its first row padded."""
    began, head = state.prompt, state.example.head
    at = torch.arange(length)
    at = torch.where(at < head, at, head + (at - head) % (began["input_ids"].shape[1] - head))
    repeated = {name: began[name][:, at] if name in state.of_text else began[name] for name in state.input_sizes}
    mask = torch.ones_like(repeated["input_ids"])
    mask[0, 0] = int(length == 1)
    known = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return repeated | {name: value for name, value in known.items() if name in repeated}


def _parts(model: nn.Module, state: State, form: Form, rows: Rows, notes: tuple[str, ...]) -> list[ModelPart]:
    parts = []
    if form.prefill is not None:
        inputs = _prompt_inputs(state, form.prefill or state.prompt["input_ids"].shape[1])
        axes = {
            (name, axis): size
            for name in inputs
            for axis, size in enumerate(state.input_sizes[name])
            if size == BATCH or (size == SEQUENCE and not form.prefill)
        }
        first = with_forward(model, partial(_run_prompt, state, form.padding))
        parts.append(ModelPart("prefill", first, inputs, axes=axes, rows=rows))
    began = state.step
    names = ["input_ids", *(name for name in ("attention_mask", "position_ids") if began.get(name) is not None)]
    inputs_of_step = {name: began[name] for name in names}
    if form.holds and "attention_mask" not in inputs_of_step:
        mask = state.prompt["attention_mask"]
        inputs_of_step["attention_mask"] = mask.new_ones(len(mask), mask.shape[1] + 1)
    axes = {
        (name, axis): BATCH
        for name in inputs_of_step
        for axis, size in enumerate(state.step_sizes.get(name, (BATCH,)))
        if size == BATCH
    }
    past = {name: tensor.clone() for name, tensor in state.tensors.items()}
    if "attention_mask" in inputs_of_step:
        lengths = {
            past[name].shape[state.past_axis(name)] for name, sizes in state.axes.items() if PAST_SEQUENCE in sizes
        }
        grows = lengths == {inputs_of_step["attention_mask"].shape[1] - 1}
        axes["attention_mask", 1] = f"{PAST_SEQUENCE} + 1" if grows else f"total_{SEQUENCE}"
    past |= {name: began[name].clone() for name in state.carried}
    for name, sizes in {**state.axes, **dict.fromkeys(state.carried, (BATCH,))}.items():
        axes |= {(f"{PAST}.{name}", axis): size for axis, size in enumerate(sizes) if isinstance(size, str)}
    step = with_forward(model, partial(_run_step, state, form.holds))
    if form.prefill != 0:
        notes += (f"a prompt runs token by token, as the model's code does: {form.what}",)
    if state.example.beside:
        notes += (f"a prompt has an image or a sound, which its first part takes: {', '.join(state.example.beside)}",)
    notes += _ROWS.get(rows, ())
    parts.append(ModelPart("decode", step, {**inputs_of_step, PAST: past}, axes=axes, notes=notes, rows=rows))
    return parts if rows != "one" else [_of_one_row(part) for part in parts]


def _of_one_row(part: ModelPart) -> ModelPart:
    """A part whose batch is one row."""
    arguments = dict(part.inputs)
    past = {name: tensor[-1:] for name, tensor in arguments.pop(PAST, {}).items()}
    batches = {name: axis for (name, axis), size in part.axes.items() if size == BATCH}
    inputs = {
        name: tensor.narrow(axis := batches.get(name, 0), tensor.shape[axis] - 1, 1)
        for name, tensor in arguments.items()
    }
    axes = {place: size for place, size in part.axes.items() if size != BATCH}
    return replace(part, inputs=inputs | ({PAST: past} if past else {}), axes=axes)


def _difference(model: nn.Module, state: State, form: Form, parts: Sequence[ModelPart], reference: Reference) -> str:
    """What a form computes otherwise than the model, in PyTorch; empty if nothing."""
    try:
        with untouched(model):
            return first_difference(_Modules(state, form, parts), reference)
    except Exception as error:  # whatever the model's own code raises
        return error_line(error)


class _Modules(TokenLoop):
    """The loop over the modules of a form, before they are captured."""

    def __init__(self, state: State, form: Form, parts: Sequence[ModelPart]) -> None:
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.tensors.items()}
        start = {
            f"{PAST}.{name}": Start(dtype=dtypes[name], shape=[0 if size == PAST_SEQUENCE else size for size in sizes])
            for name, sizes in state.axes.items()
        }
        self._parts = {part.name: part for part in parts}
        super().__init__(
            Generation(
                tokens="input_ids",
                first=parts[0].name,
                step="decode",
                one_by_one=[name for name in self._parts if name == "decode" or form.prefill == 1],
                start=start if form.prefill is None else {},
                mask="attention_mask",
                positions="position_ids",
            )
        )

    def run(self, part: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a part."""
        inputs: dict[str, Any] = {}
        for name in self._parts[part].inputs:
            if name == PAST:
                inside = (key for key in values if key.startswith(f"{PAST}."))
                inputs[name] = {key.removeprefix(f"{PAST}."): torch.from_numpy(values[key]) for key in inside}
            else:
                inputs[name] = torch.from_numpy(np.ascontiguousarray(values[name]))
        self.taken[part] = {}
        output = self._parts[part].model(**inputs)
        present = {f"{PAST}.{name}": as_array(tensor) for name, tensor in output[PRESENT].items()}
        return {"logits": as_array(output["logits"]), **present}
