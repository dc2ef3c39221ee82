"""Sizes that several rooms agree on."""

BATCH_BYTES = 512 * 2**20
"""How much of the values of a run is held at a time."""
