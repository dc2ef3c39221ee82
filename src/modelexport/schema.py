"""Names of the keys, the version of the format, and the types of the JSON documents. Only data; no I/O.

Goldens for every published format version are under ``tests/golden/``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import onnx_ir as ir

FORMAT_VERSION = "2026-11-21"
"""2026-11-21: first version."""

# metadata_props of nodes
SOURCE_MODULE = "modelexport.source_module"
CALL = "modelexport.call"
EVIDENCE = "modelexport.evidence"
HIERARCHY_TAGS = "modelexport.hierarchy_tags"  # also of initializers
CALLS = "modelexport.calls"
NAMESPACE = "namespace"

# metadata_props of initializers
PARAMETER = "modelexport.parameter"
TRANSFORM = "modelexport.transform"

# metadata_props of models
FORMAT_VERSION_KEY = "modelexport.format_version"
VERSION_KEY = "modelexport.version"
CALL_TREE = "modelexport.call_tree"
"""A JSON array of :class:`CallTreeEntry`: which call ran in which cannot be told from tags and addresses alone."""


def dtype_name(dtype: ir.DataType) -> str:
    """PyTorch's and NumPy's word for an element type, where they have one: ``FLOAT`` is ``float32``."""
    return _DTYPE_NAMES.get(dtype, dtype.name.lower())


_DTYPE_NAMES = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


class Value(msgspec.Struct, frozen=True):
    """A graph input or output, or a tensor that enters or leaves a call in PyTorch."""

    name: str
    dtype: str
    """``float32``, ``int64``, ...: PyTorch's and NumPy's word."""
    shape: list[int | str | None]
    """A string is a dynamic dimension's name, ``null`` a dimension that is not known."""


class ModuleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One module of the PyTorch model, executed or not."""

    path: str
    tag: str
    class_name: str
    qualified_class: str
    depth: int
    leaf: bool
    aliases: list[str]
    parameters: int
    """Elements in its own and its descendants' parameters, each tensor counted once."""
    trainable: int
    shapes: dict[str, list[int]]
    """Its own parameters and buffers: name to shape."""
    level: bool
    """Whether it gets a segment in ``source_module`` tags."""
    calls: int
    reason: str
    """Why it has no calls, or why its calls have no nodes; empty when it has both."""


class Boundary(msgspec.Struct, frozen=True):
    """The names of the values in the file that enter and leave the nodes of a call and of the calls inside it."""

    inputs: list[str]
    outputs: list[str]


class CallEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a module's ``forward``."""

    address: str
    tag: str
    parent: str | None
    """The address of the call it ran in; ``null`` for the root's."""
    enter: int | None
    """The steps at which it began and ended; ``null`` for a call inside a branch, which is captured but not run."""
    exit: int | None
    inputs: list[Value]
    """What the PyTorch module got and returned in the traced run."""
    outputs: list[Value]
    boundary: Boundary
    nodes: int
    """How many nodes it produced itself, outside the calls inside it."""


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node of the file. Nodes of nested graphs are listed after the node that holds them."""

    name: str
    op_type: str
    call: str
    source_module: str
    evidence: str
    domain: str = ""
    calls: list[str] = []
    """Every owner, the one that produces the output first; only where there are several."""
    hierarchy_tags: list[str] = []
    """Their tags, in the same order."""


class InitializerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One initializer of the file."""

    name: str
    dtype: str
    shape: list[int]
    parameter: list[str] = []
    """The ``state_dict`` entries that it is, or is computed from."""
    transform: list[TransformStep] = []
    """How it is computed from them; empty when it is that entry as it stands."""
    hierarchy_tags: list[str] = []
    """The tags of every call that uses it."""


class TransformStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation in the computation of an initializer from ``state_dict`` entries."""

    op_type: str
    inputs: list[str]
    """``state_dict`` keys, or outputs of earlier steps: ``%0`` is the first step's, ``%0:1`` its second output."""
    attributes: dict[str, Any] = {}
    """The operator's attributes; a tensor is an object of its ``dtype`` and its ``value`` as nested lists."""


class CallTreeEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call, in the order in which they began."""

    call: str
    tag: str
    parent: str | None = None


class Coverage(msgspec.Struct, frozen=True):
    """How many nodes have an owner by which evidence. Never added up."""

    exact: int = 0
    derived: int = 0
    inferred: int = 0
    untagged: int = 0


class ModelEntry(msgspec.Struct, frozen=True):
    name: str
    class_name: str
    parameters: int
    opset: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the file was exported with."""

    frontend: str
    granularity: str
    include: list[str]
    exclude: list[str]
    dynamic: bool
    optimize: bool


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """``NAME.hierarchy.json``, the sidecar."""

    format_version: str
    modelexport_version: str
    model: ModelEntry
    settings: Settings
    environment: dict[str, str]
    """Package to version."""
    inputs: list[Value]
    outputs: list[Value]
    coverage: Coverage
    modules: list[ModuleEntry]
    calls: list[CallEntry]
    nodes: list[NodeEntry]
    initializers: list[InitializerEntry]
