"""The owner that travels with a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.core.text import first_few
from modelexport.errors import FileFormatError
from modelexport.graph.nodes import all_nodes

_OWNER = "modelexport.owner"
"""The key in ``ir.Node.meta`` under which a node's :class:`~modelexport.core.owners.Owner` travels."""


def owner_of(node: ir.Node) -> Owner | None:
    """The owner that travels with a node, if it has one."""
    return node.meta.get(_OWNER)


def place_of(node: ir.Node) -> str:
    """The call and the line of code that a node comes from: ``encoder.dense, net:12``; empty if no call is known."""
    owner = owner_of(node)
    return "" if owner is None else ", ".join(filter(None, [str(owner.call), owner.line]))


def calls_text(nodes: Iterable[ir.Node]) -> str:
    """The first addresses of the calls that nodes belong to: ``layer.0.dense, layer.1.dense``."""
    owners = [owner for node in nodes if (owner := owner_of(node)) is not None]
    return first_few(dict.fromkeys(str(call) for owner in owners for call in owner.calls), 3)


def required_owner(node: ir.Node) -> Owner:
    """The owner that travels with a node of a graph that is about to be written."""
    if (owner := owner_of(node)) is None:
        raise FileFormatError(
            f"the node '{node.name}' ({node.op_type}) has no tags: restore those that another tool dropped with "
            "`modelexport retag`, or export again"
        )
    return owner


def set_owner(node: ir.Node, owner: Owner | None) -> None:
    """Let an owner, or none, travel with a node."""
    if owner is None:
        node.meta.pop(_OWNER, None)
    else:
        node.meta[_OWNER] = owner


def owned_operators(model: ir.Model) -> Iterator[tuple[ModuleCall | None, str]]:
    """The operator of every node, with the call that produces its output if it is known."""
    for node in all_nodes(model):
        owner = owner_of(node)
        yield None if owner is None else owner.call, node.op_type
