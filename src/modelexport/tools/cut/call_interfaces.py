"""The inputs and outputs of a call, named as in its module's ``forward`` if the sidecar identifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.format.documents import CallEntry
from modelexport.graph.boundaries import match_values
from modelexport.tagged.file import TaggedFile


@dataclass(frozen=True)
class CallInterface:
    """The values that enter and leave a call, in the order of ``forward``'s arguments and results."""

    call: ModuleCall
    inputs: list[ir.Value]
    outputs: list[ir.Value]
    names: Mapping[ir.Value, str]
    """Inputs to the names of their arguments."""
    results: Mapping[ir.Value, str] = field(default_factory=dict)
    """Outputs to the names of the results."""
    entry: CallEntry | None = None
    """The call in the sidecar, if there is one."""
    others: Mapping[str, ir.Value] = field(default_factory=dict)
    """Arguments that its nodes do not take as values that are computed, such as constants, by their names."""
    elsewhere: Mapping[str, ir.Value] = field(default_factory=dict)
    """All values that can be used where the call is, by name."""
    missing: Sequence[str] = ()
    """Arguments without a value in the file: what they are was computed ahead."""

    def called(self, value: ir.Value) -> str:
        """The name of the argument of a value, or the value's own name."""
        return self.names.get(value) or value.name or ""

    def offered(self) -> dict[str, ir.Value]:
        """Its arguments by their names, and by the names of their values."""
        named: dict[str, ir.Value] = {}
        for value in self.inputs:
            named.setdefault(self.called(value), value)
            named.setdefault(value.name or "", value)
        return named | {**self.others, **named}


def interface_of(
    tagged: TaggedFile,
    call: ModuleCall,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    elsewhere: Mapping[str, ir.Value] | None = None,
) -> CallInterface:
    """Sort the values at a call's boundary like its arguments and results: these first, then the others.

    Args:
        elsewhere: The values that can be used where the call is, by name.
    """
    entries = tagged.hierarchy.calls if tagged.hierarchy is not None else []
    entry = next((entry for entry in entries if entry.address == call.address), None)
    arguments = match_values(inputs, entry.inputs) if entry is not None else {}
    results = match_values(outputs, entry.outputs) if entry is not None else {}
    names = {value: tensor.name for value, tensor in arguments.items()}
    left = [each for each in entry.inputs if each.name not in names.values()] if entry is not None else []
    others = {each.name: (elsewhere or {}).get(each.value or "") for each in left}
    return CallInterface(
        call,
        list(dict.fromkeys([*arguments, *inputs])),
        list(dict.fromkeys([*results, *outputs])),
        names,
        {value: tensor.name for value, tensor in results.items()},
        entry,
        {name: value for name, value in others.items() if value is not None},
        elsewhere or {},
        [name for name, value in others.items() if value is None],
    )


def match_names(
    wanted: Mapping[str, Sequence[str]],
    offered: Mapping[str, ir.Value],
    mapping: Mapping[str, str],
    elsewhere: Mapping[str, ir.Value],
    by_position: Sequence[ir.Value],
) -> dict[str, ir.Value]:
    """The value for each name: the one that ``mapping`` names, or the one of the same name; what is left by position.

    Args:
        wanted: Each name, with others that it is known by.
        mapping: Names to names of values.
        elsewhere: More values that ``mapping`` may name.
        by_position: The values that are used in their order, if as many of them are left as names.
    """
    matched: dict[str, ir.Value] = {}
    for name, others in wanted.items():
        if name in mapping:
            value = offered.get(mapping[name]) or elsewhere.get(mapping[name])
            if value is None:
                known = ", ".join(offered) or "none"
                raise UsageError(f"the call has no value '{mapping[name]}' for '{name}': it has {known}")
            matched[name] = value
        elif (other := next((other for other in (name, *others) if other in offered), None)) is not None:
            matched[name] = offered[other]
    names = [name for name in wanted if name not in matched]
    values = [value for value in dict.fromkeys(by_position) if value not in matched.values()]
    if len(names) == len(values):
        matched.update(zip(names, values, strict=True))
    return matched


def spellings(name: str) -> tuple[str, ...]:
    """The ways in which a name is written: a part of an argument is ``past.0`` or, as an input, ``past_0``."""
    return tuple(dict.fromkeys((name, name.replace(".", "_"))))
