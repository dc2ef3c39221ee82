"""Front ends: turn a module and its inputs into an unoptimized ONNX graph whose nodes know their calls."""

from typing import Literal

FrontEnd = Literal["auto", "dynamo", "torchscript"]
"""The exporter of PyTorch that captures a model; ``auto`` tries both in this order."""
