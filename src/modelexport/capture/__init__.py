"""Front ends: a module and its inputs become an unoptimised ONNX graph whose nodes know their calls."""

from typing import Literal

from modelexport.errors import UsageError

FrontEnd = Literal["auto", "dynamo", "torchscript"]

TRACED_OPSETS = range(9, 21)
"""What the TorchScript exporter writes."""

OPSETS = range(TRACED_OPSETS[0], 25)
"""What one front end or the other writes."""


def check_opset(opset: int | None) -> None:
    """Refuse an opset that no front end writes, before anything runs.

    Raises:
        UsageError: It is one.
    """
    if opset is not None and opset not in OPSETS:
        raise UsageError(f"no front end writes opset {opset}: choose one from {OPSETS[0]} to {OPSETS[-1]}")
