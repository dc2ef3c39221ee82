"""The result of a front end: an unoptimized ONNX graph in which every node's owner is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import CallTree, Port
from modelexport.graph.size_conditions import SizeCondition
from modelexport.graph.size_symbols import SYMBOL


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of every front end."""

    model: ir.Model
    """The unoptimized model. Nodes whose call the exporter recorded have an owner (see :mod:`modelexport.graph`)."""
    calls: CallTree
    """Every call that was captured, those inside the branches of ``torch.cond`` included."""
    parameters: Mapping[str, tuple[str, ...]]
    """Name of an initializer to its ``state_dict`` keys: several for a tied parameter."""
    values: Mapping[Port, str]
    """The values of the graph that hold the tensors that calls get and return in PyTorch, where known."""
    output_names: tuple[str, ...]
    """A name for each graph output: the field of what the model returns, or ``output``, ``output.0``, ..."""
    frontend: str
    """The front end that made the graph."""
    constants: Mapping[str, str] = field(default_factory=dict)
    """The arguments that the graph does not take, to the values that it keeps."""
    exposed: int = 0
    """How many of the outputs, the last ones, are what inner calls return."""
    presumed: tuple[str, ...] = ()
    """The lines of the model, ``net.py:12``, that ask whether anything is selected: the graph is for yes."""
    answered: bool = False
    """The model asks for values, and the graph has one of the answers."""
    conditions: tuple[SizeCondition, ...] = ()
    """The conditions of the sizes of its inputs for which its Python code decides as in the capture."""
    messages: tuple[str, ...] = ()
    """The exporter's warnings, one line each."""

    @property
    def unchecked_conditions(self) -> list[SizeCondition]:
        """The conditions that a file states before it is run or if it is not: what the model's own code decides."""
        sizes = (size for value in self.model.graph.inputs for size in value.shape or ())
        known = {symbol for size in sizes if not isinstance(size, int) for symbol in SYMBOL.findall(str(size.value))}
        return [one for one in self.conditions if one.in_model and known.issuperset(one.symbols)]
