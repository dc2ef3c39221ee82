"""Optimizers of other packages, run on tagged files."""
