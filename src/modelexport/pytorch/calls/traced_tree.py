"""The traced tree: every module call of one run, recorded by forward hooks."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelexport.core.calls import ROOT, CallTree
from modelexport.core.collected_messages import collected
from modelexport.core.replaced_attributes import attribute_set
from modelexport.errors import InputsError
from modelexport.pytorch.calls.call_recorder import CallRecorder
from modelexport.pytorch.calls.restored_state import KeptState
from modelexport.pytorch.dispatch_modes import OperationMode
from modelexport.pytorch.nested_tensors import memory_of
from modelexport.pytorch.private_torch import FakeTensor, operator_utilities, tree_leaves, written_by

SavedTensors = list[tuple[torch.Tensor, torch.Tensor]]
"""Memory that was, or may be, overwritten, and what it held; the oldest first."""


def trace_calls(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    changed: SavedTensors | None = None,
) -> CallTree:
    """Run the model once, in evaluation mode and without gradients, and return its calls.

    The model's state is restored, also when the run fails: each module's mode and hooks, parameters, buffers,
    ``requires_grad``, random number generators.

    Args:
        args: Positional arguments of ``forward``.
        kwargs: Keyword arguments of ``forward``.
        changed: Parameters that the run overwrites are added to this list.

    Returns:
        The calls in the order in which they began, without those in the branches of ``torch.cond`` and in other code
        that torch compiles. Inputs are named as ``forward``'s arguments (``hidden_states``,
        ``past.0``), outputs by the field of a mapping or dataclass, or ``output``, ``output.0``, ...

    Raises:
        InputsError: The model raised; names the innermost call that was running. The model's exception is chained. Or
            it ran without its hooks.
    """
    recorder = CallRecorder(model)
    with untouched(model, changed=changed), recorder.attached():
        try:
            model(*args, **(kwargs or {}))
        except Exception as error:  # the code of a model may raise anything
            call = recorder.raised_in(error) or ROOT
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            way_out = without_numbers(model, error) or "check the example inputs"
            raise InputsError(
                f"the model raised {type(error).__name__} while running {call} "
                f"({type(model.get_submodule(call.path)).__name__}): {reason}; {way_out}"
            ) from error
    if not recorder.seen or recorder.seen[0].call != ROOT:
        raise InputsError(
            f"{type(model).__name__} has a __call__ that does not run forward with the hooks of the module: "
            f"let it call super().__call__, or remove it"
        )
    return CallTree(tuple(recorder.seen))


def without_numbers(model: nn.Module, error: BaseException | None) -> str:
    """What to do if a model fails because a weight was never loaded; empty if it fails for another reason."""
    weights = (*model.named_parameters(), *model.named_buffers())
    absent = [name for name, tensor in weights if tensor.is_meta] if "meta" in str(error) else []
    return f"{absent[0]} is on the device meta and has no numbers: load the weights" if absent else ""


@contextmanager
def untouched(
    model: nn.Module,
    *,
    runs: bool = True,
    captures: bool = False,
    masks: bool = True,
    in_mode: bool = False,
    bodies: bool = False,
    changed: SavedTensors | None = None,
    state: ModelState | None = None,
) -> Iterator[Guard | None]:
    """Evaluation mode, no gradients and a separate random state inside the block; the model is restored afterwards.

    What the model compiles with ``torch.compile`` runs as Python in the block, so that its calls are seen. Warnings and
    what packages log, such as torch a traceback of whatever raises in a branch, are collected.

    Args:
        runs: The model computes real values in the block, so it may overwrite its own parameters.
        captures: ``torch.export`` captures the model in the block, which may take the compiler's front end.
        masks: The model computes as it is exported (:func:`as_exported`).
        in_mode: The caller, who has a mode that sees every operation, calls the guard that it gets before each.
        bodies: The bodies of branches and loops run as Python, too, for a caller who has a mode for them.
        changed: Memory to restore afterwards; what the model overwrites in the block is added to it.
        state: What to restore, by default the state before the block. A caller who runs the model many times asks for
            it once: it takes longer than a run that ends early.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise InputsError("the model has lazy parameters, which its first run creates: run it once before this")
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(collected())
        stack.enter_context(torch.no_grad())
        if not captures:
            stack.enter_context(run_as_python(bodies=bodies))
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        changed = [] if changed is None else changed
        stack.enter_context((state or ModelState(model)).restored_after(changed))
        if masks:  # undone first: the state may be one from before these
            stack.enter_context(as_exported(model))
        guard = Guard(tensors, changed) if runs else None
        if guard is not None and not in_mode:
            stack.enter_context(guard)
        yield guard


@contextmanager
def as_exported(model: nn.Module, *, but: str = "") -> Iterator[None]:
    """Inside, a model computes as it is exported: with masks that hide nothing, without fused operators and autocast.

    Args:
        but: One of these that is as users have it: ``mask``, ``fused`` or ``autocast``.
    """
    with ExitStack() as stack:
        if but != "mask":
            stack.enter_context(masks_kept())
        if but != "fused":
            # ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` have a fused operator for evaluation; where a mask
            # hides padding it works on nested tensors.
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        if but != "autocast" and not has_narrow_weights(model):
            # The types that it casts to are those that few runtimes have. A model that has weights of such types may be
            # able to use them only under autocast.
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(attribute_set(torch.autocast, "__enter__", lambda self: self))
            stack.enter_context(attribute_set(torch.autocast, "__exit__", lambda self, *raised: False))
        modules = list(model.modules())
        # Models of transformers compute all experts at once, not in a loop over those that were chosen.
        for module in modules if any(hasattr(part, "has_gate") for part in modules) else ():  # experts have that
            if "eager" in getattr(module, "get_experts_implementation", dict)().values():
                from transformers.exporters.exporter_onnx import use_experts_implementation

                stack.enter_context(use_experts_implementation(module, "grouped_mm"))
        for module in modules:
            if "dynamic" in str(getattr(module, "rope_type", "")) and hasattr(type(module).forward, "__wrapped__"):
                stack.enter_context(attribute_set(module, "forward", partial(_rotary, module)))
        yield


def _rotary(module: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
    """``forward`` of a rotary embedding of transformers that scales with the length: its frequencies are of each run.

    Its own decides by the length in Python, and keeps the frequencies of the longest text so far. The result is the
    same for the first text, and for one that grows.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    layer = {} if layer_type is None else {"layer_type": layer_type}
    kind, prefix = (module.rope_type, "") if layer_type is None else (module.rope_type[layer_type], f"{layer_type}_")
    if "dynamic" not in kind:
        return type(module).forward(module, x, position_ids, **layer)
    length, before = position_ids.max() + 1, getattr(module, f"{prefix}inv_freq")
    longer, _ = ROPE_INIT_FUNCTIONS[kind](module.config, x.device, seq_len=length, **layer)
    usual = getattr(module, f"{prefix}original_inv_freq").to(x.device)
    setattr(module, f"{prefix}inv_freq", torch.where(length > module.original_max_seq_len, longer, usual))
    try:
        return inspect.unwrap(type(module).forward)(module, x, position_ids, **layer)
    finally:
        setattr(module, f"{prefix}inv_freq", before)


@contextmanager
def masks_kept() -> Iterator[None]:
    """Inside, transformers keeps attention masks that hide nothing, because ``is_torchdynamo_exporting`` is true."""
    masking = sys.modules.get("transformers.masking_utils")
    with attribute_set(masking, "is_torchdynamo_exporting", lambda: True) if masking else nullcontext():
        yield


def has_narrow_weights(model: nn.Module) -> bool:
    """Whether a model is in half precision, at least in part; others convert to it and back."""
    return any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())


class Guard(OperationMode):
    """Copies a parameter before the first operation that may write to its memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], changed: SavedTensors) -> None:
        super().__init__()
        self._tensors, self._changed = tensors, changed
        self._copied: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.before(func, args, kwargs)
        return func(*self.inside(func, args), **(kwargs or {}))

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copy the parameters that an operation may write to."""
        for value in tree_leaves(written_by(func, args, kwargs)):
            place = memory_of(value) if isinstance(value, torch.Tensor) else None
            if place is not None and place not in self._copied:
                self._copied.add(place)
                written = [tensor for tensor in self._tensors if memory_of(tensor) == place]
                self._changed.extend((tensor.data, tensor.detach().clone()) for tensor in written)


class ModelState:
    """The state of a model at the time of construction, with the numbers of its buffers."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._model, self._state, parameters = model, KeptState(model), set(model.parameters())
        buffers = [tensor for tensor in self._state.tensors if tensor not in parameters and _has_values(tensor)]
        self._values = [(buffer, buffer.clone()) for buffer in buffers]

    @contextmanager
    def restored_after(self, changed: SavedTensors) -> Iterator[None]:
        """Evaluation mode inside the block; afterwards the model's state and this memory are restored."""
        try:
            for module in self._model.modules():
                if module.training:  # not eval(), which some models override
                    module.training = False
            yield
        finally:
            self._state.restore()
            for tensor, value in [*self._values, *reversed(changed)]:
                if not _equal(tensor, value):
                    tensor.copy_(value)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether tensors are equal; NaN equals NaN."""
    has_nan = first.is_floating_point() or first.is_complex()
    return bool(
        torch.equal(first, second) or (has_nan and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True))
    )


def _has_values(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta and not isinstance(tensor, FakeTensor)


@contextmanager
def run_as_python(*, bodies: bool = False) -> Iterator[None]:
    """Inside, what ``torch.compile`` compiled runs as its Python code: its calls and operations are seen.

    PyTorch compiles the branches of ``torch.cond``, and the bodies of its other operators with nested graphs, when they
    run. That stays as it is, so that modules that are called inside a branch are not recorded as calls of the run.

    Args:
        bodies: These run as Python, too, for a caller who tells their calls from others
            (:class:`modelexport.pytorch.calls.calls_in_branches.Bodies`).
    """
    whole = operator_utilities.setup_compilation_env

    @contextmanager
    def compiling() -> Iterator[object]:
        with whole() as backend, torch.compiler.set_stance("default"):
            yield backend

    with (
        attribute_set(operator_utilities, "setup_compilation_env", whole if bodies else compiling),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
