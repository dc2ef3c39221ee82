"""Checkpoints of a model: weights left in their files, the entries in them, layers that hold packed weights."""
