"""The operations of a recorded run: fingerprints of their results, and those that choose among scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.pytorch.bounding import has_free_bound
from modelexport.pytorch.dispatch_modes import RUN_FUNCTIONS, OperationMode
from modelexport.pytorch.private_torch import version_of
from modelexport.pytorch.random_flow import RandomFlow, leaves
from modelexport.pytorch.recorder import CallRecorder
from modelexport.pytorch.traced import Guard
from modelexport.pytorch.values import as_array, has_elements, memory_of
from modelexport.runtime.evidence import Computed
from modelexport.runtime.fingerprints import Fingerprint, fingerprint_of

_SEEN = "_modelexport_fingerprint"
_COMPARED = "_modelexport_compared"

_WITHOUT_VALUES = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operations that give memory as it is: what another one left there was not computed again."""


class Operations(OperationMode):
    """Records the fingerprint of each operation's result, and reports those that may choose among scores."""

    def __init__(
        self,
        recorder: CallRecorder,
        computed: list[Computed],
        quiet: list[Computed],
        choose: Callable[[ModuleCall, torch.Tensor, torch.Tensor], None],
        decide: Callable[[ModuleCall, Sequence[torch.Tensor]], None],
        parameters: Collection[torch.Tensor],
        guard: Guard | None,
        flow: RandomFlow,
    ) -> None:
        super().__init__()
        self._flow = flow
        self.random_calls: set[ModuleCall] = set()
        """The calls that computed something from random numbers."""
        self._guard = guard
        self._recorder, self._choose, self._decide = recorder, choose, decide
        self._computed, self._quiet = computed, quiet
        self._parameters = {memory_of(parameter) for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._guard is not None:
            self._guard.before(func, args, kwargs)
        states = self._flow.before(func, (args, kwargs))
        output = func(*self.inside(func, args), **kwargs)
        random = not self._recorder.observing and self._flow.after(func, args, kwargs, output, states)
        call = self._recorder.running
        if random and call is not None:
            self.random_calls.add(call)
        if call is None or getattr(func, "overloadpacket", None) in _WITHOUT_VALUES:
            return output
        given = list(leaves((args, kwargs)))
        if func is torch.ops.higher_order.cond:
            self._decide(call, _compared(args[0]))
        taken = [getattr(value, _SEEN, (None, None))[0] for value in given]
        tensors = [value for value in given if isinstance(value, torch.Tensor) and has_elements(value)]
        scores = _scores(tensors)
        for tensor in leaves(output):
            if not isinstance(tensor, torch.Tensor) or not has_elements(tensor):
                continue
            if tensor.dtype is torch.bool and tensor.numel() == 1:
                setattr(tensor, _COMPARED, [number for one in given for number in _compared(one)])
            if scores is not None and tensor.dtype is torch.long:
                self._choose(call, scores, tensor)
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 3:
                if (memory := memory_of(tensor)) is not None and memory in self._parameters:
                    continue  # transposed for the product: as much to read as the whole model
                fingerprint = _shared(tensor, tensors) or fingerprint_of(as_array(tensor))
                if fingerprint.telling and not _is_parameter(fingerprint, tensors, tensor):
                    new = not any(one is not None and fingerprint.same(one) for one in taken)
                    bounded = has_free_bound(func, args, kwargs, tensor, new=new)
                    self._computed.append(Computed(call, fingerprint, new, func in RUN_FUNCTIONS, random, bounded))
                elif not fingerprint.telling:
                    self._quiet.append(Computed(call, fingerprint, new=False, random=random))
                setattr(tensor, _SEEN, (fingerprint, version_of(tensor)))
            if tensor._base is not None and any(tensor is value for value in given):
                self._record_written_through(call, tensor._base, random)
        return output

    def _record_written_through(self, call: ModuleCall, base: torch.Tensor, random: bool) -> None:
        """Record a whole tensor after a write through a view of it: a graph, which has no views, makes it anew."""
        if base.is_floating_point() and base.numel() > 3 and has_elements(base):
            fingerprint = fingerprint_of(as_array(base))
            kept = self._computed if fingerprint.telling else self._quiet
            kept.append(Computed(call, fingerprint, new=fingerprint.telling, random=random))


class Choosing(OperationMode):
    """Reports the operations that may choose among scores, and nothing else."""

    def __init__(
        self, recorder: CallRecorder, choose: Callable[[ModuleCall, torch.Tensor, torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._recorder, self._choose = recorder, choose

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*self.inside(func, args), **kwargs)
        call = self._recorder.running
        if call is None or getattr(func, "overloadpacket", None) in _WITHOUT_VALUES:
            return output
        made = [one for one in leaves(output) if isinstance(one, torch.Tensor) and one.dtype is torch.long]
        given = (one for one in leaves((args, kwargs)) if isinstance(one, torch.Tensor)) if made else ()
        scores = _scores([one for one in given if has_elements(one)])
        if scores is not None:
            for tensor in filter(has_elements, made):
                self._choose(call, scores, tensor)
        return output


def _scores(given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What an operation chooses from, if it does."""
    return next((tensor for tensor in given if tensor.is_floating_point()), None)


def _compared(value: Any) -> list[torch.Tensor]:
    """The numbers from which a condition was computed by comparisons; a number itself."""
    if not isinstance(value, torch.Tensor) or not has_elements(value):
        return []
    return getattr(value, _COMPARED, []) if value.dtype is torch.bool else [value]


def _shared(tensor: torch.Tensor, given: Sequence[Any]) -> Fingerprint | None:
    """The fingerprint of a tensor of which this one is another view of the same elements in the same order."""
    for other in given:
        if (
            isinstance(other, torch.Tensor)
            and other.numel() == tensor.numel()
            and other.dtype is tensor.dtype
            and other.is_contiguous()
            and tensor.is_contiguous()
            and other.data_ptr() == tensor.data_ptr()
            and other is not tensor  # changed in place
        ):
            fingerprint, version = getattr(other, _SEEN, (None, None))
            return fingerprint if version is not None and version == version_of(other) else None
    return None


def _is_parameter(fingerprint: Fingerprint, given: Sequence[Any], result: torch.Tensor) -> bool:
    """Whether a result is a copy of a parameter: one is made before its module runs, while another call is running."""
    alike = (value for value in given if isinstance(value, nn.Parameter) and value.numel() == result.numel())
    return any(fingerprint.same(fingerprint_of(as_array(value))) for value in alike)
