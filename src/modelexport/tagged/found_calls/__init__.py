"""The calls of a file that has no tags of ours: from metadata, local functions, names of nodes and of parameters."""
