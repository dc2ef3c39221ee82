"""In an exported file: how an initializer is computed from ``state_dict`` entries, and recomputing it.

The operators are run by onnx's reference implementation, which also folded them, so the bytes are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.json_decoding import decode_json
from modelexport.errors import FileFormatError, WeightsError
from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.dtypes import dtype_name, parse_dtype
from modelexport.format.keys import LOST, PARAMETER, STATE_DICT, TRANSFORM, UNRECORDED, UNRECORDED_DOMAIN
from modelexport.graph.nodes import initializers, is_random
from modelexport.weights.packed import repacking as packed


class ParameterPlan(msgspec.Struct, frozen=True):
    """How an initializer is computed from ``state_dict`` entries."""

    keys: list[str]
    """``state_dict`` keys; the names of a tied parameter are adjacent."""
    steps: list[TransformStep]
    """The steps of the computation; empty when the initializer is the entry itself."""

    @property
    def recorded(self) -> bool:
        """Whether the steps can be run: a step of another tool is recorded without its computation."""
        return not any((step.domain, step.op_type) == (UNRECORDED_DOMAIN, UNRECORDED) for step in self.steps)

    def inputs(self) -> list[str]:
        """The keys that the steps use: the first name of each parameter."""
        named = {name for step in self.steps for name in step.inputs}
        return [key for key in self.keys if key in named] or self.keys[:1]

    def groups(self) -> list[tuple[str, ...]]:
        """All names of each parameter."""
        starts = [self.keys.index(key) for key in self.inputs()]
        return [tuple(self.keys[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]

    def renamed(self, names: Mapping[str, str]) -> list[TransformStep]:
        """The steps, with other names of the entries that they take."""
        return [msgspec.structs.replace(s, inputs=[names.get(each, each) for each in s.inputs]) for s in self.steps]

    def compute(self, tensors: Mapping[str, np.ndarray], *, wide: bool = False) -> np.ndarray:
        """The initializer's value, from the entries of :meth:`inputs`.

        Args:
            wide: As in :func:`apply_transform`.
        """
        try:
            return apply_transform(self.steps, tensors, wide=wide) if self.steps else tensors[self.keys[0]]
        except KeyError as error:
            raise FileFormatError(
                f"a transform of {', '.join(self.keys) or 'nothing'} uses {error}, which is not a parameter of it: the "
                "file has damaged metadata; export it again"
            ) from error


def lost_entries(model: ir.Model) -> list[str]:
    """The entries that no initializer comes from any more, or not alone, as the file says that a tool changed."""
    try:
        return list[str](decode_json(model.metadata_props.get(LOST, "[]"), kind=list[str]))
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FileFormatError(f"the file has a damaged list of lost parameters ({error}): export it again") from error


def parameter_plan(value: ir.Value) -> ParameterPlan | None:
    """How an initializer's metadata says that it is computed; ``None`` if it does not come from an entry.

    Raises:
        FileFormatError: The metadata is damaged.
    """
    if PARAMETER not in value.metadata_props:
        return None
    try:
        keys = decode_json(value.metadata_props[PARAMETER], kind=list[str])
        encoded = value.metadata_props.get(TRANSFORM)
        steps = decode_json(encoded, kind=list[TransformStep]) if encoded is not None else []
        if not keys:
            raise ValueError("it comes from no parameter")
    except (ValueError, UnicodeError) as error:
        raise FileFormatError(f"initializer {value.name} has damaged metadata ({error}): export it again") from error
    return ParameterPlan(keys, steps)


def parameter_plans(model: ir.Model) -> dict[ir.Value, ParameterPlan]:
    """The initializers of a model that come from entries, with how each is computed.

    Raises:
        FileFormatError: Their metadata is damaged.
    """
    return {value: plan for value in initializers(model) if (plan := parameter_plan(value)) is not None}


def record_plan(value: ir.Value, plan: ParameterPlan) -> None:
    """Write into an initializer's metadata how it is computed."""
    value.metadata_props[PARAMETER] = json.dumps(plan.keys)
    value.metadata_props.pop(TRANSFORM, None)
    if plan.steps:
        value.metadata_props[TRANSFORM] = msgspec.json.encode(plan.steps).decode()


def record_state_dict(model: ir.Model, entries: Mapping[str, StateDictEntry]) -> None:
    """Write the ``state_dict`` entries of the exported module into a model's metadata."""
    model.metadata_props[STATE_DICT] = msgspec.json.encode(entries).decode()


def record_own_names(model: ir.Model, chosen: Iterable[ir.Value] | None = None) -> None:
    """Record initializers, by default all, as parameters under their own names: those of a file without tags."""
    entries = {}
    for value in initializers(model) if chosen is None else chosen:
        if (tensor := value.const_value) is not None and value.name:
            record_plan(value, ParameterPlan([value.name], []))
            entries[value.name] = StateDictEntry(dtype_name(tensor.dtype), list(tensor.shape.numpy()), True)
    record_state_dict(model, entries)


def forget_own_names(model: ir.Model) -> None:
    """Undo :func:`record_own_names`."""
    model.metadata_props.pop(STATE_DICT, None)
    for value in initializers(model):
        value.metadata_props.pop(PARAMETER, None)


def state_dict_of(model: ir.Model) -> dict[str, StateDictEntry]:
    """The ``state_dict`` entries of the module that a tagged file was exported from.

    Raises:
        FileFormatError: The file has no list of entries, or its metadata is damaged.
    """
    if STATE_DICT not in model.metadata_props:
        raise FileFormatError("the file has no list of its module's parameters: export it again")
    try:
        return decode_json(model.metadata_props[STATE_DICT], kind=dict[str, StateDictEntry])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise FileFormatError(f"the file has a damaged list of parameters ({error}): export it again") from error


def apply_transform(
    steps: Sequence[TransformStep], tensors: Mapping[str, np.ndarray], *, wide: bool = False
) -> np.ndarray:
    """Compute an initializer from ``state_dict`` entries.

    Args:
        steps: The content of ``modelexport.transform``.
        tensors: The entries by their keys, as PyTorch has them.
        wide: The entries are in float64, and so is everything that is computed of them.

    Raises:
        KeyError: An entry is missing.
        FileFormatError: A step cannot be run.
        WeightsError: A packed weight is not of the kind that the file was exported with.
    """
    outputs: dict[str, Any] = {}
    for number, step in enumerate(steps):
        try:
            inputs = [_input(name, outputs, tensors) for name in step.inputs]
            results = _run(step, inputs, wide=wide)
        except (KeyError, WeightsError):
            raise
        except Exception as error:  # onnx's implementations, given any arrays, raise anything
            raise FileFormatError(
                f"step {number} of a transform, {step.op_type}, cannot be run ({type(error).__name__}: {error}): "
                "the tensors do not fit, or the file was written by another version; export it again"
            ) from error
        outputs[f"%{number}"] = results[0]
        outputs.update((f"%{number}:{i}", result) for i, result in enumerate(results))
    result = outputs[f"%{len(steps) - 1}"]
    assert isinstance(result, np.ndarray)
    return result


def _input(name: str, outputs: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Any:
    if not name:
        return None
    return outputs[name] if name in outputs else tensors[name]


def _run(step: TransformStep, inputs: Sequence[Any], *, wide: bool) -> tuple[Any, ...]:
    if step.op_type == "Constant" and not step.domain:
        array = decode_tensor(step.attributes["value"])
        return (array.astype(np.float64) if wide and array.dtype.kind not in "biu" else array,)
    if wide and step.op_type == "Cast" and ir.DataType(step.attributes["to"]).is_floating_point():
        return (inputs[0].astype(np.float64),)
    if step.domain == packed.DOMAIN:
        return (packed.run(step.op_type, step.attributes, inputs),)
    attributes = {
        name: ir.serde.serialize_tensor(ir.tensor(decode_tensor(value))) if isinstance(value, dict) else value
        for name, value in step.attributes.items()
    }
    return run_operator(step.domain, step.op_type, step.version, inputs, attributes)


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
        results = onnx.reference.ops.load_op(domain, op_type, version).eval(*inputs, **attributes)
    return results if isinstance(results, tuple) else (results,)


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
