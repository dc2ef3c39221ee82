"""The inputs and outputs of a call, named as in its module's ``forward`` if the sidecar identifies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.graph.boundaries import match_values
from modelexport.tagged.file import TaggedFile


@dataclass(frozen=True)
class Interface:
    """The values that enter and leave a call, in the order of ``forward``'s arguments and results."""

    call: ModuleCall
    inputs: list[ir.Value]
    outputs: list[ir.Value]
    names: Mapping[ir.Value, str]
    """Inputs to the names of their arguments."""

    def called(self, value: ir.Value) -> str:
        """The name of the argument of a value, or the value's own name."""
        return self.names.get(value) or value.name or ""


def interface_of(
    tagged: TaggedFile, call: ModuleCall, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> Interface:
    """Sort the values at a call's boundary like its arguments and results: these first, then the others."""
    sidecar = tagged.hierarchy
    entries = sidecar.calls if sidecar is not None else []
    entry = next((entry for entry in entries if entry.address == call.address), None)
    arguments = match_values(inputs, entry.inputs) if entry is not None else {}
    results = match_values(outputs, entry.outputs) if entry is not None else {}
    return Interface(
        call,
        list(dict.fromkeys([*arguments, *inputs])),
        list(dict.fromkeys([*results, *outputs])),
        {value: tensor.name for value, tensor in arguments.items()},
    )


def match_names(
    wanted: Sequence[str], offered: Mapping[str, ir.Value], given: Mapping[str, str], what: str, whose: str
) -> list[ir.Value]:
    """The value for each name: the one in ``given``, the one of the same name, or the one in the same position.

    Positions are used if the numbers of names and values are equal and ``given`` is empty.

    Args:
        offered: Values by name; several names of one value are adjacent.
        what: ``inputs`` or ``outputs``, for messages.
        whose: The call, for messages.

    Raises:
        UsageError: A name has no value.
    """
    if unknown := [name for name in given.values() if name not in offered]:
        raise UsageError(f"{whose} has no value '{unknown[0]}': it has {', '.join(offered)}")
    found = {name: offered[given.get(name, name)] for name in wanted if given.get(name, name) in offered}
    if len(found) == len(wanted):
        return [found[name] for name in wanted]
    values = list(dict.fromkeys(offered.values()))
    if not given and len(values) == len(wanted):
        return values
    missing = [name for name in wanted if name not in found]
    raise UsageError(
        f"{whose} has the {what} {_listed(offered)}, and the model to put there has {', '.join(wanted)}: map "
        f"{', '.join(missing)} with --map {missing[0]}={next(iter(offered), 'VALUE')}"
    )


def offered_names(interface: Interface, values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    """Values by the names of their arguments, and by their own names."""
    found: dict[str, ir.Value] = {}
    for value in values:
        found.setdefault(interface.called(value), value)
        found.setdefault(value.name or "", value)
    return found


def _listed(offered: Mapping[str, ir.Value]) -> str:
    first: dict[ir.Value, str] = {}
    for name, value in offered.items():
        first.setdefault(value, name)
    return ", ".join(first.values()) or "none"
