"""The options of a capture, as every front end takes them. Without torch, which the command line does not import."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

TRACED_OPSETS = range(9, 21)
"""The opsets that the TorchScript exporter writes."""
OPSETS = range(TRACED_OPSETS[0], 25)
"""The opsets that at least one front end writes."""
QuantizedAs = Literal["nbits", "qdq"]
"""What the layers of a quantized checkpoint become: ``MatMulNBits``, or ``DequantizeLinear`` and ``MatMul``."""


@dataclass(frozen=True)
class QuantizedForm:
    """How the layers of a quantized checkpoint are written."""

    quantized_as: QuantizedAs = "nbits"
    accuracy_level: int = 0
    """The attribute of ``MatMulNBits``."""


@dataclass(frozen=True, kw_only=True)
class FrontEndOptions:
    """How a front end captures and translates a model."""

    dynamic: bool = False
    """Make every axis of every input dynamic. ``dynamo`` leaves out those that the model fixes; a trace cannot tell."""
    ones: bool = True
    """Also the axes of size one, which ``torch.onnx`` takes for larger ones."""
    opset: int | None = None
    """The opset of the ONNX standard domain; ``None`` for the exporter's default."""
    constants: Collection[str] = ()
    """Arguments whose values the graph keeps, instead of taking them as inputs."""
    stack_traces: bool = False
    """Record the lines of Python of each node in its metadata. Only for ``dynamo``: a trace always has them."""
    lines: bool = True
    """Note the line of the model's code that makes each node."""
    form: QuantizedForm = QuantizedForm()
    """How the layers of a quantized checkpoint are written. Only for ``dynamo``: a trace does not translate them."""


DEFAULTS = FrontEndOptions()
