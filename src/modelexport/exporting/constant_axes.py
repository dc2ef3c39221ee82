"""Dynamic axes of which a capture made constants, though the model accepts other sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelexport.capture.exported_graph import Exported
from modelexport.core.calls import ROOT
from modelexport.exporting.fixed_axes import FixedAxis
from modelexport.exporting.requested_names import RequestedNames

if TYPE_CHECKING:
    from modelexport.pytorch.nested_tensors import Inputs
    from modelexport.verify.model_and_file import ModelAndFile


def find_constant_axes(
    pair: ModelAndFile, inputs: Inputs, exported: Exported, names: RequestedNames
) -> list[FixedAxis]:
    """The axes that a capture made constant, though the model accepts other sizes: ``math.sqrt(n)``, ``for row in x``.

    Axes of one size that one line made constant change together, as the model may want them to be equal, and alone.
    """
    from modelexport.pytorch.inputs.other_sizes import inputs_of_file, with_sizes

    constant_conditions = {item.symbols[0]: item for item in exported.conditions if _CONSTANT.fullmatch(item.formula)}
    values = {symbol: int(item.formula.split()[-1]) for symbol, item in constant_conditions.items()}
    ports = {
        name: port.position for port, name in exported.values.items() if port.call == ROOT and port.side == "inputs"
    }
    declared = {value.name: value.shape for value in pair.tagged.model.graph.inputs}
    specs, axes = exported.calls.calls[0].inputs, dict[str, list[str | None]]()
    for name in inputs_of_file(inputs, pair.tagged.model).values():
        shape = specs[ports[name]].shape if ports.get(name, len(specs)) < len(specs) else ()
        fixed = [isinstance(size, int) for size in declared.get(name) or ()]
        axes[name] = [
            _symbol_of(size, values) if is_fixed else None for size, is_fixed in zip(shape, fixed, strict=False)
        ]
    sizes = {symbol: values[symbol] for symbols in axes.values() for symbol in symbols if symbol is not None}
    alike: dict[tuple[str, int], list[str]] = {}
    for symbol, size in sizes.items():
        if size > 1:
            alike.setdefault((constant_conditions[symbol].where, size), []).append(symbol)
    alone = [[symbol] for group in alike.values() if len(group) > 1 for symbol in group]
    accepted: set[str] = set()
    for group in [*alike.values(), *alone][:_GROUPS]:
        for times, more in ((1, 1), (2, 0), (4, 0), (1, -1)):
            now = {symbol: times * sizes[symbol] + more for symbol in group}
            if not accepted.issuperset(group) and _accepts(pair, with_sizes(inputs, pair.tagged.model, now, axes)):
                accepted.update(group)
    return [
        FixedAxis(
            input=name,
            axis=axis,
            symbol=names.leading[axis] if axis < len(names.leading) else symbol,
            size=sizes[symbol],
            call="",
            reason=f"it is a constant of the file: {condition.where or 'torch.export'}: `{condition.source}`",
        )
        for name, symbols in axes.items()
        for axis, symbol in enumerate(symbols)
        if symbol in accepted
        for condition in [constant_conditions[symbol]]
    ]


_GROUPS = 16
"""How many groups of axes are tried with other sizes."""
_CONSTANT = re.compile(r"\w+ == \d+")


def _symbol_of(size: int | str, values: Mapping[str, int]) -> str | None:
    """The symbol of an axis that became constant. A second capture by TorchDynamo has calls without symbols."""
    if isinstance(size, int):
        return next((symbol for symbol, value in values.items() if value == size), None)
    return size if size in values else None


def _accepts(pair: ModelAndFile, inputs: Inputs) -> bool:
    from modelexport.pytorch.runs.outputs_as_users_run import returned_by

    try:
        returned_by(pair.model, inputs)
    except Exception:  # a model may raise anything for sizes that it does not accept
        return False
    return True
