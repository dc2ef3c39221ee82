"""Compares a file with its model: the page to read.

Both run in float64 from the same numbers, so that a sound file agrees with PyTorch at every call to 1e-9 of a value's
size, in whatever order it computes (:mod:`modelexport.traces`). What is compared:

1. every tensor that a module returns, looked up among the values of the file (:mod:`.matches`); only behind a
   difference is the file cut, to find the call that makes it (:mod:`.located`);
2. the owner of each node (:mod:`.owners`);
3. the outputs on other inputs (:mod:`.others`);
4. the outputs as ONNX Runtime computes them for users (:mod:`.as_run`);
5. parameters, bit for bit (:mod:`.parameters`), and what documents claim (:mod:`.claims`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.garbage import only_new_garbage
from modelexport.core.locking import exclusive
from modelexport.files.linked import check_files
from modelexport.format import documents
from modelexport.graph.nodes import nested_graphs, required_inputs
from modelexport.graph.requested import requested_outputs
from modelexport.pytorch.double_kernels import DOUBLE_KERNELS
from modelexport.pytorch.model_trace import own_type, trace_model
from modelexport.pytorch.perturbation import entries_of
from modelexport.pytorch.prepared import arguments_by_name, kept_tensors, prepare_inputs
from modelexport.pytorch.returned import returned_by
from modelexport.pytorch.static import module_tree
from modelexport.pytorch.traced import state_remembered
from modelexport.pytorch.values import as_array, tensors_in
from modelexport.runtime.sessions import CPU
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.flattening import runnable
from modelexport.traces.file_run import FileRun
from modelexport.traces.file_trace import computed_weights, rounded_constants
from modelexport.traces.trace import Trace
from modelexport.verify.as_run import AsRun, compare_as_run, narrowest_type
from modelexport.verify.claims import false_claims
from modelexport.verify.compared import Compared, compare_runs, output_differences, verdicts_of
from modelexport.verify.feeding import under_names
from modelexport.verify.model_weights import changed_weights, compare_with_model
from modelexport.verify.others import Others, compare_others
from modelexport.verify.parameters import check_same_entries, users_of, with_weights
from modelexport.verify.verdicts import CallVerdict, VerifyReport
from modelexport.weights.sources import Weights

Inputs = Mapping[str, Any] | Sequence[Any]
Tell = Callable[[str], None]


@exclusive
def verify(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    *,
    modules: Sequence[str] = (),
    provider: str = CPU,
    sidecar: documents.Hierarchy | None = None,
    weights: Weights | None = None,
    perturb: bool | None = None,
    others: bool = True,
    kept: dict[Hashable, Any] | None = None,
    tell: Tell = lambda text: None,
) -> VerifyReport:
    """Compare every output, every call and every parameter of a file with its model.

    The model runs in evaluation mode, without gradients, and is restored afterwards. The documents beside the file
    are not trusted; their claims are checked.

    Args:
        modules: Selectors of the calls to compare, with those inside them; by default all.
        provider: The execution provider of ONNX Runtime for the outputs.
        sidecar: ``NAME.hierarchy.json``; by default the document beside the file.
        weights: The places of the weights of a model that was built without them; each module gets its own as it runs.
        perturb: Change the weights in memory, on both sides, so that no two are equal; by default if some are.
        others: Also compare outputs on padded masks, other ids and numbers, and other sizes of dynamic axes.
        kept: Runs of the model on these inputs, reused and added to, if several files of it are verified.
        tell: Called with the name of each step.

    Raises:
        FileFormatError: The file has no tags, or its weights files have changed.
        InputsError: The inputs do not fit the file.
        UsageError: The model is not the one that was exported, or a module or provider does not exist.
    """
    with only_new_garbage(), state_remembered(model):
        tagged = open_for(model, path)
        said = sidecar or tagged.hierarchy
        constants = tuple(said.settings.constants) if said is not None else ()
        given = arguments_by_name(model, inputs)
        inputs = prepare_inputs(model, inputs, [one for one in constants if one in given]).inputs
        chosen = tagged.select(*modules).calls if modules else ()
        sides = Sides.of(model, inputs, tagged, weights, kept)
        changed = changed_weights(model, tagged.model, perturb, sides.notes) if weights is None else {}
        parameters = compare_with_model(model, tagged.model, weights)
        tell("verify: every call")
        compared = sides.compare(inputs, changed)
        run = AsRun([])
        if weights is None:
            tell("verify: the outputs in ONNX Runtime")
            run = sides.as_run(inputs, provider, sides.trace(inputs, {}) if changed else compared.end_to_end.truth)
        varied = Others()
        if others and weights is None and compared.agrees:
            tell("verify: other inputs")
            varied = compare_others(
                inputs,
                tagged,
                lambda other: sides.trace(other, {}),
                lambda other, truth: sides.compare(other, {}, truth),
                kept_tensors(model, inputs, constants),
            )
        calls = verdicts_of(compared, chosen)
        if compared.agrees and varied.wrong is not None:
            calls = _with_others(calls, varied.wrong, chosen)
        claims = false_claims(tagged, said, compared.end_to_end, module_tree(model), entries=entries_of(model))
        return VerifyReport(
            outputs=run.outputs or output_differences(compared),
            calls=with_weights(calls, users_of(tagged.model, set(parameters.differing)), "the model's"),
            provider=provider,
            parameters=parameters,
            owners=compared.owners,
            claims=claims,
            others=varied.compared,
            perturbed=bool(changed),
            optimizer=run.optimizer,
            notes=[*sides.notes, *run.notes],
        )


def open_for(model: nn.Module, path: str | Path) -> TaggedFile:
    """The file at a path.

    Raises:
        FileFormatError: The file has no tags, or its weights files have changed.
        UsageError: It is not a file of this model.
    """
    tagged = read_tagged(Path(path))
    entries = {k: (str(t.dtype).removeprefix("torch."), list(t.shape)) for k, t in entries_of(model).items()}
    check_same_entries(entries, tagged.model, tagged.path)
    check_files(tagged.model)
    return tagged


@dataclass
class Sides:
    """A model and its file."""

    model: nn.Module
    tagged: TaggedFile
    dtype: str
    """The widest floating-point type of the model."""
    weights: Weights | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs,
        tagged: TaggedFile,
        weights: Weights | None = None,
        kept: dict[Hashable, Any] | None = None,
    ) -> Sides:
        """A model and its file.

        Args:
            weights: As in :func:`verify`.
            kept: As in :func:`verify`.
        """
        dtype = str(own_type(model, inputs)).removeprefix("torch.")
        return cls(model, tagged, dtype, weights, {} if kept is None else kept)

    @cached_property
    def run(self) -> FileRun:
        """The file in float64."""
        return FileRun(self.tagged.model, wide=self.dtype, kernels=DOUBLE_KERNELS)

    def trace(self, inputs: Inputs, changed: Mapping[str, torch.Tensor]) -> Trace:
        """A run of the model in float64.

        Args:
            changed: Weights to use instead of the model's own.
        """
        key = ("trace", _contents(inputs), frozenset(changed))
        if key not in self.kept:
            called = {traced.call.path for traced in self.tagged.calls}
            self.kept[key] = trace_model(
                self.model,
                inputs,
                parameters=changed,
                weights=self.weights,
                never_called={path for path, _ in self.model.named_modules()} - called,
                bodies=any(nested_graphs(node) for node in self.tagged.model.graph),
                kept=rounded_constants(self.run),
            )
        found: Trace = self.kept[key]
        return found

    def compare(self, inputs: Inputs, changed: Mapping[str, torch.Tensor], truth: Trace | None = None) -> Compared:
        """Runs of both on the same inputs, compared."""
        truth = truth or self.trace(inputs, changed)
        return compare_runs(self.tagged, self.run, self.feeds(inputs), truth, self._weights(changed))

    def feeds(self, inputs: Inputs) -> Mapping[str, Any]:
        """The inputs under the names of the file's."""
        return under_names(inputs, [value.name or "" for value in required_inputs(self.tagged.model)])

    def _weights(self, changed: Mapping[str, torch.Tensor]) -> Mapping[ir.Value, Any]:
        entries = {**entries_of(self.model), **changed} if self.weights is None else {}

        def read(key: str) -> Any:
            array = as_array(entries[key]) if self.weights is None else self.weights.tensors[key].numpy()
            return array if array.dtype.kind in "biu" else array.astype(np.float64)

        return computed_weights(self.run, read, changed)

    def as_run(self, inputs: Inputs, provider: str, truth: Trace) -> AsRun:
        """The outputs in ONNX Runtime."""
        key = ("own", _contents(inputs))
        if key not in self.kept:
            self.kept[key] = returned_by(self.model, inputs)
        properties = self.tagged.model.metadata_props
        own, exact = (requested_outputs(properties, one) for one in (self.kept[key], truth.outputs))
        with runnable(self.tagged.path, self.tagged.encoding) as file:
            return compare_as_run(
                file, self.feeds(inputs), own, exact, narrowest=narrowest_type(self.tagged.model), provider=provider
            )


def _contents(inputs: Inputs) -> tuple[object, ...]:
    """What tells inputs apart."""
    arrays = [(name, as_array(tensor)) for name, tensor in tensors_in(inputs)]
    return tuple((name, str(array.dtype), array.shape, hash(array.tobytes())) for name, array in arrays)


def _with_others(calls: Sequence[CallVerdict], wrong: Compared, chosen: Sequence[ModuleCall]) -> list[CallVerdict]:
    """Verdicts with the calls that differ on other inputs."""
    there = {one.address: one for one in verdicts_of(wrong, chosen) if one.status == "differ"}
    return [there.get(one.address, one) for one in calls]
