"""Does the file compute what the model computes? Both run on the same inputs, and the differences are data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn

from modelexport.errors import InputsError
from modelexport.graph import initializers
from modelexport.hierarchy.traced import untouched
from modelexport.hierarchy.values import run_arguments, tensors_in
from modelexport.quiet import quiet
from modelexport.read import load
from modelexport.transforms import ParameterPlan, parameter_plan, state_dict_of

TOLERANCES = {"float64": (1e-7, 1e-6), "float32": (1e-4, 1e-3), "float16": (1e-2, 1e-2), "bfloat16": (5e-2, 5e-2)}
"""Element type to the absolute and the relative difference of which one at least must hold; other types are equal."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One value computed twice."""

    name: str
    status: str
    """``agree``, ``differ``, or ``not comparable``."""
    reason: str = ""
    dtype: str = ""
    shape: list[int] = []
    absolute: float | None = None
    """The largest absolute difference over the elements that are a number in both."""
    relative: float | None = None
    """The largest difference relative to the expected element."""
    nans: int = 0
    """How many elements are NaN in one and not in the other."""


class ParameterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a file's parameters with a model's ``state_dict``."""

    used: int
    """Entries that the captured graph uses."""
    transformed: int
    """Those of them that are in the file only as something that is computed from them."""
    unaccounted: list[str]
    """Those of them that cannot be found in the file."""
    differing: list[str]
    """Initializers whose bytes are not what the entries give."""

    @property
    def agrees(self) -> bool:
        """Whether every used entry is in the file, with the model's bytes."""
        return not self.unaccounted and not self.differing


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a file with the model it was exported from."""

    outputs: list[Difference]
    provider: str
    tolerances: dict[str, tuple[float, float]]
    parameters: ParameterReport

    @property
    def agrees(self) -> bool:
        """Whether every output agrees and every parameter is the model's."""
        return self.parameters.agrees and all(output.status == "agree" for output in self.outputs)

    @property
    def largest(self) -> float:
        """The largest absolute difference of any output; infinite when one could not be compared."""
        return max((np.inf if o.absolute is None else o.absolute for o in self.outputs), default=0.0)


def verify_outputs(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    path: str | Path,
    *,
    provider: str = "CPUExecutionProvider",
) -> VerifyReport:
    """Run a model in PyTorch and its file in ONNX Runtime and compare every output.

    The model runs in evaluation mode, without gradients, and is as before afterwards.

    Raises:
        InputsError: The inputs are not those that the file takes.
    """
    expected = run_module(model, inputs)
    session = onnxruntime.InferenceSession(path, providers=[provider])
    actual = session.run(None, feeds(inputs, session))
    names = [output.name for output in session.get_outputs()]
    return VerifyReport(
        outputs=compare_all(names, expected, actual),
        provider=provider,
        tolerances=TOLERANCES,
        parameters=verify_parameters(model, path),
    )


def verify_parameters(model: nn.Module, path: str | Path) -> ParameterReport:
    """Compare each parameter in a tagged file with the model's ``state_dict``, bit for bit.

    Raises:
        FileFormatError: It is not a tagged file.
    """
    tagged = load(path).model
    tensors = model.state_dict()
    found: dict[str, bool] = {}
    differing = []
    for value in initializers(tagged):
        plan = parameter_plan(value)
        if plan is None:
            continue
        for key in plan.keys:
            found[key] = found.get(key, False) or not plan.steps
        if any(key not in tensors for key in plan.keys) or not _same(plan, tensors, value):
            differing.append(value.name or "")
    used = [key for key, entry in state_dict_of(tagged).items() if entry.used]
    return ParameterReport(
        used=len(used),
        transformed=sum(not found.get(key, True) for key in used),
        unaccounted=[key for key in used if key not in found],
        differing=differing,
    )


def _same(plan: ParameterPlan, tensors: Mapping[str, Any], value: ir.Value) -> bool:
    assert value.const_value is not None
    given = {key: as_array(tensors[key]) for key in plan.inputs()}
    expected, actual = plan.compute(given), value.const_value.numpy()
    same_type = expected.dtype == actual.dtype and expected.shape == actual.shape
    return bool(same_type and expected.tobytes() == actual.tobytes())


def run_module(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any]) -> list[np.ndarray]:
    """The tensors in what a model returns, in order."""
    args, kwargs = run_arguments(inputs)
    with untouched(model), quiet():
        return [as_array(tensor) for _, tensor in tensors_in(model(*args, **kwargs))]


def feeds(inputs: Mapping[str, Any] | Sequence[Any], session: onnxruntime.InferenceSession) -> dict[str, Any]:
    """The tensors in example inputs under the names of a file's inputs: by name, or by order where names differ.

    Raises:
        InputsError: Their number differs.
    """
    given = {_plain(name): as_array(tensor) for name, tensor in tensors_in(inputs)}
    wanted = [value.name for value in session.get_inputs()]
    if len(given) != len(wanted):
        raise InputsError(f"the file takes {len(wanted)} inputs ({', '.join(wanted)}) and {len(given)} were given")
    by_name = {name: given.get(_plain(name.removeprefix("input."))) for name in wanted}
    if all(array is not None for array in by_name.values()):
        return by_name
    return dict(zip(wanted, given.values(), strict=True))


def _plain(name: str) -> str:
    """A name as the exporter writes it: ``past.0`` is ``past_0``."""
    return re.sub(r"\W", "_", name)


def as_array(tensor: torch.Tensor) -> Any:
    """A tensor as NumPy has it; ``bfloat16``, which NumPy does not have, through ``ml_dtypes``."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.resolve_conj().numpy()


def compare_all(names: Sequence[str], expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> list[Difference]:
    """Compare two runs value by value; a value that only one of them has is not comparable."""
    differences = [compare(name, a, b) for name, a, b in zip(names, expected, actual, strict=False)]
    if len(expected) != len(actual):
        reason = f"PyTorch returns {len(expected)} tensors and the file {len(actual)}"
        differences += [
            Difference(name=name, status="not comparable", reason=reason)
            for name in (names[len(expected) :] or [f"output {i}" for i in range(len(actual), len(expected))])
        ]
    return differences


def compare(name: str, expected: np.ndarray, actual: np.ndarray) -> Difference:
    """Compare a value with what it should be: shape, element type and NaN before differences."""
    dtype, shape = str(actual.dtype), list(actual.shape)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        reason = f"expected {expected.dtype}{list(expected.shape)}, got {dtype}{shape}"
        return Difference(name=name, status="not comparable", reason=reason, dtype=dtype, shape=shape)
    if dtype not in TOLERANCES:
        wrong = int(np.count_nonzero(expected != actual))
        return Difference(
            name=name,
            status="differ" if wrong else "agree",
            reason=f"{wrong} elements differ" if wrong else "",
            dtype=dtype,
            shape=shape,
            absolute=float(np.max(np.abs(expected.astype(np.float64) - actual), initial=0.0)),
        )
    one, two = expected.astype(np.float64), actual.astype(np.float64)
    nans = int(np.count_nonzero(np.isnan(one) != np.isnan(two)))
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        absolute = np.where(same, 0.0, np.abs(one - two))
    relative = absolute / np.maximum(np.abs(one), np.finfo(np.float64).tiny)
    limit, relative_limit = TOLERANCES[dtype]
    wrong = int(np.count_nonzero(~((absolute <= limit) | (relative <= relative_limit))))
    return Difference(
        name=name,
        status="differ" if wrong else "agree",
        reason=f"{wrong} of {one.size} elements differ" if wrong else "",
        dtype=dtype,
        shape=shape,
        absolute=float(np.nanmax(absolute, initial=0.0)),
        relative=float(np.nanmax(relative, initial=0.0)),
        nans=nans,
    )
