"""Exports: the pipeline and its steps."""
