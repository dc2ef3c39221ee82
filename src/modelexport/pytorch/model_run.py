"""A recorded run of a model: the tensors that each call gets and returns, and the results of its operations."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.core.calls import ROOT, ModuleCall, Side
from modelexport.core.limits import BATCH_BYTES
from modelexport.core.messages import collected
from modelexport.pytorch.bodies import Bodies
from modelexport.pytorch.exact_run import AlwaysInFloat64, RoundedOtherwise, tensors_of
from modelexport.pytorch.lazy_weights import lend_weights
from modelexport.pytorch.operations import Choosing, Operations
from modelexport.pytorch.private_torch import tree_map, version_of
from modelexport.pytorch.random_flow import RandomFlow, leaves
from modelexport.pytorch.recorder import CallRecorder, Exchange, as_they_are
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import (
    NamedTensors,
    as_array,
    as_stored,
    has_elements,
    output_tensors,
    run_arguments,
    tensors_in,
)
from modelexport.runtime.choices import Choice, chosen_axis
from modelexport.runtime.evidence import Computed, Decision, Number, RandomPart, SeenTensor
from modelexport.weights.sources import Weights


class ModelRun:
    """One recorded run of a model.

    Attributes:
        outputs: The outputs of the model, as arrays.
        parents: Every call to the call that it ran in.
        tensors: The tensors that calls got and returned.
        computed: The results of operations; empty if PyTorch cannot record them.
        quiet: Those whose numbers do not tell their call; empty likewise.
        choices: The places where operations took the largest or the smallest of some scores; empty likewise.
        decisions: The conditions of branches; empty likewise.
        random: What depends on random numbers.
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
        choices: bool = False,
        exchange: Exchange = as_they_are,
        mode: Callable[[], AbstractContextManager[Any]] | None = None,
        seed: int | None = None,
        bodies: bool = False,
    ) -> None:
        """Run a model; its state is restored afterwards.

        Args:
            weights: The places of the weights of a model that was built without them: each module gets its own.
            parameters: Other values for some ``state_dict`` entries, for this run.
            never_called: Paths of modules that are never called, with ``weights``.
            operations: Whether to record single operations.
            choices: Whether to record those that choose among scores, if no others.
            exchange: What each call gets and gives instead of its tensors; these are recorded as they were.
            mode: Gives a mode that sees every operation.
            seed: The seed of the model's random numbers; by default those of the caller's state.
            bodies: The model may have branches and loops of PyTorch's operators, whose calls are recorded, too.
        """
        self._model, self._inputs, self._weights, self._parameters = model, inputs, weights, parameters or {}
        self._never_called, self._seed, self._mode = never_called, seed, mode
        self._again: dict[tuple[str, frozenset[str]], ModelRun | None] = {}
        self.tensors: list[SeenTensor] = []
        self.computed: list[Computed] = []
        self.quiet: list[Computed] = []
        self.choices: list[Choice] = []
        self.decisions: list[Decision] = []
        self._arrays: dict[str, Any] = {}
        self._contents: dict[int, tuple[weakref.ref[torch.Tensor] | None, int | None, str]] = {}
        """Tensors by identity, with the state of their memory."""
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers: dict[ModuleCall, ModuleCall | None] = {}
        self._flow: RandomFlow | None = None
        self._random_calls: set[ModuleCall] = set()
        # Not everything can be recorded in all code; at least the boundaries of calls outside of branches are.
        watched = operations, choices or operations
        ways = [(*watched, bodies, bodies), *([(*watched, True, False)] if bodies else []), (False,) * 4]
        for way in dict.fromkeys(ways):
            self.tensors, self.computed, self.quiet, self.choices, self.decisions = [], [], [], [], []
            self._recorder = CallRecorder(model, watch=self._watch, exchange=exchange)
            self._flow = None
            try:
                self.outputs = self._run(*way)
                break
            except Exception:
                if way == ways[-1]:
                    raise
        self._opened = way[2:]
        self._number()

    def array(self, content: str) -> Any:
        """The elements of a content, flat."""
        return self._arrays[content]

    def _number(self) -> None:
        """Give the calls in branches and loops the numbers that they have in a file."""
        self._numbers = self._recorder.numbers()
        numbers = self._numbers

        def numbered(call: ModuleCall | None) -> ModuleCall | None:
            return numbers.get(call, call) if call is not None else None

        if numbers:
            self.tensors = [t._replace(call=call) for t in self.tensors if (call := numbered(t.call)) is not None]
            self.computed = [c._replace(call=call) for c in self.computed if (call := numbered(c.call)) is not None]
            self.quiet = [c._replace(call=call) for c in self.quiet if (call := numbered(c.call)) is not None]
            self.choices = [c._replace(call=call) for c in self.choices if (call := numbered(c.call)) is not None]
            self.decisions = [d._replace(call=call) for d in self.decisions if (call := numbered(d.call)) is not None]
        random = frozenset(call for one in self._random_calls if (call := numbered(one)) is not None)
        self.random = RandomPart(random if self._flow is not None else None)
        self.parents = {
            call: numbered(one.parent) for one in self._recorder.seen if (call := numbered(one.call)) is not None
        }

    def _run(self, operations: bool, choices: bool, bodies: bool, opened: bool) -> list[Any]:
        args, kwargs = run_arguments(self._inputs)
        with contextlib.ExitStack() as stack:
            # A module without weights cannot overwrite any.
            has_weights = self._weights is None
            guard = stack.enter_context(
                untouched(
                    self._model,
                    runs=has_weights,
                    guarded=operations or self._mode is not None,
                    in_mode=operations,
                    bodies=bodies,
                )
            )
            if self._seed is not None:
                torch.manual_seed(self._seed)
            if self._weights is not None:
                stack.enter_context(lend_weights(self._model, self._weights, self._never_called))
            entries = _entries(self._model)
            for key, tensor in self._parameters.items():
                entries[key].data = tensor
            stack.enter_context(collected())
            if self._mode is not None:
                stack.enter_context(self._mode())
            stack.enter_context(self._recorder.attached())
            if bodies:
                stack.enter_context(Bodies(self._recorder, opened=opened))
            if operations:
                own = [] if self._weights is not None else list(self._model.parameters())
                self._flow = RandomFlow()
                results = self.computed, self.quiet
                mode = Operations(self._recorder, *results, self._choose, self._decide, own, guard, self._flow)
                self._random_calls = mode.random_calls
                stack.enter_context(mode)
            elif choices:
                stack.enter_context(Choosing(self._recorder, self._choose))
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
            random = self._flow.is_random(tensor) if self._flow is not None else None
            self.tensors.append(SeenTensor(call, side, name, self._content(tensor), dtype, tuple(tensor.shape), random))

    def _choose(self, call: ModuleCall, scores: torch.Tensor, indices: torch.Tensor) -> None:
        if chosen_axis(as_array(scores), as_array(indices)) is not None:
            shapes = tuple(scores.shape), tuple(indices.shape)
            self.choices.append(Choice(call, self._content(scores), shapes[0], self._content(indices), shapes[1]))

    def _decide(self, call: ModuleCall, numbers: Sequence[torch.Tensor]) -> None:
        def kept(tensors: Sequence[torch.Tensor]) -> tuple[Number, ...]:
            return tuple(
                Number(self._content(one), str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors
            )

        results = [[one for one in leaves(value) if isinstance(one, torch.Tensor)] for value in self._recorder.results]
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

    def in_float64(self, given: Collection[str] = ()) -> ModelRun | None:
        """The same run in float64, to measure rounding; ``None`` if the model does not run in float64.

        Args:
            given: Contents that calls get and return as this run has them.
        """
        return self._run_again(self._run_in_float64, frozenset(given))

    def rounded_otherwise(self, given: Collection[str] = ()) -> ModelRun | None:
        """The same run with other roundings, in the same types; ``None`` if it cannot be repeated.

        Args:
            given: Contents that calls get and return as this run has them.
        """
        return self._run_again(self._run_rounded, frozenset(given))

    def _run_again(self, run: Callable[[Exchange], ModelRun], given: frozenset[str]) -> ModelRun | None:
        """A run of the same calls, kept for the next one who asks; ``None`` if the model does not run so."""
        if self._weights is not None:
            return None
        key = run.__name__, given
        if key not in self._again:
            running = {call: one for one, call in self._numbers.items() if call is not None}
            try:
                again = run(tensors_of(self, given, running) if given else as_they_are)
                self._again[key] = again if len(again.tensors) == len(self.tensors) else None
            except Exception:  # some code requires float32; the caller then goes without this run
                self._again[key] = None
        return self._again[key]

    def _run_in_float64(self, exchange: Exchange) -> ModelRun:
        model = copy.deepcopy(self._model)
        entries = _entries(model)
        for key, tensor in self._parameters.items():
            entries[key].data = tensor
        inputs, opened = tree_map(_widened, self._inputs), self._opened[0]
        return ModelRun(
            model.double(),
            inputs,
            operations=False,
            choices=bool(self.choices),
            exchange=exchange,
            mode=AlwaysInFloat64,
            bodies=opened,
        )

    def _run_rounded(self, exchange: Exchange) -> ModelRun:
        return ModelRun(
            self._model,
            self._inputs,
            parameters=self._parameters,
            operations=False,
            choices=bool(self.choices),
            exchange=exchange,
            mode=RoundedOtherwise,
            seed=self._seed,
            bodies=self._opened[0],
        )


def _entries(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
