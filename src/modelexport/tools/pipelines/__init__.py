"""Pipelines of diffusers: a graph for each method of their models that a run calls."""
