"""Read the module stack that another exporter recorded for a node, from FX nodes and from metadata.

The records of a node of ``encoder.layer.0`` in a model of class ``Model``, the most reliable first::

    node.meta["node"].meta["nn_module_stack"]   {"L__self__": ("", "pkg.Model"),
                                                 "L__self__encoder.layer.0@1": ("encoder.layer.0", "pkg.Layer")}
    pkg.torch.onnx.name_scopes                  ['', 'encoder.layer.0', 'add']
    pkg.torch.onnx.class_hierarchy              ['pkg.Model', 'pkg.Layer', 'aten.add.Tensor']
    namespace, as torch.onnx writes it          : pkg.Model/encoder.layer.0: pkg.Layer/add: aten.add.Tensor
    namespace, as other tools write it          Model/Layer.0

Only the first, which exists only in the exporting process, has the number of the call (``@1``). The source of these
formats is ``torch/onnx/_internal/exporter/_core.py``, ``_set_node_metadata``, as of torch 2.13.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from modelexport.core.owners import Evidence
from modelexport.format.keys import NAMESPACE
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import properties_of, text_of

FX_NODE = "node"
"""The key in ``ir.Node.meta`` under which ``torch.onnx`` keeps the FX node that an ONNX node was made for."""

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_CALL_NUMBER = re.compile(r"@(\d+)$")


class CallSource(enum.StrEnum):
    """The source of a node's call, most reliable first."""

    TAGS = "tags"
    """The file had tags of modelexport."""
    FX_NODE = "fx_node"
    """The FX node that the node was made for, in memory."""
    FX_NAME = "fx_name"
    """The FX node with the name that the node or its value still has, in memory."""
    TORCH_METADATA = "torch_metadata"
    """``pkg.torch.onnx.name_scopes`` and ``class_hierarchy``."""
    NAMESPACE = "namespace"
    """The key ``namespace``."""
    FUNCTIONS = "functions"
    """The local function that the node was in."""
    NODE_NAMES = "node_names"
    """The scopes in the name of the node or of its value."""
    PARAMETER_NAMES = "parameter_names"
    """The names of the parameters that the node uses."""
    NEIGHBOURS = "neighbours"
    """The nearest call that all neighbors of the node are in."""


@dataclass(frozen=True, slots=True)
class StackEntry:
    """One module on the stack of a node."""

    path: str
    """Its path, as far as it is known; the root's is the empty string."""
    class_module: str = ""
    """The Python module that defines its class; empty if that is not known."""
    class_name: str = ""
    """Empty if it is not known."""
    index: int | None = None
    """Which call of the module it is; ``None`` if that was not recorded."""
    identity: Hashable = None
    """Distinguishes this call from others of the same module if ``index`` is ``None``."""

    def __post_init__(self) -> None:
        """No part of a path is empty: names of nodes may have several dots in a row."""
        object.__setattr__(self, "path", ".".join(filter(None, self.path.split("."))))


Stack = tuple[StackEntry, ...]
"""The calls that a node ran in, the root first."""


@dataclass(frozen=True, slots=True)
class Found:
    """The module stack of one node, and how it is known."""

    stack: Stack
    evidence: Evidence
    source: CallSource


def read_fx_nodes(model: ir.Model) -> dict[ir.Node, Found]:
    """The stacks of nodes whose FX nodes are in memory; of nodes made by a rewrite, by the name of the FX node."""
    found_stacks: dict[ir.Node, Found] = {}
    for graph in (*model.graphs(), *model.functions.values()):
        by_name: Mapping[str, Any] | None = None
        for node in graph:
            if by_name is None and (fx_node := node.meta.get(FX_NODE)) is not None:
                by_name = {other.name: other for other in fx_node.graph.nodes}
        stacks: dict[Any, Stack] = {}
        for node in graph:
            fx_node, source, evidence = node.meta.get(FX_NODE), CallSource.FX_NODE, Evidence.EXACT
            if fx_node is None and by_name:
                scopes = _literal_list(text_of(node, NAME_SCOPES))
                names = [scopes[-1] if scopes else "", *(value.name or "" for value in node.outputs)]
                fx_node = next((by_name[name] for name in names if name in by_name), None)
                source, evidence = CallSource.FX_NAME, Evidence.DERIVED
            if fx_node is not None and fx_node not in stacks:
                stacks[fx_node] = _fx_stack(fx_node.meta.get("nn_module_stack") or {})
            if fx_node is not None and stacks[fx_node]:
                found_stacks[node] = Found(stacks[fx_node], evidence, source)
    return found_stacks


def _fx_stack(recorded: Mapping[str, tuple[str, Any]]) -> Stack:
    scopes = []
    for key, (path, module_class) in recorded.items():
        # A key of a ModuleDict may look like the number of a call.
        number = None if "@" in path and key.endswith(path) else _CALL_NUMBER.search(key)
        name = module_class if isinstance(module_class, str) else f"{module_class.__module__}.{module_class.__name__}"
        scopes.append(_scope(path, name, index=int(number[1]) if number else 0))
    return tuple(scopes)


def read_metadata(model: ir.Model) -> dict[ir.Node, Found]:
    """The stacks that ``torch.onnx`` and other tools wrote into the metadata of nodes."""
    stacks: dict[ir.Node, Found] = {}
    plain: dict[ir.Node, list[str]] = {}
    for node in all_nodes(model):
        properties = properties_of(node)
        if stack := _torch_stack(properties):
            stacks[node] = Found(stack, Evidence.DERIVED, CallSource.TORCH_METADATA)
        elif namespace := properties.get(NAMESPACE):
            parts = [part.partition(": ") for part in namespace.split("/")]
            if all(separator for _, separator, _ in parts):  # as torch.onnx writes it; the last is the operator
                if stack := _with_identities(_scope(path, name) for path, _, name in parts[:-1]):
                    stacks[node] = Found(stack, Evidence.DERIVED, CallSource.NAMESPACE)
            elif NAME_SCOPES not in properties:
                plain[node] = namespace.split("/")
    roots = {segments[0] for segments in plain.values()}
    for node, segments in plain.items():
        below = segments[1:] if len(roots) == 1 else segments
        root = StackEntry("", class_name=segments[0] if len(roots) == 1 else "")
        stacks[node] = Found(_segment_stack(root, below), Evidence.DERIVED, CallSource.NAMESPACE)
    return stacks


def _torch_stack(properties: Mapping[str, str]) -> Stack:
    if NAME_SCOPES not in properties:
        return ()
    paths, classes = (_literal_list(properties.get(key)) for key in (NAME_SCOPES, _CLASSES))
    if len(classes) != len(paths):
        classes = [""] * len(paths)
    return _with_identities(_scope(path, name) for path, name in zip(paths[:-1], classes[:-1], strict=True))


def _segment_stack(root: StackEntry, segments: Iterable[str]) -> Stack:
    """The stack for segments, ``Class.suffix@n`` or any name of a level, which also become the path."""
    scopes, path = [root], ""
    for segment in segments:
        plain = _CALL_NUMBER.sub("", segment)
        path = f"{path}.{plain}" if path else plain
        scopes.append(StackEntry(path, class_name=plain.partition(".")[0], identity=(scopes[-1].identity, segment)))
    return tuple(scopes)


def _with_identities(scopes: Iterable[StackEntry]) -> Stack:
    """Distinguish calls of one module by the calls that they ran in, which is all that paths can tell."""
    stack: list[StackEntry] = []
    for scope in scopes:
        above = tuple(other.path for other in stack)
        stack.append(StackEntry(scope.path, scope.class_module, scope.class_name, identity=above))
    return tuple(stack)


def _scope(path: str, qualified_class: str, index: int | None = None) -> StackEntry:
    module, _, name = qualified_class.rpartition(".")
    return StackEntry(path, module, name, index)


def _literal_list(text: str | None) -> list[str]:
    try:
        value = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError):
        return []
    return [str(part) for part in value] if isinstance(value, list) else []
