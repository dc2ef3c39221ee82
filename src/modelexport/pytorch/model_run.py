"""A recorded run of a model: the tensors that each call gets and returns, and the results of its operations."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.calls import ROOT, ModuleCall, Side
from modelexport.core.limits import BATCH_BYTES
from modelexport.core.messages import collected
from modelexport.errors import UsageError
from modelexport.pytorch.bodies import Bodies
from modelexport.pytorch.dispatch_modes import RUN_FUNCTIONS, OperationMode
from modelexport.pytorch.exact_run import AlwaysInFloat64, tensors_of
from modelexport.pytorch.lazy_weights import lend_weights
from modelexport.pytorch.private_torch import tree_map, version_of
from modelexport.pytorch.recorder import CallRecorder, Exchange, as_they_are
from modelexport.pytorch.traced import Guard, untouched
from modelexport.pytorch.values import (
    NamedTensors,
    as_stored,
    has_elements,
    output_tensors,
    run_arguments,
    tensors_in,
)
from modelexport.runtime.choices import Choice, chosen_axis
from modelexport.runtime.evidence import Computed, Decision, Number, SeenTensor
from modelexport.runtime.fingerprints import Fingerprint, fingerprint_of
from modelexport.weights.sources import Weights

_SEEN = "_modelexport_fingerprint"
_COMPARED = "_modelexport_compared"

_WITHOUT_VALUES = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operations that give memory as it is: what another one left there was not computed again."""


class ModelRun:
    """One recorded run of a model.

    Attributes:
        outputs: The outputs of the model, as arrays.
        parents: Every call to the call that it ran in.
        tensors: The tensors that calls got and returned.
        computed: The results of operations; empty if PyTorch cannot record them.
        choices: The places where operations took the largest or the smallest of some scores; empty likewise.
        decisions: The conditions of branches; empty likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any] | Sequence[Any],
        weights: Weights | None = None,
        *,
        parameters: Mapping[str, Any] | None = None,
        never_called: Collection[str] = (),
        operations: bool = True,
        right: ModelRun | None = None,
        seed: int | None = None,
        bodies: bool = False,
    ) -> None:
        """Run a model; its state is restored afterwards.

        Args:
            weights: The places of the weights of a model that was built without them: each module gets its own.
            parameters: Other values for some ``state_dict`` entries, for this run.
            never_called: Paths of modules that are never called, with ``weights``.
            operations: Whether to record single operations.
            right: Another run, whose tensors each call gets, and gives to others; what it got and gave is recorded.
            seed: The seed of the model's random numbers; by default those of the caller's state.
            bodies: The model may have branches and loops of PyTorch's operators, whose calls are recorded, too.
        """
        self._model, self._inputs, self._weights, self._parameters = model, inputs, weights, parameters or {}
        self._never_called, self._seed = never_called, seed
        self._in_float64: dict[bool, ModelRun | None] = {}
        self.tensors: list[SeenTensor] = []
        self.computed: list[Computed] = []
        self.choices: list[Choice] = []
        self.decisions: list[Decision] = []
        self._arrays: dict[str, Any] = {}
        self._contents: dict[int, tuple[weakref.ref[torch.Tensor] | None, int | None, str]] = {}
        """Tensors by identity, with the state of their memory."""
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers: dict[ModuleCall, ModuleCall | None] = {}
        # Not everything can be recorded in all code; at least the boundaries of calls outside of branches are.
        exchange = right.given_to_calls() if right is not None else as_they_are
        ways = [(operations, bodies, bodies), *([(operations, True, False)] if bodies else []), (False, False, False)]
        for way in dict.fromkeys(ways):
            self.tensors, self.computed, self.choices, self.decisions = [], [], [], []
            self._recorder = CallRecorder(model, watch=self._watch, exchange=exchange)
            try:
                self.outputs = self._run(*way)
                break
            except Exception:
                if way == ways[-1]:
                    raise
        self._opened = way[1:]
        self._number()

    def array(self, content: str) -> Any:
        """The elements of a content, flat."""
        return self._arrays[content]

    def given_to_calls(self) -> Exchange:
        """Puts the tensors of this run in place of those of another one."""
        return tensors_of(self, {call: one for one, call in self._numbers.items() if call is not None})

    def _number(self) -> None:
        """Give the calls in branches and loops the numbers that they have in a file."""
        self._numbers = self._recorder.numbers()
        numbers = self._numbers

        def numbered(call: ModuleCall | None) -> ModuleCall | None:
            return numbers.get(call, call) if call is not None else None

        if numbers:
            self.tensors = [t._replace(call=call) for t in self.tensors if (call := numbered(t.call)) is not None]
            self.computed = [c._replace(call=call) for c in self.computed if (call := numbered(c.call)) is not None]
            self.choices = [c._replace(call=call) for c in self.choices if (call := numbered(c.call)) is not None]
            self.decisions = [d._replace(call=call) for d in self.decisions if (call := numbered(d.call)) is not None]
        self.parents = {
            call: numbered(one.parent) for one in self._recorder.seen if (call := numbered(one.call)) is not None
        }

    def _run(self, operations: bool, bodies: bool, opened: bool) -> list[Any]:
        args, kwargs = run_arguments(self._inputs)
        with contextlib.ExitStack() as stack:
            # A module without weights cannot overwrite any.
            has_weights = self._weights is None
            guard = stack.enter_context(
                untouched(self._model, runs=has_weights, guarded=operations, in_mode=True, bodies=bodies)
            )
            if self._seed is not None:
                torch.manual_seed(self._seed)
            if self._weights is not None:
                stack.enter_context(lend_weights(self._model, self._weights, self._never_called))
            entries = _entries(self._model)
            for key, tensor in self._parameters.items():
                entries[key].data = tensor
            stack.enter_context(collected())
            stack.enter_context(self._recorder.attached())
            if bodies:
                stack.enter_context(Bodies(self._recorder, opened=opened))
            if operations:
                own = [] if self._weights is not None else list(self._model.parameters())
                stack.enter_context(_Operations(self._recorder, self.computed, self._choose, self._decide, own, guard))
            result = self._model(*args, **kwargs)
            self._see_returned(output_tensors(result))
            return [as_array(tensor) for _, tensor in tensors_in(result)]

    def _see_returned(self, tensors: NamedTensors) -> None:
        """The outputs of the root are what the model returns: its class may do more around ``forward``."""
        seen = [tensor for tensor in self.tensors if tensor.call == ROOT and tensor.side == "outputs"]
        dense = [(name, tensor) for name, tensor in tensors if has_elements(tensor)]
        if [tensor.content for tensor in seen] != [self._content(as_stored(tensor)) for _, tensor in dense]:
            self.tensors = [tensor for tensor in self.tensors if tensor not in seen]
            self._watch(ROOT, "outputs", dense)

    def _watch(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> None:
        for name, complex_or_real in tensors:
            tensor = as_stored(complex_or_real)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors.append(SeenTensor(call, side, name, self._content(tensor), dtype, tuple(tensor.shape)))

    def _choose(self, call: ModuleCall, scores: torch.Tensor, indices: torch.Tensor) -> None:
        if chosen_axis(as_array(scores), as_array(indices)) is not None:
            shapes = tuple(scores.shape), tuple(indices.shape)
            self.choices.append(Choice(call, self._content(scores), shapes[0], self._content(indices), shapes[1]))

    def _decide(self, call: ModuleCall, numbers: Sequence[torch.Tensor]) -> None:
        def kept(tensors: Sequence[torch.Tensor]) -> tuple[Number, ...]:
            return tuple(
                Number(self._content(one), str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors
            )

        results = [[one for one in _leaves(value) if isinstance(one, torch.Tensor)] for value in self._recorder.results]
        self.decisions.append(Decision(call, kept(numbers), tuple(map(kept, results))))
        self._recorder.results = []

    def _content(self, tensor: torch.Tensor) -> str:
        # What a call returns, its caller mostly passes on as it is.
        version = version_of(tensor)
        seen, then, content = self._contents.get(id(tensor), (None, None, ""))
        if seen is not None and seen() is tensor and version is not None and then == version:
            return content
        array = np.ascontiguousarray(as_array(tensor)).reshape(-1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        content = self._name_of(dtype, array)
        if content not in self._arrays:
            self._arrays[content] = self._kept(content, array)
        self._contents[id(tensor)] = weakref.ref(tensor), version, content
        return content

    def _name_of(self, dtype: str, array: Any) -> str:
        """A digest of an array, with a number if another one has the same; the name of an equal one, if there is one.

        A checksum is several times as fast as a hash that has no such twins.
        """
        own = array.view(np.uint8)
        name = digest = f"{dtype}:{array.size:x}-{zlib.crc32(own.data):08x}"
        number = 0
        while name in self._arrays and not np.array_equal(self._arrays[name].view(np.uint8), own):
            number += 1
            name = f"{digest}-{number}"
        return name

    def _kept(self, content: str, array: Any) -> Any:
        """A copy, since a later module may work in place: in memory, or on disk if there is too much."""
        self._bytes += array.nbytes
        if self._bytes <= BATCH_BYTES:
            return array.copy()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="modelexport-")
        file = Path(self._folder.name) / str(len(self._arrays))
        array.tofile(file)
        return np.memmap(file, dtype=array.dtype, mode="r")

    def in_float64(self, *, from_right_values: bool) -> ModelRun | None:
        """The same run in float64, to measure rounding; ``None`` if the model does not run in float64.

        Args:
            from_right_values: Each call gets its inputs of this run, so that only its own rounding shows; otherwise the
                rounding of all calls adds up.
        """
        if from_right_values not in self._in_float64:
            self._in_float64[from_right_values] = self._run_in_float64(from_right_values)
        return self._in_float64[from_right_values]

    def _run_in_float64(self, from_right_values: bool) -> ModelRun | None:
        if self._weights is not None:
            return None
        inputs = tree_map(_widened, self._inputs)
        try:
            model = copy.deepcopy(self._model)
            entries = _entries(model)
            for key, tensor in self._parameters.items():
                entries[key].data = tensor
            model = model.double()
            with AlwaysInFloat64():
                right = self if from_right_values else None
                run = ModelRun(model, inputs, operations=False, right=right, bodies=self._opened[0])
        except Exception:  # some code requires float32; the caller then goes without this run
            return None
        return run if len(run.tensors) == len(self.tensors) else None


def _entries(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _Operations(OperationMode):
    """Records the fingerprint of each operation's result, and reports those that may choose among scores."""

    def __init__(
        self,
        recorder: CallRecorder,
        computed: list[Computed],
        choose: Callable[[ModuleCall, torch.Tensor, torch.Tensor], None],
        decide: Callable[[ModuleCall, Sequence[torch.Tensor]], None],
        parameters: Collection[torch.Tensor],
        guard: Guard | None,
    ) -> None:
        super().__init__()
        self._guard = guard
        self._recorder, self._computed, self._choose, self._decide = recorder, computed, choose, decide
        self._parameters = {_memory(parameter) for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._guard is not None:
            self._guard.before(func, args, kwargs)
        output = func(*self.inside(func, args), **kwargs)
        call = self._recorder.running
        if call is None or getattr(func, "overloadpacket", None) in _WITHOUT_VALUES:
            return output
        given = list(_leaves((args, kwargs)))
        if func is torch.ops.higher_order.cond:
            self._decide(call, _compared(args[0]))
        taken = [getattr(value, _SEEN, (None, None))[0] for value in given]
        tensors = [value for value in given if isinstance(value, torch.Tensor) and has_elements(value)]
        scores = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        for tensor in _leaves(output):
            if not isinstance(tensor, torch.Tensor) or not has_elements(tensor):
                continue
            if tensor.dtype is torch.bool and tensor.numel() == 1:
                setattr(tensor, _COMPARED, [number for one in given for number in _compared(one)])
            if scores is not None and tensor.dtype is torch.long:
                self._choose(call, scores, tensor)
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 3:
                if (memory := _memory(tensor)) is not None and memory in self._parameters:
                    continue  # transposed for the product: as much to read as the whole model
                fingerprint = _shared(tensor, tensors) or fingerprint_of(as_array(tensor))
                if fingerprint.telling and not _is_parameter(fingerprint, tensors, tensor):
                    new = not any(one is not None and fingerprint.same(one) for one in taken)
                    self._computed.append(Computed(call, fingerprint, new, chosen=func in RUN_FUNCTIONS))
                setattr(tensor, _SEEN, (fingerprint, version_of(tensor)))
            if tensor._base is not None and any(tensor is value for value in given):
                self._record_written_through(call, tensor._base)
        return output

    def _record_written_through(self, call: ModuleCall, base: torch.Tensor) -> None:
        """Record a whole tensor after a write through a view of it: a graph, which has no views, makes it anew."""
        if base.is_floating_point() and base.numel() > 3 and has_elements(base):
            fingerprint = fingerprint_of(as_array(base))
            if fingerprint.telling:
                self._computed.append(Computed(call, fingerprint, new=True))


def _compared(value: Any) -> list[torch.Tensor]:
    """The numbers from which a condition was computed by comparisons; a number itself."""
    if not isinstance(value, torch.Tensor) or not has_elements(value):
        return []
    return getattr(value, _COMPARED, []) if value.dtype is torch.bool else [value]


def _leaves(value: Any) -> Iterator[Any]:
    """What an operation takes or gives, without its lists: several times faster than PyTorch's own."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    else:
        yield value


def _memory(tensor: torch.Tensor) -> int | None:
    """Where the elements of a tensor and of all its views are."""
    return tensor.untyped_storage().data_ptr() or None if tensor.layout is torch.strided else None


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


def as_array(tensor: torch.Tensor) -> Any:
    """A tensor as a NumPy array, as a file has it: complex numbers are pairs of numbers, in a last axis.

    ``bfloat16``, which NumPy does not have, uses ``ml_dtypes``.

    Raises:
        UsageError: The tensor is nested or sparse.
    """
    if not has_elements(tensor):
        raise UsageError("a tensor of the model is nested or sparse, which no ONNX file can have: use dense ones")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = as_stored(tensor)
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
