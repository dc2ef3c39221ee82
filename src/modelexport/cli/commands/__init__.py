"""The commands, in files named after them. Each parses, calls and shows; slow imports are inside the functions."""
