"""Front ends: turn a module and its inputs into an unoptimized ONNX graph whose nodes know their calls."""

from typing import Literal

FrontEnd = Literal["auto", "dynamo", "torchscript"]

OPSETS = range(9, 25)
"""The opsets that at least one front end writes."""
