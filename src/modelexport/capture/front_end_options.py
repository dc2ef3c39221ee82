"""What a capture can be asked for: the front end, the opset, and how layers of quantized checkpoints are written."""

from dataclasses import dataclass
from typing import Literal

from modelexport.errors import UsageError

FrontEnd = Literal["auto", "dynamo", "torchscript"]

QuantizedAs = Literal["nbits", "qdq"]
"""What the layers of a quantized checkpoint become: ``MatMulNBits``, or ``DequantizeLinear`` and ``MatMul``."""


@dataclass(frozen=True)
class QuantizedForm:
    """How the layers of a quantized checkpoint are written."""

    quantized_as: QuantizedAs = "nbits"
    accuracy_level: int = 0
    """The attribute of ``MatMulNBits``."""


USUAL_FORM = QuantizedForm()

TRACED_OPSETS = range(9, 21)
"""The opsets that the TorchScript exporter writes."""

OPSETS = range(TRACED_OPSETS[0], 25)
"""The opsets that at least one front end writes."""


def check_opset(opset: int | None) -> None:
    """Refuse an opset that no front end writes, before the model runs.

    Raises:
        UsageError: No front end writes the opset.
    """
    if opset is not None and opset not in OPSETS:
        raise UsageError(f"no front end writes opset {opset}: choose one from {OPSETS[0]} to {OPSETS[-1]}")
