"""Limits on input files, and other sizes that several rooms share.

The limits are far above what real models need and far below what would exhaust a machine's memory.
"""

ABANDONED_SECONDS = 60
"""The age at which a staging folder without a lock is taken to be left over from a killed run."""

LOCK_SECONDS = 5
"""How long a command waits for another one that moves files into the same folder, which takes milliseconds."""
LARGE_WEIGHTS = 10**9
"""Bytes of weights above which they stay in their files: a model is built without them, does not run at its export,
and its file has them beside it."""
CHECKED_BYTES = 2 * 10**9
"""Bytes of the largest model with its weights that is loaded and run before it takes its place."""

DEVICE_SECONDS = 300.0
"""Seconds that a model may take on a device, unless a person says another limit."""
NEW_TOKENS = 64
"""Tokens that a package of a model that generates is verified with, unless a person says another number."""
SCHEDULER_STEPS = 4
"""Steps of the scheduler that a pipeline is verified with, unless a person says another number."""

DOCUMENT_BYTES = 2 * 2**30
"""Bytes of a JSON document beside a model."""
SETTINGS_BYTES = 64 * 2**20
"""Bytes of a configuration, an index of a checkpoint, or a description of inputs."""
LONGEST_HEADER = 100_000_000
"""Bytes of the longest header that the format of safetensors files allows."""
MOST_PARTS = 1000
"""Graphs of a package."""
PACKAGE_FILES = 100_000
"""Files that the manifest of a package names."""
PROTO_BYTES = 2 * 2**30
"""Bytes of an ONNX file without its external weights: what protobuf can read."""
CALL_DEPTH = 200
"""Nesting depth of calls, and of the modules in the name of a parameter."""
MOST_AXES = 64
"""Axes of a tensor: NumPy and PyTorch have no more."""
LONGEST_ROW = 1_000_000
"""Numbers of a tensor with one axis whose values onnx's shape inference follows, with 150 bytes for each."""
FORMULA_TERMS = 1000
"""Numbers, names and operators of a formula of sizes; a longer one is computed with tensors."""
TESTED_ELEMENTS = 2**29
"""Elements of all tensors that are computed to tell which classes of ``torch.nn`` the modules of a file are."""
COMPARED_ELEMENTS = 2**26
"""Elements of all outputs of a file that are compared with those of its code in PyTorch, and of the tensors of one run
of a module."""
MOST_FIELDS = 5_000_000
"""Nodes, initializers, described values and other fields of a graph."""
LARGEST_OPSET = 2**31 - 1
"""The version of an operator set, which onnx holds in 32 bits."""
INLINED_NODES = 2_000_000
"""Nodes of a file after its functions have been inlined."""
MOST_MODULES = 100_000
"""Modules of a model that a configuration describes."""
LARGEST_LAYER_SETTING = 10_000
"""The largest value of a configuration's entry with `layer` in its name."""
ELEMENTS_PER_BYTE = 4
"""Elements of parameters and buffers for each byte of a checkpoint: the smallest types take half a byte."""
SPARE_ELEMENTS = 100_000_000
"""Elements that a checkpoint may lack: new heads, position tables."""
MOST_ELEMENTS = 2**28
"""Elements of an input that a description, or a file's fixed sizes, ask for."""
RANDOM_ELEMENTS = 2**26
"""Elements of the random inputs of a file: they are drawn in double precision."""
INPUT_BYTES = 2**29
"""The most bytes that the arrays of a file of inputs take, unpacked and converted to the types of the inputs."""
LINE_CHARACTERS = 2**24
"""Characters of a line of a ``.jsonl`` file of inputs."""
TEXT_CHARACTERS = 500_000
"""Characters of a text that is tokenized at once: tokens take several hundred bytes each."""
IMAGE_PIXELS = 2**26
"""Pixels of an image, which take up to 8 bytes each while it is decoded and converted."""
FORMULA_CHARACTERS = 2000
"""Characters of a formula. A longer size is treated as a name; a longer condition is not read."""
SIZE_DIGITS = 40
"""Digits of a number in a formula, and of its result."""
