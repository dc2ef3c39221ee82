"""Inputs that a model runs with, found by its signature, its configs and trial runs, or described by a person."""
