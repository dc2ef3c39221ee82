"""The nodes of modules in the form that other quantizers take, for those who quantize elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.graph.node_owners import owner_of
from modelexport.tagged.file import TaggedFile

Nodes = Sequence[ir.Node]


def excluded(tagged: TaggedFile, selectors: Sequence[str], form: str) -> str:
    """The nodes of the calls that selectors pick, as text for a tool (:data:`FORMS`), with the final line break.

    A node of several calls is among them if one of its calls is picked.
    """
    calls = tagged.select(*selectors).inside
    nodes = [
        node
        for node in tagged.nodes
        if (owner := owner_of(node)) is not None and any(call in calls for call in owner.calls)
    ]
    if not nodes:
        raise UsageError(f"'{' '.join(selectors)}' has no nodes in {tagged.path}: nothing has to be excluded")
    return FORMS[form](nodes) + "\n"


def _names(nodes: Nodes) -> list[str]:
    return [node.name or "" for node in nodes]


def _names_for_ort(nodes: Nodes) -> list[str]:
    """The names to exclude: for a ``Gemm`` also that of the ``MatMul`` that ONNX Runtime's quantizer makes of it."""
    names = ([node.name, f"{node.name}_MatMul"] if node.op_type == "Gemm" else [node.name] for node in nodes)
    return [name or "" for of_node in names for name in of_node]


FORMS: Mapping[str, Callable[[Nodes], str]] = {
    "ort": lambda nodes: json.dumps(_names_for_ort(nodes), indent=1),
    "modelopt": lambda nodes: " ".join(f"'^{re.escape(name)}$'" for name in _names(nodes)),
    "olive": lambda nodes: json.dumps({"nodes_to_exclude": _names_for_ort(nodes)}, indent=1),
    "trt": lambda nodes: (
        "--precisionConstraints=obey --layerPrecisions=" + ",".join(f"'{name}':fp32" for name in _names(nodes))
    ),
    "nncf": lambda nodes: json.dumps({"names": _names(nodes)}, indent=1),
}
"""Tool to what its option takes."""
