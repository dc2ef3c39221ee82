"""The conditions of sizes that a file states before it is run or if it is not; ``settled_conditions.py`` has others."""

from __future__ import annotations

from collections.abc import Sequence

from modelexport.capture.exported_graph import Exported
from modelexport.graph.size_conditions import SizeCondition
from modelexport.graph.size_symbols import SYMBOL


def stated_unchecked(exported: Exported) -> Sequence[SizeCondition]:
    """The conditions that a file states if it is not run: what the model's own code decides."""
    known = {symbol for value in exported.model.graph.inputs for size in value.shape or () if not isinstance(size, int)
             for symbol in SYMBOL.findall(str(size.value))}  # fmt: skip
    return [
        condition for condition in exported.conditions if condition.in_model and known.issuperset(condition.symbols)
    ]
