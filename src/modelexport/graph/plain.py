"""Models that are read, get owners and names, and are not rewired: ``retag`` needs nothing else.

Their nodes and values have what reading code uses of ``onnx_ir``'s, so that this code takes both; attributes in place
of properties, so that they are made in a fraction of the time; and nothing that would rewire them.

:mod:`modelexport.files.plain_reading` makes them, and :mod:`modelexport.files.plain_writing` writes what was changed
into the serialized model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import onnx
import onnx_ir as ir

from modelexport.core.owners import Owner

if TYPE_CHECKING:
    from onnx_ir import Node as _Node
    from onnx_ir import Value as _Value
else:  # their attributes would take more memory than those below
    _Value = _Node = object

Kind = tuple[ir.DataType | None, ir.TypeProtocol | None, ir.Shape | None]
"""The element type, type and shape of a value."""
NOTHING: Any = MappingProxyType({})
"""The properties of a value that has none and gets none."""
UNKNOWN: Kind = (None, None, None)


class Store(dict[str, Any]):
    """The attributes of a node: a mapping that is its own ``data``, which onnx_ir's mapping has."""

    __slots__ = ()

    @property
    def data(self) -> Store:
        """The same mapping."""
        return self


class PlainValue(_Value):
    """A value of a plain graph."""

    __slots__ = (
        "const_value",
        "doc_string",
        "dtype",
        "leaves",
        "made_by",
        "metadata_props",
        "name",
        "role",
        "shape",
        "type",
        "users",
    )

    if TYPE_CHECKING:  # attributes in place of properties
        name: str
        dtype: ir.DataType | None
        type: ir.TypeProtocol | None
        shape: ir.Shape | None
        const_value: ir.TensorProtocol | None
        metadata_props: dict[str, str]
        made_by: PlainNode | None
        users: list[tuple[ir.Node, int]]
        role: Literal["input", "initializer"] | None
        leaves: bool

    def __init__(
        self, name: str, kind: Kind, producer: PlainNode | None, tensor: ir.TensorProtocol | None = None
    ) -> None:
        self.name = name
        self.dtype, self.type, self.shape = kind
        self.made_by = producer
        self.users = []
        self.role = None
        self.leaves = False
        self.const_value = tensor
        self.metadata_props = NOTHING
        self.doc_string = None

    def producer(self) -> ir.Node | None:
        """The node that produces it."""
        return self.made_by

    def uses(self) -> Collection[Any]:
        """The nodes that use it, each with the position of its input: a pair."""
        return self.users

    def is_graph_input(self) -> bool:
        """Whether it is an input of the graph."""
        return self.role == "input"

    def is_graph_output(self) -> bool:
        """Whether it is an output of the graph."""
        return self.leaves

    def is_initializer(self) -> bool:
        """Whether it is an initializer."""
        return self.role == "initializer"

    @property
    def graph(self) -> ir.Graph | None:
        """The graph of its producer."""
        return self.made_by.graph if self.made_by is not None else None


class PlainNode(_Node):
    """A node of a plain graph."""

    __slots__ = (
        "attributes",
        "doc_string",
        "domain",
        "graph",
        "inputs",
        "metadata_props",
        "name",
        "op_type",
        "operator",
        "outputs",
        "overload",
        "owner",
    )

    if TYPE_CHECKING:
        operator: ir.OperatorIdentifier
        domain: str
        op_type: str
        overload: str
        name: str
        inputs: Sequence[PlainValue | None]  # onnx_ir has tuples
        outputs: Sequence[PlainValue]
        attributes: Store  # type: ignore[assignment]  # has what is used of onnx_ir's own mapping
        metadata_props: dict[str, str]
        graph: ir.Graph | None
        owner: Owner | None

    def __init__(
        self,
        operator: ir.OperatorIdentifier,
        name: str,
        attributes: Store,
        metadata_props: dict[str, str],
        doc_string: str | None,
    ) -> None:
        self.operator = operator
        self.domain, self.op_type, self.overload = operator
        self.name = name
        self.doc_string = doc_string
        self.attributes = attributes
        self.metadata_props = metadata_props
        self.owner = None
        self.graph = None

    def op_identifier(self) -> ir.OperatorIdentifier:
        """Domain, type and overload of its operator."""
        return self.operator


class PlainGraph(ir.GraphView):
    """A graph without nested graphs, whose nodes are sorted."""

    def all_nodes(self) -> Iterator[ir.Node]:
        """Its nodes."""
        return iter(self)

    def subgraphs(self) -> Iterator[ir.Graph]:
        """The graphs nested in it: none."""
        return iter(())


class PlainModel(ir.Model):
    """A model with a plain graph, without functions, whose weights are all in its file."""

    def __init__(
        self, graph: PlainGraph, nodes: Sequence[PlainNode], serialized: onnx.ModelProto, **properties: Any
    ) -> None:
        super().__init__(graph, **properties)  # type: ignore[arg-type]  # GraphView says that a model may have one
        self.plain_nodes = nodes
        """The nodes of its graph."""
        for node in nodes:
            node.graph = self.graph
        self.serialized = serialized
        """What was read. Writing the model changes it."""

    def release(self) -> None:
        """Take its nodes and values apart: they refer to each other, and only a garbage collection would free them."""
        for node in self.plain_nodes:
            node.inputs = node.outputs = ()
            node.graph = None
