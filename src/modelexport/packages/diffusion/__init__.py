"""Pipelines of diffusers: loaded, run, and taken apart into the models that a run calls."""
