"""Sizes that several rooms agree on, and how much of what others wrote is read.

The second are far above what real models have and far below what would fill a machine.
"""

BATCH_BYTES = 512 * 2**20
"""How much of the values of a run is held at a time."""

ABANDONED_SECONDS = 60
"""How old a staging folder without a lock is before it counts as left by a run that was killed."""

DOCUMENT_BYTES = 2 * 2**30
"""Of a JSON document beside a model."""
SETTINGS_BYTES = 64 * 2**20
"""Of a configuration, an index of a checkpoint, or a description of inputs."""
PROTO_BYTES = 2 * 2**30
"""Of an ONNX file without its weights: what protobuf can read."""
CALLS = 1_000_000
"""Calls in the call tree of a file, after equal ones have been written out."""
CALL_TREE_CHARACTERS = 400_000_000
"""Characters of all their addresses and tags."""
CALL_DEPTH = 200
"""Calls inside one another."""
INLINED_NODES = 2_000_000
"""Nodes of a file after its functions have been put in the place of their calls."""
MODULES = 100_000
"""Modules of a model that a configuration describes."""
LAYERS = 10_000
"""What a configuration may say under any name with `layer` in it."""
ELEMENTS_PER_BYTE = 4
"""Elements of parameters and buffers for each byte of a checkpoint: half a byte is what the smallest take."""
SPARE_ELEMENTS = 100_000_000
"""Elements that a checkpoint may lack: new heads, tables of positions."""
ELEMENTS = 2**28
"""Elements of an input that a description, or a file's fixed sizes, ask for."""
RANDOM_ELEMENTS = 2**26
"""Elements of the random inputs of a file: they are drawn in double precision."""
INPUT_BYTES = 2**30
"""Of all arrays in a file of inputs, after it is unpacked."""
FORMULA_CHARACTERS = 1000
"""Of a size that is written as a formula; longer ones are names."""
SIZE_DIGITS = 40
"""Of a number in such a formula, and of what it computes."""
