"""The commands, grouped in files by purpose. Each parses, calls and shows; slow imports are inside the functions."""
