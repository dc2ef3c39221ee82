"""Faults to plant in exported files, for ``benchmarks/faults.py``: each is one change of a right file."""
