"""FX nodes whose tensors share memory: which are written into later, and which are passed on unchanged."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from modelexport.pytorch.private_torch import schema_of


def is_written_later(node: torch.fx.Node) -> bool:
    """Whether a later node writes into the memory of a node's tensor, through a view of it or through its base."""
    return any(node < writer for writer in _writers(node))


def _writers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes that write into the memory of a node's tensor."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in current.users:
            shared = _shared_arguments(user)
            if shared.get(current):
                yield user
            if current in shared and user not in seen:
                seen.add(user)
                pending.append(user)
        for source in _shared_arguments(current):
            if source not in seen:
                seen.add(source)
                pending.append(source)


def _shared_arguments(node: torch.fx.Node) -> dict[torch.fx.Node, bool]:
    """The arguments whose memory a node's result shares or that it writes into, and whether it writes."""
    if node.target is operator.getitem:
        return {argument: False for argument in node.args[:1] if isinstance(argument, torch.fx.Node)}
    schema = schema_of(node.target)
    if schema is None:
        return {}
    shared: dict[torch.fx.Node, bool] = {}
    arguments: dict[Any, Any] = {**dict(enumerate(node.args)), **dict(node.kwargs)}
    for position, parameter in enumerate(schema.arguments):
        value = arguments.get(parameter.name, arguments.get(position))
        if parameter.alias_info is not None and isinstance(value, torch.fx.Node):
            shared[value] = bool(parameter.alias_info.is_write)
    return shared


_DROPOUTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
)


def passed_on(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose tensor a node returns unchanged: exporters remove such nodes.

    Conversions to the type that a tensor has, and from torch 2.14 on dropout in evaluation mode.
    """
    source = node.args[0] if node.args else None
    schema = schema_of(node.target)
    if not isinstance(source, torch.fx.Node) or schema is None or len(schema.returns) != 1:
        return None
    idle = node.target in _DROPOUTS and node.args[2:] == (False,)
    if schema.returns[0].alias_info is None and not idle:
        return None
    result, argument = node.meta.get("val"), source.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(argument, torch.Tensor):
        return None
    # As text: comparing dynamic sizes would make torch.export assume that they are equal.
    facts = [str((t.dtype, t.shape, t.stride(), t.storage_offset())) for t in (result, argument)]
    return source if facts[0] == facts[1] else None


def views_made_again(before: torch.fx.Graph, after: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    """The nodes of a decomposed graph that make a view of a written tensor anew, with the captured nodes of that view.

    Torch does so where the view is used next, in another call perhaps, and gives the nodes the annotations of the user.
    """
    captured = {node.name: node for node in before.nodes}
    if not any(any(_shared_arguments(node).values()) for node in before.nodes):  # nothing is written
        return
    by_origin: dict[str, list[torch.fx.Node]] = {}
    for node in after.nodes:
        if (origin := _origin(node)) in captured:
            by_origin.setdefault(origin, []).append(node)
    for name, nodes in by_origin.items():
        for argument in captured[name].all_input_nodes:
            if _is_view(argument) and any(_writers(argument)):
                yield from _made_for(_views(argument), nodes)


def _made_for(
    views: Sequence[torch.fx.Node], nodes: Sequence[torch.fx.Node]
) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    """The nodes of one user that make the last of some views, from as far back as possible."""
    for first in range(len(views)):
        wanted = views[first:]
        for start in range(len(nodes) - len(wanted) + 1):
            candidates = nodes[start : start + len(wanted)]
            source = candidates[0].args[0] if candidates[0].args else None
            anew = isinstance(source, torch.fx.Node) and _origin(source) not in {view.name for view in wanted}
            linked = all(other.args[:1] == (node,) for node, other in itertools.pairwise(candidates))
            if anew and linked and all(map(_alike, candidates, wanted)):
                yield from zip(candidates, wanted, strict=True)
                return


def _views(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that make a view, the first one first, without those that change nothing."""
    views: list[torch.fx.Node] = []
    while _is_view(node):
        if passed_on(node) is None:
            views.append(node)
        node = node.all_input_nodes[0]
    return views[::-1]


def _is_view(node: torch.fx.Node) -> bool:
    return list(_shared_arguments(node).values()) == [False] and node.target is not operator.getitem


def _alike(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    values = node.meta.get("val"), other.meta.get("val")
    shapes = [str(value.shape) for value in values if isinstance(value, torch.Tensor)]
    return _is_view(node) and len(shapes) == 2 and shapes[0] == shapes[1]


def _origin(node: torch.fx.Node) -> str:
    """The name of the node that a node was decomposed from."""
    sources = node.meta.get("from_node")
    return str(sources[-1].name) if sources else ""
