"""Bounds of the PyTorch model that no node of a file has, as far as the operations of a run tell.

A clamp that no number reaches gives what it takes, so that a file without it has all values of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.runtime.fingerprints import NEAR, Index
from modelexport.verify.differences import UNITS
from modelexport.verify.proof import Proof


def nodes_beside_lost_bounds(proof: Proof, bounded: Collection[ir.Node]) -> Mapping[ir.Node, frozenset[ModuleCall]]:
    """The nodes that make or take what PyTorch bounds and no node of the file does, to the calls that bound it.

    A value with such numbers may be that before the bound or that behind it: nodes on both sides are among them. The
    file may well bound it elsewhere, or have no need to.

    Args:
        bounded: The nodes that have bounds.
    """
    bounds = [one for one in proof.evidence.computed if one.bounded]
    if not bounds:
        return {}
    values: Index[ir.Value] = Index()
    for node in proof.tagged.model.graph:
        for value in node.outputs:
            if (own := proof.run.prints.get(value.name or "")) is not None:
                values.add(own, value)
    apart = max(NEAR, *(2 * UNITS.get(dtype, 0.0) for dtype in set(proof.run.dtypes.values())))
    found: dict[ir.Node, set[ModuleCall]] = defaultdict(set)
    for one in bounds:
        alike = list(values.near(one.fingerprint, apart))
        makers = [maker for value in alike if (maker := value.producer()) is not None]
        if not any(maker in bounded for maker in makers):
            for node in (*makers, *(user for value in alike for user, _ in value.uses())):
                found[node].add(one.call)
    return {node: frozenset(calls) for node, calls in found.items() if node.name in proof.positions}
