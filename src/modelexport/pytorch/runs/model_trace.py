"""Runs a model in float64 and records what it computes: the trace that a file is compared with.

Rounding in float64 is negligible, so a file that computes the same agrees at every call, whatever the order of its
operations. The numbers are those of the file: weights and inputs as they are, and Python's scalars rounded to
float32, as exporters write them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from modelexport.core.calls import ROOT, ModuleCall, Side
from modelexport.pytorch.calls.call_recorder import CallRecorder
from modelexport.pytorch.calls.calls_in_branches import Bodies
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.checkpoints.lazy_weights import lend_weights
from modelexport.pytorch.dispatch_modes import OperationMode
from modelexport.pytorch.nested_tensors import (
    Inputs,
    NamedTensors,
    as_array,
    as_stored,
    has_elements,
    memory_of,
    output_tensors,
    run_arguments,
)
from modelexport.pytorch.perturbed_weights import entries_of
from modelexport.pytorch.private_torch import schema_of, tensor_leaves, tree_leaves, tree_map, version_of
from modelexport.pytorch.runs.exact_rounding import written_out
from modelexport.pytorch.runs.float64_numbers import (
    HALF,
    ONLY_NARROW,
    as_float,
    as_narrow,
    by_element,
    exact,
    half_type,
    limits_of,
    number_of_kernel,
)
from modelexport.pytorch.runs.products_without_bias import product_without_bias
from modelexport.traces.fingerprints import fingerprint_of
from modelexport.traces.tied_indices import chosen_axis
from modelexport.traces.tolerances import ROUNDED_CONSTANT
from modelexport.traces.trace import Choice, Content, Index, SeenTensor, TensorPlace, Trace
from modelexport.weights.bytes_of_entries import Weights

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_WIDE = {**dict.fromkeys(_NARROW, torch.float64), torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def trace_model(
    model: nn.Module,
    inputs: Inputs,
    *,
    parameters: Mapping[str, torch.Tensor] | None = None,
    weights: Weights | None = None,
    never_called: Collection[str] = (),
    bodies: bool = False,
    calls: bool = True,
    operations: bool = True,
    wide: bool = True,
    kept: Index | None = None,
) -> Trace:
    """Run a model; its state is restored afterwards.

    Args:
        parameters: Other values for some ``state_dict`` entries.
        weights: The places of the weights of a model that was built without them.
        never_called: Paths of modules that are never called, with ``weights``.
        bodies: The model may have branches and loops of PyTorch's operators, whose calls are recorded, too.
        calls: Whether to record what calls get and return, and not only what the model returns.
        operations: Whether to record single operations as well.
        wide: Whether to run in float64, if the model does.
        kept: Arrays; results of operations that are equal to one of these up to rounding are kept, too.

    Returns:
        The trace. Its ``is_float64`` is false if the model does not run in float64, as one that checks its types: it
        ran in its own types, and what it computed is only known to their rounding.
    """
    operations = operations and calls
    attempts = [_How(True, bodies, operations), _How(True, False, operations)] if wide else []
    attempts.append(_How(False, bodies, operations))
    plainest = _How(False, False, False)

    def run(how: _How) -> Trace:
        return _Recording(model, inputs, parameters or {}, weights, never_called, kept or Index(), calls).run(how)

    for how in dict.fromkeys(attempts):
        if how != plainest:
            with contextlib.suppress(Exception):  # the code of the model decides what it allows
                return run(how)
    return run(plainest)  # which raises the model's own error


class _How(NamedTuple):
    """How a model runs; fields as the arguments of :func:`trace_model`."""

    wide: bool
    bodies: bool
    operations: bool


@contextlib.contextmanager
def in_float64(model: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """Inside the block, a model and its gradients are computed in float64 with the numbers of its file. Its weights
    stay float64.

    Yields:
        The inputs in float64.
    """
    recording = _Recording(model, inputs, {}, None, (), Index(), calls=False)
    recording.widen_weights()
    with limits_of(recording.own), _Operations(recording, None, wide=True, operations=False):
        yield tree_map(recording.widened, inputs)


@dataclass
class _Recording:
    """One run of a model; fields as the arguments of :func:`trace_model`."""

    model: nn.Module
    inputs: Inputs
    parameters: Mapping[str, torch.Tensor]
    weights: Weights | None
    never_called: Collection[str]
    kept: Index
    calls: bool

    def __post_init__(self) -> None:
        self.trace = Trace()
        self._known: dict[int, tuple[weakref.ref[torch.Tensor] | None, int | None, Content | None]] = {}
        """Tensors by identity, with the state of their memory."""
        self._recorder = CallRecorder(self.model, watch=self._watch)
        self._own_memory = set() if self.weights is not None else set(map(memory_of, self.model.parameters()))
        self.own = own_type(self.model, self.inputs)
        self.types = {dtype: wide for dtype, wide in _WIDE.items() if dtype is self.own or dtype not in HALF}
        """Types to those of a wide run. Half precision that is not the model's own is rounded there, as in its file."""

    def widened(self, value: Any) -> Any:
        """A narrow tensor in float64; anything else as it is."""
        if isinstance(value, torch.Tensor) and value.dtype in self.types and has_elements(value):
            return value.to(self.types[value.dtype])
        return value

    def widen_weights(self) -> None:
        """Convert the model's weights to float64."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = self.widened(tensor.data)

    def run(self, how: _How) -> Trace:
        trace, (wide, bodies, operations) = self.trace, how
        trace.is_float64 = wide or self.own is torch.float64
        inputs = tree_map(self.widened, self.inputs) if wide else self.inputs
        args, kwargs = run_arguments(inputs)
        with contextlib.ExitStack() as stack:
            guard = stack.enter_context(untouched(self.model, runs=self.weights is None, in_mode=True, bodies=bodies))
            if self.weights is not None:
                stack.enter_context(lend_weights(self.model, self.weights, self.never_called))
            entries = entries_of(self.model) if self.parameters else {}
            for key, tensor in self.parameters.items():
                entries[key].data = tensor
            if wide:
                stack.enter_context(limits_of(self.own))
                if self.weights is None:
                    self.widen_weights()
                self._own_memory.update(map(memory_of, self.model.parameters()))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.calls:
                stack.enter_context(self._recorder.attached())
            if bodies and self.calls:
                stack.enter_context(Bodies(self._recorder))
            stack.enter_context(_Operations(self, guard, wide=wide, operations=operations))
            result = self.model(*args, **kwargs)
            returned = [(name, tensor) for name, tensor in output_tensors(result) if has_elements(tensor)]
            self._see_returned(returned)
            trace.outputs = [as_array(as_stored(tensor)) for _, tensor in returned]
        self._number()
        return trace

    def _watch(self, call: ModuleCall, side: Side, tensors: NamedTensors) -> None:
        for name, tensor in tensors:
            stored = as_stored(tensor)
            content = self.content(stored, keep=True)
            content.passed[call] = None
            is_wide = stored.dtype is torch.float64
            dtype = str(self.own if is_wide else stored.dtype).removeprefix("torch.")
            self.trace.tensors.append(SeenTensor(TensorPlace(call, side, name), content, dtype, tuple(stored.shape)))

    def _see_returned(self, returned: NamedTensors) -> None:
        """The outputs of the root are what the model returns: its class may do more around ``forward``."""
        self.trace.tensors = [t for t in self.trace.tensors if (t.place.call, t.place.side) != (ROOT, "outputs")]
        self._watch(ROOT, "outputs", returned)

    def content(self, tensor: torch.Tensor, *, keep: bool = False) -> Content:
        """The fingerprint of a tensor, computed once: a caller mostly passes on what a call returns."""
        version = version_of(tensor)
        known, then, content = self._known.get(id(tensor), (None, None, None))
        if content is None or known is None or known() is not tensor or then != version or version is None:
            array = as_array(tensor)
            content = self.trace.contents.add(array, keep=keep)
            if content.array is None and self.kept.equal_in_order(content.fingerprint, ROUNDED_CONSTANT):
                content.array = self.trace.contents.kept.copy(array)
            self._known[id(tensor)] = weakref.ref(tensor), version, content
        elif keep and content.array is None:
            content.array = self.trace.contents.kept.copy(as_array(tensor))
        return content

    def see(self, func: Any, arguments: Sequence[Any], output: Any, parameters: Collection[int | None]) -> None:
        """Record the result of an operation.

        Args:
            parameters: The memory of the parameters among its arguments.
        """
        call = self._recorder.running
        if call is None or self._recorder.observing or getattr(func, "overloadpacket", None) in _WITHOUT_VALUES:
            return
        if writes := schema_of(
            func
        ).is_mutable:  # the state of memory that was written to is only told once the operation is over
            self._known.clear()
        drawn = _draws(func)
        tensors = list(filter(has_elements, tensor_leaves(arguments)))
        for tensor in filter(has_elements, tensor_leaves(output)):
            memory = memory_of(tensor)  # a transposed parameter is as much to read as the whole model
            is_own = memory is not None and (memory in self._own_memory or memory in parameters)
            if is_own and 0 not in tensor.stride() and not writes:
                continue  # unless it is expanded, or written to
            stored = as_stored(tensor)
            if not any(tensor is argument for argument in tensors) or writes:
                self.content(stored).computed[call] = None
            if drawn:
                alike = str(func.overloadpacket).removeprefix("aten.") in _DRAWN_ALIKE
                self.trace.random_numbers.append((call, as_array(stored if alike else stored.new_empty(0)).copy()))
            if tensor.dtype is torch.long:
                self._choose(tensors, tensor)
            if tensor._base is not None and any(tensor is argument for argument in tensors):  # written through a view
                self.content(as_stored(tensor._base)).computed[call] = None

    def _choose(self, arguments: Sequence[torch.Tensor], indices: torch.Tensor) -> None:
        scores = next((argument for argument in arguments if argument.is_floating_point()), None)
        if scores is not None and chosen_axis(as_array(scores), as_array(indices)) is not None:
            self.trace.choices.append(Choice(as_array(scores).copy(), as_array(indices).copy()))

    def _number(self) -> None:
        """Give the calls in branches and loops the numbers that they have in a file."""
        numbers, trace = self._recorder.numbers(), self.trace

        def numbered(call: ModuleCall | None) -> ModuleCall | None:
            return numbers.get(call, call) if call is not None else None

        trace.parents = {
            call: numbered(seen.parent) for seen in self._recorder.seen if (call := numbered(seen.call)) is not None
        }
        if numbers:
            trace.tensors = [
                tensor._replace(place=tensor.place._replace(call=call))
                for tensor in trace.tensors
                if (call := numbered(tensor.place.call)) is not None
            ]
            trace.random_numbers = [
                (call, array) for before, array in trace.random_numbers if (call := numbered(before)) is not None
            ]
            for content in trace.contents:
                content.computed = {call: None for call in map(numbered, content.computed) if call is not None}
                content.passed = {call: None for call in map(numbered, content.passed) if call is not None}


_WITHOUT_VALUES = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operations that return uninitialized memory."""

_DRAWN_ALIKE = frozenset(
    ("rand", "rand_like", "uniform_", "randn", "randn_like", "normal_", "bernoulli", "bernoulli_", "multinomial")
)
"""Operations whose numbers ONNX has an operator for. Files compute others from these, as exponential ones."""


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def own_type(model: nn.Module, inputs: Inputs) -> torch.dtype:
    """The floating-point type of a model, which a run in float64 does not show: float64 if a weight or an input has it,
    else that of parameters in half precision, else float32.
    """
    tensors = (*model.parameters(), *model.buffers(), *tensor_leaves(inputs))
    types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if torch.float64 in types:
        return torch.float64
    return half_type(model.parameters()) or (types.pop() if len(types) == 1 else torch.float32)


class _Operations(OperationMode):
    """Sees every operation, and makes those of a wide run compute in float64."""

    def __init__(self, recording: _Recording, guard: Any, *, wide: bool, operations: bool) -> None:
        super().__init__()
        self._recording, self._guard, self._wide, self._records = recording, guard, wide, operations
        self._rounds = wide and recording.own is not torch.float64
        self._items = set[float]()
        """Numbers that ``item`` returned. They are values of tensors, and not rounded like Python's numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._guard is not None:
            self._guard.before(func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        if self._wide:
            args, kwargs = self._wide_arguments(func, args, kwargs)
        run = ONLY_NARROW.get(func, (written_out(func) if self._wide else None) or func)
        output = run(*self.inside(func, args), **kwargs)
        if self._wide and _is_of_integers(args, output):
            output = run(*tree_map(as_float, args), **kwargs)
        elif self._wide and _makes_numbers(func, args, kwargs, output):
            output = run(*args, **{**kwargs, "dtype": torch.float64})
        elif self._wide and (half := self._half_given(func, args)) is not None:
            args = tree_map(partial(by_element, half=half) if torch.Tag.pointwise in func.tags else exact, args)
            output = tree_map(as_narrow, run(*args, **kwargs), output)
        if self._wide:
            output = tree_map(self._recording.widened, output)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(output, float):
            self._items.add(output)
        if _draws(func):
            self._recording.trace.draws_numbers = True
        if self._records and schema_of(func) is not None:
            taken = tree_leaves((args, kwargs))
            parameters = {
                memory_of(now) for leaf, now in zip(leaves, taken, strict=False) if isinstance(leaf, nn.Parameter)
            }
            self._recording.see(func, taken, output, parameters)
            if (product := product_without_bias(func, args, kwargs, output)) is not None:
                self._recording.see(func, (), product, parameters)
        return output

    def _wide_arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if (schema := schema_of(func)) is None:  # operators with nested functions
            return args, kwargs
        parameters = schema.arguments
        names = [parameter.name for parameter in parameters]
        written = {p.name for p in parameters if p.alias_info is not None and p.alias_info.is_write}

        def widened(name: str, value: Any) -> Any:
            if isinstance(value, float) and (number := number_of_kernel(func, value, half_type(args))) is not None:
                return number
            return value if name in written else tree_map(self._wide_argument, value)

        args = tuple(map(widened, names, args))
        kwargs = {name: widened(name, value) for name, value in kwargs.items()}
        return args, kwargs

    def _wide_argument(self, value: Any) -> Any:
        if type(value) is float and self._rounds and value not in self._items:
            return torch.tensor(value, dtype=torch.float32).item() if abs(value) < _FLOAT32_MAX else value
        if isinstance(value, torch.dtype):
            narrower = value in HALF and value is not self._recording.own
            return value if narrower else _WIDE.get(value, value)  # a conversion to a narrower type rounds
        wide = self._recording.widened(value)
        if wide is not value:  # nothing in this run made it: it was kept, in its own type, from before
            self._recording.trace.kept_before.append(fingerprint_of(as_array(wide)))
        return wide

    def _half_given(self, func: Any, args: Any) -> torch.dtype | None:
        """The type of numbers that stay narrow, if an operation gives new ones of them."""
        schema = schema_of(func)
        if _draws(func) or schema is None or any(value.alias_info for value in schema.returns):
            return None
        return half_type(tensor_leaves(args))


_FLOAT32_MAX = torch.finfo(torch.float32).max


def _is_of_integers(args: Any, output: Any) -> bool:
    """Whether an operation of integers returns PyTorch's default floating-point type, as a division does."""
    tensors = tensor_leaves(args)
    narrow = isinstance(output, torch.Tensor) and output.dtype is torch.get_default_dtype()
    return narrow and bool(tensors) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _makes_numbers(func: Any, args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a result of PyTorch's default type was made of numbers of Python, as in ``full`` and ``hann_window``."""
    narrow = isinstance(output, torch.Tensor) and output.dtype is torch.get_default_dtype()
    schema = schema_of(func)
    if not narrow or _draws(func) or tensor_leaves(args) or kwargs.get("dtype") or schema is None:
        return False
    return any(parameter.name == "dtype" for parameter in schema.arguments)
