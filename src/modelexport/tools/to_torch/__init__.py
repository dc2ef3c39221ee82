"""Back to PyTorch: a tree of modules out of a file, as source code that a person can read, and its weights."""
