"""Does the file compute what the model computes? Both run on the same inputs, and the differences are data."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch
from torch import nn

from modelexport.core.exclusive import exclusive
from modelexport.core.messages import collected
from modelexport.errors import InputsError, UsageError
from modelexport.files.linked import check_files
from modelexport.files.regular import file_digest
from modelexport.format import documents
from modelexport.graph.nodes import initializers
from modelexport.pytorch.model_run import ModelRun, as_array
from modelexport.pytorch.static import module_tree
from modelexport.pytorch.traced import untouched
from modelexport.pytorch.values import run_arguments, tensors_in
from modelexport.runtime.sessions import CPU, input_names, open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.tagged.flattening import runnable
from modelexport.tagged.reference import reference_path, write_reference
from modelexport.verify.calls import boundary_values, sampled_calls, sidecar_of, verify_alone, verify_calls
from modelexport.verify.differences import TOLERANCES, compare_outputs
from modelexport.verify.verdicts import ParameterReport, VerifyReport
from modelexport.weights.sources import Weights
from modelexport.weights.transforms import ParameterPlan, parameter_plan, state_dict_of


@exclusive
def verify(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: str | Path,
    *,
    modules: Sequence[str] = (),
    provider: str = CPU,
    sidecar: documents.Hierarchy | None = None,
    weights: Weights | None = None,
) -> VerifyReport:
    """Run a model in PyTorch and its file in ONNX Runtime, and compare every output, every call and every parameter.

    The model runs in evaluation mode, without gradients, and is as before afterwards.

    Args:
        modules: Selectors of the calls to look at, with those inside them; all if left out.
        provider: The execution provider of ONNX Runtime.
        sidecar: ``NAME.hierarchy.json``; read from beside the file if left out.
        weights: Where the weights of a model are that was built without them: each module gets its own while it runs.

    Raises:
        FileFormatError: The file has no tags, no sidecar, or weights in files that are not as they were.
        InputsError: The inputs are not those that the file takes.
        UsageError: The model is not the one that was exported, there is no such module or provider.
    """
    path = Path(path)
    tagged = read_tagged(path)
    sidecar = sidecar or sidecar_of(tagged)
    _check_same_model(model, sidecar, path)
    check_files(tagged.path, tagged.model)
    inside = tagged.select(*modules).inside if modules else ()
    with runnable(path, tagged.encoding) as file:
        runs = open_session(file, provider=provider, optimized=True)
        given = feeds(inputs, runs)
        outputs = run_session(runs, given)
        del runs
    reference = ModelRun(model, inputs, sidecar, weights)
    return VerifyReport(
        outputs=compare_outputs(list(outputs), reference.outputs, list(outputs.values())),
        calls=verify_calls(tagged, sidecar, given, reference, provider=provider, modules=inside),
        provider=provider,
        tolerances=TOLERANCES,
        parameters=_verify_parameters(model, tagged.model, weights),
    )


@exclusive
def verify_sample(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
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
    ``weights`` it holds those of one module at a time, so that memory does not grow with the model.

    Args:
        count: How many calls to draw, of those that own nodes.
        modules: Selectors of calls to look at as well, with those inside them.
        seed: For the draw.
        weights: As in :func:`verify`.

    Returns:
        A report without outputs, with the calls that were looked at and the parameters that they use.

    Raises:
        FileFormatError, InputsError, UsageError: As :func:`verify`.
    """
    tagged = read_tagged(Path(path))
    sidecar = sidecar_of(tagged)
    _check_same_model(model, sidecar, tagged.path)
    check_files(tagged.path, tagged.model)
    calls = set(tagged.select(*modules).inside) if modules else set()
    calls.update(sampled_calls(tagged, count, seed=seed))
    names = [value.name or "" for value in tagged.model.graph.inputs]
    reference = ModelRun(model, inputs, sidecar, weights)
    verdicts, needed = verify_alone(tagged, sidecar, _under_names(inputs, names), reference, calls, provider=provider)
    return VerifyReport(
        outputs=[],
        calls=verdicts,
        provider=provider,
        tolerances=TOLERANCES,
        parameters=_verify_parameters(model, tagged.model, weights, needed),
    )


@exclusive
def record_reference(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
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
        FileFormatError: The file has no tags, or no sidecar.
        InputsError: The inputs are not those that the file takes, or the model does not repeat itself.
        OutputError: There is no room for them.
        UsageError: There is no such module.
    """
    tagged = read_tagged(path)
    sidecar = sidecar or sidecar_of(tagged)
    selection = tagged.select(*modules)
    reference = ModelRun(model, inputs, sidecar, weights)
    kept = boundary_values(tagged, sidecar, reference.available, selection.inside if modules else ())
    names = [value.name or "" for value in tagged.model.graph.outputs]
    names += [f"output {i}" for i in range(len(names), len(reference.outputs))]
    target = reference_path(tagged.path)
    write_reference(
        target,
        inputs=_under_names(inputs, [value.name or "" for value in tagged.model.graph.inputs]),
        outputs=dict(zip(names, reference.outputs, strict=False)),
        values={name: reference.available[name] for name in kept},
        read=reference,
        modules=selection.calls if modules else (),
        announce=announce,
        model_digest=file_digest(tagged.path),
    )
    return target


def _check_same_model(model: nn.Module, sidecar: documents.Hierarchy, path: Path) -> None:
    """Refuse a model whose modules, parameters or their shapes are not those of the exported one."""
    exported = {module.path: (module.class_name, module.shapes) for module in sidecar.modules}
    tree = module_tree(model)
    given = {m.path: (m.class_name, {name: list(shape) for name, shape in m.shapes.items()}) for m in tree}
    differing = [where for where in {**exported, **given} if exported.get(where) != given.get(where)]
    if differing:
        first = differing[0]
        raise UsageError(
            f"this is not the model that {path} was exported from: {len(differing)} modules differ, the first is "
            f"'{first or '.'}' ({_told(exported.get(first))} in the file, {_told(given.get(first))} in the model)"
        )


def _told(module: tuple[str, Mapping[str, list[int]]] | None) -> str:
    if module is None:
        return "none"
    return " ".join([module[0], *(f"{name}{shape}" for name, shape in module[1].items())])


def verify_parameters(model: nn.Module, path: str | Path) -> ParameterReport:
    """Compare each parameter in a tagged file with the model's ``state_dict``, bit for bit.

    Raises:
        FileFormatError: It is not a tagged file.
    """
    return _verify_parameters(model, read_tagged(path).model)


def _verify_parameters(
    model: nn.Module, tagged: ir.Model, weights: Weights | None = None, only: Collection[str] | None = None
) -> ParameterReport:
    """Compare the initializers of a file, or those named in ``only``, with a model's entries."""
    tensors = model.state_dict()
    apart = weights.tensors if weights is not None else {}
    found: dict[str, bool] = {}
    differing = []
    for value in initializers(tagged):
        plan = parameter_plan(value)
        # What another tool did to an entry cannot be done again.
        if plan is None or not plan.recorded or (only is not None and value.name not in only):
            continue
        for key in plan.keys:
            found[key] = found.get(key, False) or not plan.steps
        if any(key not in tensors for key in plan.keys) or not _same(plan, tensors, apart, value):
            differing.append(value.name or "")
    used = [key for key, entry in state_dict_of(tagged).items() if entry.used and (only is None or key in found)]
    return ParameterReport(
        used=len(used),
        transformed=sum(not found.get(key, True) for key in used),
        unaccounted=[key for key in used if key not in found],
        differing=differing,
    )


def _same(
    plan: ParameterPlan, tensors: Mapping[str, Any], apart: Mapping[str, ir.TensorProtocol], value: ir.Value
) -> bool:
    assert value.const_value is not None
    if not plan.steps and (source := apart.get(plan.keys[0])) is not None and _same_place(source, value.const_value):
        return True
    given = {key: apart[key].numpy() if key in apart else as_array(tensors[key]) for key in plan.inputs()}
    expected, actual = plan.compute(given), value.const_value.numpy()
    same_type = expected.dtype == actual.dtype and expected.shape == actual.shape
    return bool(same_type and expected.tobytes() == actual.tobytes())


def _same_place(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    """Whether two tensors are the same bytes of one file, which need not be read to know that they are equal."""
    if not isinstance(one, ir.ExternalTensor) or not isinstance(other, ir.ExternalTensor):
        return False
    facts = [(t.offset, t.length, t.dtype, tuple(t.shape.numpy())) for t in (one, other)]
    return facts[0] == facts[1] and Path(one.path).samefile(other.path)


def run_module(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any], *, seed: int | None = None) -> list[Any]:
    """The tensors in what a model returns, in order.

    Args:
        seed: Where the model's random numbers begin.
    """
    args, kwargs = run_arguments(inputs)
    with untouched(model), collected():
        if seed is not None:
            torch.manual_seed(seed)
        return [as_array(tensor) for _, tensor in tensors_in(model(*args, **kwargs))]


def feeds(inputs: Mapping[str, Any] | Sequence[Any], runs: onnxruntime.InferenceSession) -> dict[str, Any]:
    """The tensors in example inputs under the names of a file's inputs: by name, or by order where names differ.

    Raises:
        InputsError: Their number differs.
    """
    return _under_names(inputs, input_names(runs))


def _under_names(inputs: Mapping[str, Any] | Sequence[Any], wanted: Sequence[str]) -> dict[str, Any]:
    given = {_plain(name): as_array(tensor) for name, tensor in tensors_in(inputs)}
    if len(given) != len(wanted):
        raise InputsError(f"the file takes {len(wanted)} inputs ({', '.join(wanted)}) and {len(given)} were given")
    by_name = {name: given.get(_plain(name.removeprefix("input."))) for name in wanted}
    if all(array is not None for array in by_name.values()):
        return by_name
    return dict(zip(wanted, given.values(), strict=True))


def _plain(name: str) -> str:
    """A name as the exporter writes it: ``past.0`` is ``past_0``."""
    return re.sub(r"\W", "_", name)
