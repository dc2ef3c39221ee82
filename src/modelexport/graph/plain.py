"""Models that are read, get owners and names, and are not rewired: ``retag`` needs nothing else.

Their nodes and values have what reading code uses of ``onnx_ir``'s, so that this code takes both; attributes in place
of properties, so that they are made in a fraction of the time; and nothing that would rewire them.

:mod:`modelexport.files.plain_reading` makes them, and :mod:`modelexport.files.plain_writing` writes what was changed
into the serialized model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import onnx_ir as ir

from modelexport.core.owners import Owner

Kind = tuple[ir.DataType | None, ir.TypeProtocol | None, ir.Shape | None]
"""The element type, type and shape of a value."""
NOTHING: Any = MappingProxyType({})
"""The properties of what has none."""
UNKNOWN: Kind = (None, None, None)

if TYPE_CHECKING:
    from onnx_ir import Node as _Node
    from onnx_ir import Value as _Value
else:  # their attributes would take more memory than those below
    _Node = object

    class _Value(msgspec.Struct, eq=False):
        """The attributes of a value: msgspec makes these objects in a quarter of the time of a Python function."""

        name: str
        kind: Kind
        made_by: Any
        const_value: Any = None
        role: Any = None
        users: Any = ()
        leaves: bool = False
        metadata_props: Any = NOTHING
        doc_string: Any = None


class Store(dict[str, Any]):
    """The attributes of a node: a mapping that is its own ``data``, which onnx_ir's mapping has."""

    __slots__ = ()

    @property
    def data(self) -> Store:
        """The same mapping."""
        return self


NO_ATTRIBUTES = Store()
"""Of the nodes that have none."""


class PlainValue(_Value):
    """A value of a plain graph. Another name of it is not written: nodes are written with the names that were read."""

    if TYPE_CHECKING:  # attributes in place of properties
        name: str
        kind: Kind
        made_by: PlainNode | None
        const_value: ir.TensorProtocol | None
        role: Literal["input", "initializer"] | None
        users: PlainNode | list[PlainNode] | tuple[PlainNode, ...]
        """The node that uses it once, one for each of several uses, or what :meth:`consumers` has made of these."""
        leaves: bool
        """Whether it is an output of the graph."""
        metadata_props: dict[str, str]
        """Values share them: see :func:`add_properties`."""

        def __init__(
            self,
            name: str,
            kind: Kind,
            made_by: PlainNode | None,
            const_value: ir.TensorProtocol | None = None,
            role: Literal["input", "initializer"] | None = None,
        ) -> None: ...

    else:
        dtype = property(lambda value: value.kind[0])
        type = property(lambda value: value.kind[1])
        shape = property(lambda value: value.kind[2])

    def producer(self) -> ir.Node | None:
        """The node that produces it."""
        return self.made_by

    def consumers(self) -> Sequence[ir.Node]:
        """The nodes that use it, each once."""
        users = self.users
        if isinstance(users, list):
            users = self.users = tuple(dict.fromkeys(users))
        return users if isinstance(users, tuple) else (users,)

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
    """A node of a plain graph. Of changes, its name and its properties are written; its attributes are as they were."""

    __slots__ = (
        "attributes",
        "doc_string",
        "graph",
        "inputs",
        "kept_name",
        "metadata_props",
        "name",
        "operator",
        "outputs",
        "owner",
        "serialized",
    )

    if TYPE_CHECKING:
        operator: ir.OperatorIdentifier
        name: str
        inputs: Sequence[PlainValue | None]  # onnx_ir has tuples
        outputs: Sequence[PlainValue]
        attributes: Store  # type: ignore[assignment]  # has what is used of onnx_ir's own mapping
        metadata_props: dict[str, str]
        """Nodes share them: see :func:`add_properties`."""
        graph: ir.Graph | None
        owner: Owner | None
        serialized: bytes
        """What was read, without properties."""
        kept_name: str | None
        """If it has this name it is written as it was read."""

    def __init__(self) -> None:
        self.name = ""
        self.attributes = NO_ATTRIBUTES
        self.metadata_props = NOTHING
        self.owner = self.graph = self.kept_name = None

    if not TYPE_CHECKING:
        domain = property(lambda node: node.operator[0])
        op_type = property(lambda node: node.operator[1])
        overload = property(lambda node: node.operator[2])

    def op_identifier(self) -> ir.OperatorIdentifier:
        """Domain, type and overload of its operator."""
        return self.operator


def is_used_once(value: ir.Value) -> bool:
    """Whether a value of any graph is one input of one node."""
    return type(value.users) is PlainNode if type(value) is PlainValue else len(value.uses()) == 1


def add_properties(item: ir.Node | ir.Value, properties: dict[str, str]) -> None:
    """Add properties to a node or value of any graph."""
    if type(item) is PlainNode or type(item) is PlainValue:
        item.metadata_props = {**item.metadata_props, **properties} if item.metadata_props else properties
    else:
        item.metadata_props.update(properties)


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
        self, graph: PlainGraph, nodes: Sequence[PlainNode], infos: Mapping[bytes, bytes], **properties: Any
    ) -> None:
        super().__init__(graph, **properties)  # type: ignore[arg-type]  # GraphView says that a model may have one
        self.plain_nodes = nodes
        """The nodes of its graph."""
        for node in nodes:
            node.graph = self.graph
        self.infos = infos
        """The names of values to what was read of their types."""

    def release(self) -> None:
        """Take its nodes and values apart: they refer to each other, and only a garbage collection would free them."""
        for node in self.plain_nodes:
            node.inputs = node.outputs = ()
            node.graph = None
