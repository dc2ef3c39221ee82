"""Does the file compute what the model computes? Both run on the same inputs, and the differences are data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from modelexport.core.calls import ModuleCall
from modelexport.core.exclusive import exclusive
from modelexport.core.messages import collected
from modelexport.errors import UsageError
from modelexport.files.linked import check_files
from modelexport.format import documents
from modelexport.graph.nodes import nested_graphs
from modelexport.pytorch.model_run import ModelRun, as_array
from modelexport.pytorch.perturbation import as_arrays, entries_of, has_equal_values, perturbed
from modelexport.pytorch.prepared import prepare_inputs
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import run_arguments, tensors_in
from modelexport.runtime.sessions import CPU, input_names, open_session, run_session
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tagged.flattening import runnable
from modelexport.tagged.reference import reference_path, write_reference
from modelexport.verify.calls import prove_calls, sampled_calls, verdicts_of
from modelexport.verify.claims import false_claims
from modelexport.verify.differences import UNITS, Difference, compare_outputs
from modelexport.verify.feeding import feeds, under_names
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.optimizers import blamed_optimizer
from modelexport.verify.others import run_others
from modelexport.verify.parameters import (
    check_same_entries,
    compare_parameters,
    parameter_digests,
    perturbable,
    put_in,
    users_of,
)
from modelexport.verify.sampling import verify_alone
from modelexport.verify.verdicts import CallVerdict, ParameterReport, VerifyReport
from modelexport.weights.sources import Weights

__all__ = ["as_array", "feeds", "record_reference", "run_module", "verify", "verify_parameters", "verify_sample"]

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
    tell: Tell = lambda text: None,
) -> VerifyReport:
    """Run a model in PyTorch and its file in ONNX Runtime, and compare every output, every call and every parameter.

    The model runs in evaluation mode, without gradients, and is as before afterwards. The documents beside the file
    prove nothing; what they claim is checked.

    Args:
        modules: Selectors of the calls to look at, with those inside them; all if left out.
        provider: The execution provider of ONNX Runtime.
        sidecar: ``NAME.hierarchy.json``; read from beside the file if left out.
        weights: Where the weights of a model are that was built without them: each module gets its own while it runs.
        perturb: Compare the calls with other weights, in memory and on both sides, so that parameters of equal values
            are told apart; where it is left out, if the model has such.
        others: Whether outputs are also compared on inputs with padded masks, ids from the whole vocabulary, and
            other sizes where the file leaves them open.
        tell: Told what is being done.

    Raises:
        FileFormatError: The file has no tags, or weights in files that are not as they were.
        InputsError: The inputs are not those that the file takes.
        UsageError: The model is not the one that was exported, there is no such module or provider.
    """
    inputs = prepare_inputs(model, inputs).inputs
    tagged = _open(model, path)
    chosen = tagged.select(*modules).calls if modules else ()
    parameters = _parameters(model, tagged.model, weights)
    notes: list[str] = []
    with runnable(tagged.path, tagged.encoding) as file:
        tell("verify: the file")
        session = open_session(file, provider=provider, optimized=True)
        given, dropped = feeds(inputs, session), _dropped(inputs, input_names(session))
        kept = set() if sidecar is None else set(sidecar.settings.constants)
        dropped = [name for name in dropped if name not in kept]
        if dropped:
            notes.append(f"the file does not take {', '.join(dropped)}: the exporter found no use of it")
        outputs = run_session(session, given)
        tell("verify: PyTorch")
        others_in = _other_weights(model, tagged, weights, perturb)
        run = _run(model, inputs, tagged, weights, others_in)
        if others_in and not _finite(run):
            others_in, run = {}, _run(model, inputs, tagged, weights, {})
            notes.append("weights were not perturbed: with others the model gives no finite numbers")
        right = run_module(model, inputs, weights) if others_in else run.outputs
        whole = _Whole(right, run if not others_in else None, lambda: _run(model, inputs, tagged, weights, {}))
        compared = whole.compare(outputs)
        optimizer = ""
        if any(one.status == "differ" for one in compared):
            tell("verify: the runtime's optimiser")
            optimizer = blamed_optimizer(file, given, whole.agrees, provider)
        more = []
        if others and weights is None:
            tell("verify: other inputs")
            more = run_others(inputs, tagged, session, lambda other: run_module(model, other))
        del session
    if others_in:
        values = as_arrays(model, others_in, as_array)
        put_in(tagged.model, values.__getitem__)
    tell("verify: every call")
    proof = prove_calls(tagged, given, run, provider=provider, modules=chosen)
    proof.wrong_weights = _wrong_weights(tagged, parameters)
    return VerifyReport(
        outputs=compared,
        calls=verdicts_of(proof, chosen),
        provider=provider,
        units=dict(UNITS),
        parameters=parameters,
        claims=false_claims(tagged, sidecar, run, proof.hints, model_classes(model)),
        others=more,
        perturbed=bool(others_in),
        optimizer=optimizer,
        notes=notes,
    )


def _open(model: nn.Module, path: str | Path) -> TaggedFile:
    tagged = read_tagged(Path(path))
    entries = {k: (str(t.dtype).removeprefix("torch."), list(t.shape)) for k, t in entries_of(model).items()}
    check_same_entries(entries, tagged.model, tagged.path)
    check_files(tagged.path, tagged.model)
    return tagged


def model_classes(model: nn.Module) -> dict[str, str]:
    """Path of a module to the name of its class."""
    return {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}


def _run(
    model: nn.Module, inputs: Inputs, tagged: TaggedFile, weights: Weights | None, others: Mapping[str, Any]
) -> ModelRun:
    called = {traced.call.path for traced in tagged.calls}
    never = {path for path, _ in model.named_modules()} - called
    # PyTorch compiles the branches of a condition, and cannot where its operations are looked at.
    operations = not any(nested_graphs(node) for node in tagged.model.graph)
    return ModelRun(model, inputs, weights, parameters=others, never_called=never, operations=operations)


@dataclass(frozen=True)
class _Whole:
    """Outputs of a whole run, where rounding adds up on the way: its size is measured if a few units are not enough."""

    right: Sequence[Any]
    run: ModelRun | None
    make: Callable[[], ModelRun]
    """Gives the run where there is none."""

    @cached_property
    def exact(self) -> Sequence[Any] | None:
        precise = (self.run or self.make()).in_float64(from_right_values=False)
        return None if precise is None else precise.outputs

    def compare(self, found: Mapping[str, Any]) -> list[Difference]:
        names, arrays = list(found), list(found.values())
        compared = compare_outputs(names, self.right, arrays)
        if all(one.status == "agree" for one in compared):
            return compared
        if self.exact is None:
            return compare_outputs(names, self.right, arrays, units=WHOLE_UNITS)
        return compare_outputs(names, self.right, arrays, self.exact)

    def agrees(self, found: Mapping[str, Any]) -> bool:
        return all(one.status == "agree" for one in self.compare(found))


def _other_weights(
    model: nn.Module, tagged: TaggedFile, weights: Weights | None, perturb: bool | None
) -> Mapping[str, Any]:
    if weights is not None or perturb is False:
        return {}
    keys = perturbable(tagged.model)
    if perturb is None and not has_equal_values(model, keys):
        return {}
    return perturbed(model, keys)


def _finite(run: ModelRun) -> bool:
    return all(np.isfinite(array.astype(np.float64)).all() for array in run.outputs if array.dtype.kind == "f")


def _wrong_weights(tagged: TaggedFile, parameters: ParameterReport) -> dict[ModuleCall, str]:
    users = users_of(tagged.model, set(parameters.differing))
    return {call: f"its weights are not the model's: {', '.join(dict.fromkeys(v))}" for call, v in users.items()}


@exclusive
def verify_sample(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    *,
    count: int = 0,
    modules: Sequence[str] = (),
    provider: str = CPU,
    seed: int = 0,
    weights: Weights | None = None,
) -> VerifyReport:
    """Compare some calls only, each cut out of the file and run alone: for a file that is too large to run whole.

    PyTorch runs first, from the inputs through all modules, for the values that enter and leave the calls. With
    ``weights`` it holds those of one module at a time, so that memory does not grow with the model. Which value is
    which tensor the sidecar says; a false claim shows as a difference.

    Args:
        count: How many calls to draw, of those that own nodes.
        modules: Selectors of calls to look at as well, with those inside them.
        seed: For the draw.
        weights: As in :func:`verify`.

    Returns:
        A report without outputs, with the calls that were looked at and the parameters that they use.

    Raises:
        FileFormatError, InputsError, UsageError: As :func:`verify`; the file has no sidecar.
    """
    tagged = _open(model, path)
    calls = set(tagged.select(*modules).inside) if modules else set()
    calls.update(sampled_calls(tagged, count, seed=seed))
    names = [value.name or "" for value in tagged.model.graph.inputs]
    verdicts: list[CallVerdict] = []
    needed: set[str] = set()
    if calls:
        run = _run(model, inputs, tagged, weights, {})
        verdicts, needed = verify_alone(tagged, under_names(inputs, names), run, calls, provider=provider)
    return VerifyReport(
        outputs=[],
        calls=verdicts,
        provider=provider,
        units=dict(UNITS),
        parameters=_parameters(model, tagged.model, weights, needed),
        notes=[] if calls else ["no call was chosen: give a number above 0 with --weights-sample, or --module"],
    )


@exclusive
def record_reference(
    model: nn.Module,
    inputs: Inputs,
    path: str | Path,
    *,
    modules: Sequence[str] = (),
    sidecar: documents.Hierarchy | None = None,
    announce: Callable[[int], None] = lambda size: None,
    weights: Weights | None = None,
) -> Path:
    """Run a model and keep its inputs, its outputs and the boundary values of its calls beside its file.

    Args:
        path: A tagged file of the model; ``NAME.reference.safetensors`` is written beside it.
        modules: Selectors of the calls whose values to keep, with those inside them; all if left out.
        sidecar: ``NAME.hierarchy.json``; read from beside the file if left out.
        announce: Told the size in bytes before anything is written.
        weights: Where the weights of a model are that was built without them.

    Returns:
        The file that was written.

    Raises:
        FileFormatError: The file has no tags.
        InputsError: The inputs are not those that the file takes.
        OutputError: There is no room for them.
        UsageError: There is no such module.
    """
    tagged = read_tagged(path)
    chosen = tagged.select(*modules).calls if modules else ()
    run = _run(model, inputs, tagged, weights, {})
    target = reference_path(tagged.path)
    write_reference(
        target,
        tagged,
        run,
        inputs=under_names(inputs, [value.name or "" for value in tagged.model.graph.inputs]),
        weights=parameter_digests(tagged.model),
        modules=chosen,
        sidecar=sidecar or tagged.hierarchy,
        announce=announce,
    )
    return target


def verify_parameters(model: nn.Module, path: str | Path) -> ParameterReport:
    """Compare each parameter in a tagged file with the model's ``state_dict``, bit for bit.

    Raises:
        FileFormatError: It is not a tagged file.
    """
    return _parameters(model, read_tagged(path).model)


def _parameters(
    model: nn.Module, file: ir.Model, weights: Weights | None = None, only: set[str] | None = None
) -> ParameterReport:
    tensors, apart = entries_of(model), weights.tensors if weights is not None else {}

    def read(key: str) -> Any:
        if key in apart:
            return apart[key].numpy()
        tensor = tensors[key].detach()
        # A file has complex numbers as pairs.
        return as_array(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)

    def is_same_place(key: str, tensor: ir.TensorProtocol) -> bool:
        return key in apart and _same_place(apart[key], tensor)

    return compare_parameters(file, tensors.keys(), read, is_same_place=is_same_place, only=only)


def _same_place(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    """Whether two tensors are the same bytes of one file, which need not be read to know that they are equal."""
    if not isinstance(one, ir.ExternalTensor) or not isinstance(other, ir.ExternalTensor):
        return False
    facts = [(t.offset, t.length, t.dtype, tuple(t.shape.numpy())) for t in (one, other)]
    return facts[0] == facts[1] and Path(one.path).samefile(other.path)


def run_module(
    model: nn.Module, inputs: Inputs, weights: Weights | None = None, *, seed: int | None = None
) -> list[Any]:
    """The tensors in what a model returns, in order.

    Args:
        seed: Where the model's random numbers begin.
    """
    if weights is not None:
        raise UsageError("a model without weights of its own does not run here")
    args, kwargs = run_arguments(inputs)
    with untouched(model), collected():
        if seed is not None:
            torch.manual_seed(seed)
        return [as_array(tensor) for _, tensor in tensors_in(model(*args, **kwargs))]


def _dropped(inputs: Inputs, wanted: Sequence[str]) -> list[str]:
    """The names of the given tensors that a file does not take."""
    given = [name for name, _ in tensors_in(inputs)]
    return (
        [] if len(given) <= len(wanted) else [n for n in given if n not in {w.removeprefix("input.") for w in wanted}]
    )
