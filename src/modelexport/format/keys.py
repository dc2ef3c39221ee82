"""Names of the keys under which a file keeps what modelexport knows, and the version of the format. Only data."""

from __future__ import annotations

FORMAT_VERSION = "2026-11-22"
"""2026-11-22: properties of initializers are in ``TensorProto.metadata_props``; ``modelexport.carrier`` is now
``modelexport.encoding``; ``NAME.vectors.safetensors`` is ``NAME.reference.safetensors``; nodes have ``layer_ann``.
2026-11-21: first version."""

READ_VERSIONS = frozenset({FORMAT_VERSION, "2026-11-21"})
"""Versions that this version of modelexport reads."""

# metadata_props of nodes
SOURCE_MODULE = "modelexport.source_module"
CALL = "modelexport.call"
EVIDENCE = "modelexport.evidence"
HIERARCHY_TAGS = "modelexport.hierarchy_tags"  # also of initializers
CALLS = "modelexport.calls"
NAMESPACE = "namespace"
LAYER_ANNOTATION = "layer_ann"
"""What ONNX Runtime places nodes by: :attr:`ModuleCall.annotation`."""
REPLACED = "modelexport.replaced"
"""What `replace` put there: the name of a file, an operator, or ``identity``. Of models: address to the same."""

# metadata_props of call nodes in the main graph, where the encoding is `functions`
NAMES = "modelexport.names"
"""A JSON array: the names that the values and nodes inside the call have in the flat graph, in the order of a walk. A
number stands for the name in the body with that number at its end (``mul_3`` and 15: ``mul_15``), ``null`` for the name
in the body without a number."""
SHAPES = "modelexport.shapes"
"""A JSON object: index into the names to the shape of that value, where the calls of its function have several."""

# metadata_props of nodes in function bodies
INITIALIZER = "modelexport.initializer"
"""Marks a ``Constant`` that is an initializer in the flat graph."""

# attributes of nodes, where the encoding is `attributes`, and of call nodes, where it is `functions`
SOURCE_MODULE_ATTRIBUTE = "source_module"
HIERARCHY_TAGS_ATTRIBUTE = "hierarchy_tags"
FUNCTIONS_DOMAIN = "modelexport"

# metadata_props of initializers
PARAMETER = "modelexport.parameter"
TRANSFORM = "modelexport.transform"

UNRECORDED, UNRECORDED_DOMAIN = "Unrecorded", "modelexport"
"""A step that another tool did and of which only the entries are known: quantizing, packing, fusing."""

# metadata_props of models
FORMAT_VERSION_KEY = "modelexport.format_version"
VERSION_KEY = "modelexport.version"
STATE_DICT = "modelexport.state_dict"
"""A JSON object: key to :class:`StateDictEntry`, for every entry of the module, in its order."""
ENCODING = "modelexport.encoding"
"""``attributes`` or ``functions``; left out where it is ``metadata``."""
FORMER_ENCODING = "modelexport.carrier"
"""What the property was called in files of 2026-11-21."""
ADOPTED = "modelexport.adopted"
"""In a file that another exporter wrote: a JSON object, source of the tags to how many nodes have them from it."""
WEIGHTS = "modelexport.weights"
"""A JSON object: the location of each safetensors file that initializers are linked to, to its :class:`WeightsFile`."""
CALL_TREE = "modelexport.call_tree"
"""A JSON array of :class:`CallTreeEntry`: which call ran in which cannot be told from tags and addresses alone."""

DATA = "modelexport.data"
"""A JSON object: the location of each data file that was written with the model, to its :class:`DataFile`."""
DOCUMENTS = "modelexport.documents"
"""A JSON object: the end of the name of each document that was written with the model, to its SHA-256."""

DATA_SUFFIX = ".data"
"""Behind the whole name of a model: the file with its weights."""
DESCRIBING_SUFFIXES = (".hierarchy.json", ".dag.json", ".operations.json")
"""In the place of a model's suffix: the documents that describe it. The model has their digests."""
REFERENCE_SUFFIX, REPORT_SUFFIX = ".reference.safetensors", ".report.md"
DOCUMENT_SUFFIXES = (*DESCRIBING_SUFFIXES, REFERENCE_SUFFIX, REPORT_SUFFIX)
"""All that lies beside a model, but for its weights."""
