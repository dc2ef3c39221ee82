"""Front ends: a module and its inputs become an unoptimised ONNX graph whose nodes know their calls."""

from typing import Literal

FrontEnd = Literal["auto", "dynamo", "torchscript"]

OPSETS = range(9, 25)
"""What one or the other writes."""
