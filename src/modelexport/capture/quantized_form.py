"""How the layers of a quantized checkpoint are written: as ``MatMulNBits`` or with ``DequantizeLinear``."""

from dataclasses import dataclass
from typing import Literal

QuantizedAs = Literal["nbits", "qdq"]
"""What the layers of a quantized checkpoint become: ``MatMulNBits``, or ``DequantizeLinear`` and ``MatMul``."""


@dataclass(frozen=True)
class QuantizedForm:
    """How the layers of a quantized checkpoint are written."""

    quantized_as: QuantizedAs = "nbits"
    accuracy_level: int = 0
    """The attribute of ``MatMulNBits``."""


USUAL_FORM = QuantizedForm()
