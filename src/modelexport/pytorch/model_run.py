"""A model run for the values that its modules get and return, under their names in a file."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelexport.core.calls import CallTree, ModuleCall, Side, TensorSpec
from modelexport.core.limits import BATCH_BYTES
from modelexport.core.messages import collected
from modelexport.format import documents
from modelexport.pytorch.lazy_weights import with_weights
from modelexport.pytorch.recorder import CallRecorder
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import NamedTensors, run_arguments, tensor_specs, tensors_in
from modelexport.weights.sources import Weights


class ModelRun:
    """Runs a model for the values that its modules get and return, under their names in the file.

    Attributes:
        outputs: What the model returns.
        available: The values that it computes as they were captured, with their element types and shapes. It may run
            otherwise: an exporter replaces implementations, and a module may be called for each group of tokens here
            and once there.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any] | Sequence[Any],
        sidecar: documents.Hierarchy,
        weights: Weights | None = None,
    ) -> None:
        self._model, self._inputs, self._bytes = model, inputs, 0
        self._weights = weights
        self._never_called = {module.path for module in sidecar.modules if not module.calls}
        self._tensors = {
            (call.address, side, tensor.name): tensor
            for call in sidecar.calls
            for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs))
            for tensor in tensors
        }
        self._held: dict[str, Any] | None = {}
        recorder = CallRecorder(model, watch=self._hold)
        self.outputs = self._run(recorder)
        seen = CallTree(tuple(recorder.seen))
        counts = Counter(traced.call.path for traced in seen)
        captured = Counter(ModuleCall.parse(call.address).path for call in sidecar.calls if call.enter is not None)
        self.available = {
            tensor.value: (spec.dtype, tuple(int(size) for size in spec.shape))
            for call in sidecar.calls
            if (key := ModuleCall.parse(call.address)) in seen and counts[key.path] == captured[key.path]
            for tensors, specs in ((call.inputs, seen[key].inputs), (call.outputs, seen[key].outputs))
            # By name: a model may hand its modules a mask only while it is captured.
            for tensor, spec in _of_one_name(tensors, specs)
            if tensor.value is not None and _is_like(tensor, spec)
        }

    def _run(self, recorder: CallRecorder) -> list[Any]:
        args, kwargs = run_arguments(self._inputs)
        with contextlib.ExitStack() as stack:
            # A module without weights of its own has none that it could overwrite.
            stack.enter_context(untouched(self._model, runs=self._weights is None))
            if self._weights is not None:
                stack.enter_context(with_weights(self._model, self._weights, self._never_called))
            stack.enter_context(collected())
            stack.enter_context(recorder.attached())
            return [as_array(tensor) for _, tensor in tensors_in(self._model(*args, **kwargs))]

    def __call__(self, names: Collection[str]) -> dict[str, Any]:
        if self._held is not None and self._held.keys() >= set(names):
            return {name: self._held[name] for name in names}
        found: dict[str, Any] = {}

        def watch(call: ModuleCall, side: Side, tensors: NamedTensors) -> None:
            for name, tensor in self._named(call, side, tensors):
                if name in names and name not in found:
                    # A copy: a module further on may work in place.
                    found[name] = as_array(tensor.detach().clone())

        self._run(CallRecorder(self._model, watch=watch))
        return found

    def _hold(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> None:
        """Keep the values of the first run, which is then the only one, unless they become too many."""
        for name, tensor in self._named(call, side, tensors):
            if self._held is not None and name not in self._held:
                self._held[name] = as_array(tensor.detach().clone())
                self._bytes += self._held[name].nbytes
                self._held = self._held if self._bytes <= BATCH_BYTES else None

    def _named(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, (_, tensor) in zip(tensor_specs(tensors), tensors, strict=True):
            captured = self._tensors.get((call.address, side, spec.name))
            # A call may get other tensors than when it was captured: a cache that is filled while it runs.
            if captured is not None and captured.value and _is_like(captured, spec):
                yield captured.value, tensor


def _of_one_name(
    tensors: Sequence[documents.CallTensor], specs: Sequence[TensorSpec]
) -> Iterator[tuple[documents.CallTensor, TensorSpec]]:
    by_name = {spec.name: spec for spec in specs}
    return ((tensor, by_name[tensor.name]) for tensor in tensors if tensor.name in by_name)


def _is_like(tensor: documents.CallTensor, spec: TensorSpec) -> bool:
    """Whether a run has a tensor as it was captured; a dynamic size is any."""
    return (tensor.dtype, len(tensor.shape)) == (spec.dtype, len(spec.shape)) and all(
        wanted == size or isinstance(wanted, str) for wanted, size in zip(tensor.shape, spec.shape, strict=True)
    )


def as_array(tensor: torch.Tensor) -> Any:
    """A tensor as NumPy has it; ``bfloat16``, which NumPy does not have, through ``ml_dtypes``."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.resolve_conj().numpy()
