"""Runs of a model: its trace, its outputs as users run it, and what changes from run to run."""
