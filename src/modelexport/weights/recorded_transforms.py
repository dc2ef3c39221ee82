"""Computes initializers from ``state_dict`` entries, by the steps that their plans record.

The operators are run by onnx's reference implementation, which also folded them, so the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.errors import FileFormatError, WeightsError
from modelexport.format.documents import TransformStep
from modelexport.format.dtypes import dtype_name, parse_dtype
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.nodes import is_random
from modelexport.weights.packed import repacking as packed

RunStep = Callable[[TransformStep, Sequence[Any], Sequence[TransformStep]], tuple[Any, ...]]
"""Computes a step from its inputs; the steps that come later are known, too."""


def run_step(step: TransformStep, inputs: Sequence[Any], later: Sequence[TransformStep] = ()) -> tuple[Any, ...]:
    """The outputs of a step in the types of its inputs, as the exporter folded them."""
    if step.op_type == "Constant" and not step.domain:
        return (decode_tensor(step.attributes["value"]),)
    if step.domain == packed.DOMAIN:
        return (packed.run(step.op_type, step.attributes, inputs),)
    return run_operator(step.domain, step.op_type, step.version, inputs, step_attributes(step))


def step_attributes(step: TransformStep) -> dict[str, Any]:
    """The attributes of a step in the form that :func:`run_operator` expects."""
    return {
        name: ir.serde.serialize_tensor(ir.tensor(decode_tensor(value))) if isinstance(value, dict) else value
        for name, value in step.attributes.items()
    }


def compute_planned(plan: ParameterPlan, tensors: Mapping[str, np.ndarray], compute: RunStep = run_step) -> np.ndarray:
    """An initializer's value.

    Args:
        tensors: The entries of :meth:`ParameterPlan.inputs`.
        compute: As in :func:`run_steps`.
    """
    try:
        return apply_transform(plan.steps, tensors, compute) if plan.steps else tensors[plan.keys[0]]
    except KeyError as error:
        raise FileFormatError(
            f"a transform of {', '.join(plan.keys) or 'nothing'} uses {error}, which is not a parameter of it: the "
            "file has damaged metadata; export it again"
        ) from error


def apply_transform(
    steps: Sequence[TransformStep], tensors: Mapping[str, np.ndarray], compute: RunStep = run_step
) -> np.ndarray:
    """Compute an initializer from ``state_dict`` entries.

    Args:
        steps: The content of ``modelexport.transform``.
        tensors: The entries by their keys, as PyTorch has them.
        compute: As in :func:`run_steps`.

    Raises:
        KeyError: An entry is missing.
        FileFormatError: A step cannot be run.
        WeightsError: A packed weight is not of the kind that the file was exported with.
    """
    result = run_steps(steps, tensors, compute)[f"%{len(steps) - 1}:0"]
    assert isinstance(result, np.ndarray)
    return result


def run_steps(
    steps: Sequence[TransformStep], tensors: Mapping[str, np.ndarray], compute: RunStep = run_step
) -> dict[str, Any]:
    """The outputs of all steps: ``%0:1`` is the second one of the first step. Errors as above.

    Args:
        compute: Computes each step, in other types than those of the file, for example.
    """
    outputs: dict[str, Any] = {}
    known: dict[str, Any] = {"": None, **tensors}
    for number, step in enumerate(steps):
        try:
            results = compute(step, [known[name] for name in step.inputs], steps[number + 1 :])
        except (KeyError, WeightsError):
            raise
        except Exception as error:  # onnx's implementations, given any arrays, raise anything
            raise FileFormatError(
                f"step {number} of a transform, {step.op_type}, cannot be run ({type(error).__name__}: {error}): "
                "the tensors do not fit, or the file was written by another version; export it again"
            ) from error
        outputs.update((f"%{number}:{i}", result) for i, result in enumerate(results))
        known.update(outputs)
        known[f"%{number}"] = results[0]
    return outputs


def since_version(operator: ir.OperatorIdentifier, opsets: Mapping[str, int]) -> int | None:
    """The opset version that last changed an operator; ``None`` for one that is unknown or random."""
    domain, op_type, overload = operator
    if domain == packed.DOMAIN:
        return packed.VERSION
    if overload or not onnx.defs.has(op_type, domain):
        return None
    schema = onnx.defs.get_schema(op_type, opsets[domain], domain)
    return None if is_random(schema) else int(schema.since_version)


def tensor_attributes(attributes: Mapping[str, ir.Attr]) -> dict[str, Any]:
    """The attributes of a node in the form that :func:`run_operator` expects."""
    return {
        name: ir.serde.serialize_tensor(attribute.as_tensor())
        if attribute.type == ir.AttributeType.TENSOR
        else attribute.value
        for name, attribute in attributes.items()
    }


def run_operator(
    domain: str, op_type: str, version: int, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The outputs of one operator; exceptions of the reference implementation are not caught."""
    import onnx.reference.ops  # slow to import, and rarely needed by readers of a file

    with np.errstate(all="ignore"):
        kernel = onnx.reference.ops.load_op(domain, op_type, version).create(len(inputs), **attributes)
        return tuple(kernel.run(*inputs))


def encode_tensor(array: np.ndarray) -> dict[str, Any]:
    """A tensor as JSON: its ``dtype`` and its ``value`` as nested lists, with non-finite numbers as strings."""
    values = array.tolist()
    if array.dtype.kind not in "biu" and not np.isfinite(array.astype(np.float64)).all():
        values = _spelled(values)
    return {"dtype": dtype_name(ir.DataType.from_numpy(array.dtype)), "value": values}


def _spelled(value: Any) -> Any:
    if isinstance(value, list):
        return [_spelled(part) for part in value]
    return value if np.isfinite(value) else str(value)


def decode_tensor(document: Mapping[str, Any]) -> np.ndarray:
    """The tensor that :func:`encode_tensor` wrote."""
    array = np.array(document["value"], dtype=object)
    dtype = parse_dtype(document["dtype"]).numpy()
    return array.astype(dtype if dtype.kind in "biu" else np.float64).astype(dtype)
