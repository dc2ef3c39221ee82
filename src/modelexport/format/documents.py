"""The types of the JSON documents. Only data; no I/O.

Goldens for every published format version are under ``tests/golden/``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from modelexport.core.owners import Evidence


class Value(msgspec.Struct, frozen=True):
    """A graph input or output."""

    name: str
    dtype: str
    """``float32``, ``int64``, ...: PyTorch's and NumPy's name."""
    shape: list[int | str | None]
    """A string is a dynamic dimension's name; ``null`` is an unknown dimension."""

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


class CallTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor that a PyTorch module gets or returns in a call."""

    name: str
    """The argument of ``forward`` (``hidden_states``, ``past.0``), the field of the result, or ``output``."""
    dtype: str
    shape: list[int | str]
    value: str | None = None
    """The name of its value in the file; absent when the file does not compute it or the value is not known."""


class ModuleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One module of the PyTorch model, executed or not."""

    path: str
    tag: str
    class_name: str
    qualified_class: str
    line: int = 0
    """The line of the class in its Python module; 0 if it is not known."""
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
    """The address of the call that it ran in; ``null`` for the root."""
    enter: int | None
    """The steps at which it began and ended; ``null`` for a call inside a branch, which is captured but not run."""
    exit: int | None
    inputs: list[CallTensor]
    """The tensors that the PyTorch module got and returned in the traced run."""
    outputs: list[CallTensor]
    boundary: Boundary
    nodes: int
    """How many nodes it owns itself, without those of the calls inside it."""


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node of the file. Nodes of nested graphs are listed after their enclosing node."""

    name: str
    op_type: str
    call: str
    source_module: str
    evidence: str
    domain: str = ""
    calls: list[str] = []
    """Every owner, the one that produces the output first; absent if there is only one."""
    hierarchy_tags: list[str] = []
    """Their tags, in the same order."""
    line: str = ""
    """The line of the model's code that made it, ``net:12``: a module of Python and a number; absent if not known."""


class InitializerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One initializer of the file."""

    name: str
    dtype: str
    shape: list[int]
    parameter: list[str] = []
    """The ``state_dict`` entries that it holds or is computed from."""
    transform: list[TransformStep] = []
    """How it is computed from them; empty when it is the entry itself, unchanged."""
    hierarchy_tags: list[str] = []
    """The tags of every call that uses it."""


class TransformStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation in the computation of an initializer from ``state_dict`` entries."""

    op_type: str
    inputs: list[str] = []
    """``state_dict`` keys, or outputs of earlier steps: ``%0`` is the first step's, ``%0:1`` its second output; an
    empty string where an optional input is left out."""
    attributes: dict[str, Any] = {}
    """The operator's attributes; a tensor is an object with its ``dtype`` and its ``value`` as nested lists, in which
    ``inf``, ``-inf`` and ``nan`` are strings. The only attribute of a ``Constant`` is ``value``, a tensor."""
    version: int = 0
    """The opset version that last changed the operator; absent for a ``Constant``."""
    domain: str = ""


class StateDictEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in the ``state_dict`` of the exported module: ``["float32", [384, 384], true, false]``."""

    dtype: str
    """``float32``, ``int64``, ...: PyTorch's name."""
    shape: list[int]
    used: bool
    """Whether the graph has it: an output depends on its numbers, or an initializer has its key, or both."""
    buffer: bool = False
    """Whether it is a buffer, not a parameter; false also where that is not known, as in files of other exporters."""


class Dag(msgspec.Struct, frozen=True):
    """One entry of ``NAME.dag.json``: the operations of a call and of the calls inside it."""

    nodes: list[str]
    """Names of nodes, in topological order."""
    edges: list[tuple[str, str]]
    """Pairs of producer and consumer, both in ``nodes``; each pair once."""


class Operation(msgspec.Struct, frozen=True):
    """One entry of ``NAME.operations.json``: a node of the file or an initializer."""

    op_type: str
    """``Initializer`` for an initializer."""
    inputs: list[str]
    """Names of values; the empty string is an omitted optional input."""
    outputs: list[str]
    tags: list[str]
    """Source tags: a node's are those of its owners, the one that produces the output first; an initializer's are
    those of its users."""


class WeightsFile(msgspec.Struct, frozen=True):
    """A weights file, usually a safetensors file, as it was when initializers were linked to it."""

    size: int
    """Bytes."""
    header: str
    """SHA-256, in hexadecimal, of its header with the header's length before it. Empty for other formats."""
    sample: str = ""
    """SHA-256, in hexadecimal, of 64 bytes at each of 256 places, the first at its begin, the last at its end, evenly
    spaced and rounded down."""


class DataFile(msgspec.Struct, frozen=True):
    """A data file that was written with a model."""

    size: int
    """Its size in bytes, the last 32 included."""
    sha256: str
    """SHA-256, in hexadecimal, of all bytes except the last 32, which are the same digest."""


class CallTreeEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One call, in the order in which they began."""

    call: str
    tag: str
    parent: str | None = None
    class_name: str
    level: bool
    """Whether the module gets a segment in source tags: the tag of a level extends that of the level above it, and the
    tag of another call extends its caller's."""


class Coverage(msgspec.Struct, frozen=True):
    """How many nodes have an owner by each kind of evidence, and how many have none."""

    exact: int = 0
    derived: int = 0
    inferred: int = 0
    untagged: int = 0

    @classmethod
    def of(cls, evidence: Iterable[Evidence | None]) -> Coverage:
        """Count nodes by their evidence; ``None`` is a node without an owner."""
        counts = Counter(evidence)
        return cls(*(counts[kind] for kind in (*Evidence, None)))

    @property
    def tagged(self) -> int:
        """How many nodes have an owner."""
        return sum(getattr(self, kind) for kind in Evidence)


class ModelEntry(msgspec.Struct, frozen=True):
    name: str
    class_name: str
    parameters: int
    opset: int


class ValidIf(msgspec.Struct, frozen=True, omit_defaults=True):
    """A condition of the sizes of the inputs, and the decision of the model's code that it comes from."""

    formula: str
    """``n < 24``, in the names of the axes."""
    where: str = ""
    """The line of the model that decides: ``net.py:12``; absent if it is not known."""
    source: str = ""
    """The text of that line."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of the export."""

    frontend: str
    granularity: str
    include: list[str]
    exclude: list[str]
    dynamic: bool
    optimize: bool
    dynamo_failure: str = ""
    """Why the front end `dynamo`, which ``auto`` tries first, failed; absent if it did not."""
    fuse: str = ""
    """What its nodes were fused for (``ort-cpu``); absent if they were not."""
    constants: dict[str, str] = {}
    """Arguments of ``forward`` that the file does not take, to the values that it keeps; absent if there are none."""
    presumed: list[str] = []
    """Lines of the model, ``net.py:12``, that ask whether anything is selected: the file does what follows if so.
    Absent if there are none."""
    valid_if: list[ValidIf] = []
    """The conditions of sizes under which the file is right; absent if there are none."""
    quantized_as: str = ""
    """``qdq`` if layers of a quantized checkpoint are ``DequantizeLinear`` and ``MatMul``; otherwise absent."""
    accuracy_level: int = 0
    """The attribute of ``MatMulNBits`` of these layers; absent if it is 0: float32."""


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
