"""Whether a file is its model: `verify.py` is the page to read."""
