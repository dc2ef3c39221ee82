"""Names of the keys that modelexport writes into a file, most of them as properties. Only data."""

from __future__ import annotations

# properties of nodes
SOURCE_MODULE = "modelexport.source_module"
CALL = "modelexport.call"
EVIDENCE = "modelexport.evidence"
HIERARCHY_TAGS = "modelexport.hierarchy_tags"  # also of initializers
CALLS = "modelexport.calls"
LINE = "modelexport.line"
NAMESPACE = "namespace"
LAYER_ANNOTATION = "layer_ann"
"""The property by which ONNX Runtime assigns nodes to devices: :attr:`modelexport.core.calls.ModuleCall.annotation`."""
REPLACED = "modelexport.replaced"
"""What `replace` put in the place of a call: the name of a file, an operator, or ``identity``. On models: a map from
address to this."""
ADAPTER = "modelexport.adapter"
"""Of nodes: ``lora``, where they add an adapter's low-rank pair. Of initializers that are optional inputs for adapters:
a JSON object, ``entry`` (the ``state_dict`` key), ``part`` (``a``, ``b`` or ``whole``) and ``kind``."""

# attributes of nodes, where the encoding is `attributes`, and of call nodes, where it is `functions`
SOURCE_MODULE_ATTRIBUTE = "source_module"
HIERARCHY_TAGS_ATTRIBUTE = "hierarchy_tags"
FUNCTIONS_DOMAIN = "modelexport"

# properties of initializers
PARAMETER = "modelexport.parameter"
TRANSFORM = "modelexport.transform"

UNRECORDED, UNRECORDED_DOMAIN = "Unrecorded", "modelexport"
"""A step of another tool, of which only the ``state_dict`` entries are known: quantizing, packing, fusing."""

# properties of models
FORMAT_VERSION_KEY = "modelexport.format_version"
VERSION_KEY = "modelexport.version"
STATE_DICT = "modelexport.state_dict"
"""A JSON object: key to :class:`.documents.StateDictEntry`, for every entry of the module, in its order."""
ENCODING = "modelexport.encoding"
"""``attributes`` or ``functions``; absent if it is ``metadata``."""
ADOPTED = "modelexport.adopted"
"""In an adopted file: a JSON object, each source of tags to the number of nodes that were tagged from it."""
VALUE_TYPE = "modelexport.type"
"""Of a value, in memory only: a serialized type with maps, which ``onnx_ir`` cannot hold."""
LOST = "modelexport.lost"
"""In what another tool changed: a JSON array of the used entries that no initializer comes from any more."""
WEIGHTS = "modelexport.weights"
"""A JSON object: the location of each safetensors file that initializers are linked to, to its
:class:`.documents.WeightsFile`."""
OUTPUTS = "modelexport.outputs"
"""A JSON array: for each tensor that the model returns, whether it is an output of the file; absent if all are."""
EXPOSED = "modelexport.exposed"
"""A JSON array of names: the outputs that inner calls return, the last ones; absent if there are none."""
VALID_IF = "modelexport.valid_if"
"""A JSON array of formulas in the names of the axes, ``n < 24``: the file is right where all of them hold. Absent if
there are none."""
CUT_FROM = "modelexport.cut_from"
"""In a file that `extract` wrote: a JSON object, :class:`.cut_record.CutRecord`."""
CALL_TREE = "modelexport.call_tree"
"""A JSON array of :class:`.documents.CallTreeEntry`: tags and addresses alone do not tell which call ran in which."""

DATA = "modelexport.data"
"""A JSON object: the location of each data file written with the model, to its :class:`.documents.DataFile`."""
DOCUMENTS = "modelexport.documents"
"""A JSON object: the suffix of each document that was written with the model, to its SHA-256."""

DATA_SUFFIX = ".data"
"""Appended to the whole name of a model: the file with its weights."""
SIDECAR_SUFFIX, DAG_SUFFIX, OPERATIONS_SUFFIX = ".hierarchy.json", ".dag.json", ".operations.json"
DESCRIBING_SUFFIXES = (SIDECAR_SUFFIX, DAG_SUFFIX, OPERATIONS_SUFFIX)
"""Replace the suffix of a model's name: the documents that describe it. The model holds their digests."""
REFERENCE_SUFFIX, REPORT_SUFFIX, RECIPE_SUFFIX = ".reference.safetensors", ".report.md", ".recipe.yaml"
DOCUMENT_SUFFIXES = (*DESCRIBING_SUFFIXES, REFERENCE_SUFFIX, REPORT_SUFFIX)
"""All files beside a model except its weights."""
