"""Front ends: a module and its inputs become an unoptimised ONNX graph in which every node's owner is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from modelexport.core.calls import CallTree, Port


@dataclass(frozen=True, slots=True)
class Exported:
    """What every front end returns."""

    model: ir.Model
    """Unoptimised. Nodes that the exporter recorded a call for carry their owner (see :mod:`modelexport.graph`)."""
    calls: CallTree
    """Every call that was captured, those inside the branches of ``torch.cond`` included."""
    parameters: Mapping[str, tuple[str, ...]]
    """Name of an initializer to the ``state_dict`` keys that it is: several for a tied parameter."""
    values: Mapping[Port, str]
    """Which value of the graph is which tensor of PyTorch: what each call gets and returns, where that is known."""
    output_names: tuple[str, ...]
    """A name for each graph output: the field of what the model returns, or ``output``, ``output.0``, ..."""
    frontend: str
    """The front end that made it."""
    dynamo_failure: str = ""
    """Why the front end that was tried first, `dynamo`, did not."""
    constants: Mapping[str, str] = field(default_factory=dict)
    """The arguments that the graph does not take, to the values that it keeps."""
    messages: tuple[str, ...] = ()
    """What the exporter warned of, a line each."""
