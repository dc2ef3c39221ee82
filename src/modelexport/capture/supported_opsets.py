"""The opsets that front ends write."""

from modelexport.errors import UsageError

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
