"""The inputs and outputs of a call, named as in its module's ``forward`` if the sidecar identifies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    results: Mapping[ir.Value, str] = field(default_factory=dict)
    """Outputs to the names of the results."""
    returned: Sequence[str] = ()
    """The names of everything that the module returns, used or not; empty if it is not known."""
    others: Mapping[str, ir.Value] = field(default_factory=dict)
    """Arguments that its nodes do not take as values that are computed, such as constants, by their names."""
    elsewhere: Mapping[str, ir.Value] = field(default_factory=dict)
    """All values that can be used where the call is, by name."""
    missing: Sequence[str] = ()
    """Arguments without a value in the file: what they are was computed ahead."""

    def called(self, value: ir.Value) -> str:
        """The name of the argument of a value, or the value's own name."""
        return self.names.get(value) or value.name or ""


def interface_of(
    tagged: TaggedFile,
    call: ModuleCall,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    elsewhere: Mapping[str, ir.Value] | None = None,
) -> Interface:
    """Sort the values at a call's boundary like its arguments and results: these first, then the others.

    Args:
        elsewhere: The values that can be used where the call is, by name.
    """
    sidecar = tagged.hierarchy
    entries = sidecar.calls if sidecar is not None else []
    entry = next((entry for entry in entries if entry.address == call.address), None)
    arguments = match_values(inputs, entry.inputs) if entry is not None else {}
    results = match_values(outputs, entry.outputs) if entry is not None else {}
    names = {value: tensor.name for value, tensor in arguments.items()}
    left = [each for each in entry.inputs if each.name not in names.values()] if entry is not None else []
    others = {each.name: (elsewhere or {}).get(each.value or "") for each in left}
    return Interface(
        call,
        list(dict.fromkeys([*arguments, *inputs])),
        list(dict.fromkeys([*results, *outputs])),
        names,
        {value: tensor.name for value, tensor in results.items()},
        [each.name for each in entry.outputs] if entry is not None else [],
        {name: value for name, value in others.items() if value is not None},
        elsewhere or {},
        [name for name, value in others.items() if value is None],
    )


@dataclass(frozen=True)
class Wanted:
    """What needs a value, or a result: its name, and others that it is known by."""

    name: str
    also: Sequence[str] = ()


def match_names(
    wanted: Sequence[Wanted],
    offered: Mapping[str, ir.Value],
    given: Mapping[str, str],
    elsewhere: Mapping[str, ir.Value],
    by_position: Sequence[ir.Value],
) -> dict[str, ir.Value]:
    """The value for each name: the one that ``given`` names, or the one of the same name; what is left by position.

    Args:
        given: Names to names of values.
        elsewhere: More values that ``given`` may name.
        by_position: The values that are used in their order, if as many of them are left as names.

    Raises:
        UsageError: The value does not exist.
    """
    found: dict[str, ir.Value] = {}
    for each in wanted:
        if each.name in given:
            value = offered.get(given[each.name]) or elsewhere.get(given[each.name])
            if value is None:
                known = ", ".join(dict.fromkeys(offered)) or "none"
                raise UsageError(f"the call has no value '{given[each.name]}' for '{each.name}': it has {known}")
            found[each.name] = value
            continue
        name = next((name for name in (each.name, *each.also) if name in offered), None)
        if name is not None:
            found[each.name] = offered[name]
    names = [each.name for each in wanted if each.name not in found]
    values = [value for value in dict.fromkeys(by_position) if value not in found.values()]
    if len(names) == len(values):
        found.update(zip(names, values, strict=True))
    return found


def offered_names(interface: Interface, values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    """Values by the names of their arguments, and by their own names."""
    found: dict[str, ir.Value] = {}
    for value in values:
        found.setdefault(interface.called(value), value)
        found.setdefault(value.name or "", value)
    for name, value in interface.others.items():
        found.setdefault(name, value)
    return found


def spellings(name: str) -> tuple[str, ...]:
    """The ways in which a name is written: a part of an argument is ``past.0`` or, as an input, ``past_0``."""
    return tuple(dict.fromkeys((name, name.replace(".", "_"))))
