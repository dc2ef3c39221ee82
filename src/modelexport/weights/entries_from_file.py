"""``state_dict`` entries taken out of a file: the recorded transforms of its initializers, undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from modelexport.errors import WeightsError
from modelexport.format.documents import StateDictEntry, TransformStep
from modelexport.format.dtypes import parse_dtype
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.weights.recorded_transforms import apply_transform, compute_planned, decode_tensor, encode_tensor

Stored = tuple[ParameterPlan, np.ndarray]
"""How an initializer is computed, and its value."""
_NO_ELEMENT = -(2**40)
"""The number of an element of a constant: arithmetic with it gives no number that an element of an entry has."""
OPPOSITE = {"Add": np.subtract, "Sub": np.add, "Mul": np.divide, "Div": np.multiply}
"""Operators that are undone with the constant that they take, to what undoes them."""


def recover(
    keys: Iterable[str], entries: Mapping[str, StateDictEntry], stored: Iterable[Stored]
) -> dict[str, np.ndarray]:
    """Entries as PyTorch had them, from the initializers that were computed from them.

    A transform that only moves elements is run on their numbers instead, which tells where each went. Elements that no
    initializer has are zero: nothing in the file depends on them. Whether the result is right is tested by computing
    the initializers from it again.

    Args:
        keys: The first name of each parameter.
        stored: The initializers that depend on these.

    Raises:
        WeightsError: An initializer does more than move elements. Names the entry.
    """
    stored = list(stored)
    recovered: dict[str, np.ndarray] = {}
    for key in keys:
        whole = next((array for plan, array in stored if not plan.steps and plan.keys[0] == key), None)
        recovered[key] = _undo_moves(key, entries, stored) if whole is None else whole
    for plan, array in stored:
        if plan.steps and transposition(plan.steps) is None and any(key in recovered for key in plan.inputs()):
            _check(plan, array, recovered)
    return recovered


def _undo_moves(key: str, entries: Mapping[str, StateDictEntry], stored: Iterable[Stored]) -> np.ndarray:
    entry = entries[key]
    result = np.zeros(entry.shape, parse_dtype(entry.dtype).numpy())
    for plan, array in stored:
        if key not in plan.inputs():
            continue
        if (axes := transposition(plan.steps)) is not None:
            return np.ascontiguousarray(array.transpose(np.argsort(axes)))
        numbers = _numbers(key, plan, entries)
        if numbers is None or numbers.shape != array.shape:
            return _undo_arithmetic(key, plan, entries[key], array)
        here = (numbers > 0) & (numbers <= result.size)
        result.reshape(-1)[numbers[here] - 1] = array[here].astype(result.dtype)
    return result


def transposition(steps: Iterable[TransformStep]) -> list[int] | None:
    """The axes of a transform that is one transposition."""
    steps = list(steps)
    if len(steps) != 1 or steps[0].op_type != "Transpose" or steps[0].domain:
        return None
    axes = steps[0].attributes.get("perm")
    return [1, 0] if axes is None else list(axes)


def _numbers(key: str, plan: ParameterPlan, entries: Mapping[str, StateDictEntry]) -> np.ndarray | None:
    """Which element of the entry each element of the initializer is, counted from 1; others are above or below."""
    start, numbered = 1, {}
    for name in sorted(plan.inputs(), key=lambda name: name != key):
        size = int(np.prod(entries[name].shape, dtype=np.int64))
        numbered[name] = np.arange(start, start + size, dtype=np.int64).reshape(entries[name].shape)
        start += size
    try:
        numbers = apply_transform([_of_numbers(step) for step in plan.steps], numbered)
    except Exception:  # an operator that does not take whole numbers
        return None
    are_moved = ((numbers >= 0) & (numbers < start)) | (numbers == _NO_ELEMENT)
    return numbers if numbers.dtype == np.int64 and are_moved.all() else None


def _of_numbers(step: TransformStep) -> TransformStep:
    """A step for the numbers of elements: it keeps their type, and its floating-point constants are no elements."""
    if step.op_type == "Cast":
        return msgspec.structs.replace(step, op_type="Identity", attributes={}, version=1)
    if step.op_type == "Constant" and (array := decode_tensor(step.attributes["value"])).dtype.kind not in "biu":
        return msgspec.structs.replace(step, attributes={"value": encode_tensor(np.full(array.shape, _NO_ELEMENT))})
    return step


def _undo_arithmetic(key: str, plan: ParameterPlan, entry: StateDictEntry, array: np.ndarray) -> np.ndarray:
    """The entry of a transform that adds or multiplies constants, by the opposite steps from its end.

    The last bits may differ from those of the original; the initializer is the same (see :func:`_check`).
    """
    constants = {
        f"%{i}": decode_tensor(s.attributes["value"]) for i, s in enumerate(plan.steps) if s.op_type == "Constant"
    }
    for number, step in reversed(list(enumerate(plan.steps))):
        if f"%{number}" in constants:
            continue
        others = [constants[name] for name in step.inputs[1:] if name in constants]
        if step.op_type not in OPPOSITE or len(others) != 1 or step.inputs[0] not in (key, f"%{number - 1}"):
            raise _unrecoverable(key)
        array = OPPOSITE[step.op_type](array, others[0]).astype(array.dtype)
    if list(array.shape) != entry.shape:
        raise _unrecoverable(key)
    return array


def _check(plan: ParameterPlan, array: np.ndarray, recovered: Mapping[str, np.ndarray]) -> None:
    """Compute an initializer from its entries again; all of them have to be known."""
    unknown = [key for key in plan.inputs() if key not in recovered]
    if unknown:
        raise _unrecoverable(plan.inputs()[0])
    again = compute_planned(plan, recovered)
    if again.shape != array.shape or again.tobytes() != np.ascontiguousarray(array).tobytes():
        raise _unrecoverable(plan.inputs()[0])


def _unrecoverable(key: str) -> WeightsError:
    return WeightsError(
        f"the file holds {key} only in a form from which it cannot be computed: give the weights that it was exported "
        "with as WEIGHTS.safetensors, beside --adapter"
    )
