"""The opsets that front ends write."""

TRACED_OPSETS = range(9, 21)
"""The opsets that the TorchScript exporter writes."""

OPSETS = range(TRACED_OPSETS[0], 25)
"""The opsets that at least one front end writes."""
