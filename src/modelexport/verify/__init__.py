"""Compares a file with its model: `verify.py` is the page to read."""
