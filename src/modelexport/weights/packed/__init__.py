"""Quantized weights as checkpoints pack them: one file for each format, from its own specification; no torch."""
