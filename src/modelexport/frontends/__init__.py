"""Front ends: a module and its inputs become an unoptimised ONNX graph in which every node's owner is exact."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from modelexport.core import CallTree, Owner

OWNER = "modelexport.owner"
"""The key in ``ir.Node.meta`` under which a node's :class:`~modelexport.core.Owner` travels until it is written."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What every front end returns."""

    model: ir.Model
    """Unoptimised. The nodes that the exporter recorded a call for have their owner in ``node.meta[OWNER]``."""
    calls: CallTree
    """Every call that was captured, those inside the branches of ``torch.cond`` included."""


def owner_of(node: ir.Node) -> Owner | None:
    """The owner that travels with a node, if it has one."""
    owner = node.meta.get(OWNER)
    assert owner is None or isinstance(owner, Owner)
    return owner
