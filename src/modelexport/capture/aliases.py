"""FX nodes whose tensors share memory: which are written into later, and which are passed on unchanged."""

from __future__ import annotations

import operator

import torch
import torch.fx


def is_written_later(node: torch.fx.Node) -> bool:
    """Whether a later node writes into the memory of a node's tensor, through a view of it or through its base."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in current.users:
            shared = _shared_arguments(user)
            if shared.get(current) and node < user:
                return True
            if current in shared and user not in seen:
                seen.add(user)
                pending.append(user)
        for source in _shared_arguments(current):
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return False


def _shared_arguments(node: torch.fx.Node) -> dict[torch.fx.Node, bool]:
    """The arguments whose memory a node's result shares or that it writes into, and whether it writes."""
    if node.target is operator.getitem:
        return {argument: False for argument in node.args[:1] if isinstance(argument, torch.fx.Node)}
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    found: dict[torch.fx.Node, bool] = {}
    given = {**dict(enumerate(node.args)), **node.kwargs}
    for position, parameter in enumerate(schema.arguments):
        value = given.get(parameter.name, given.get(position))
        if parameter.alias_info is not None and isinstance(value, torch.fx.Node):
            found[value] = bool(parameter.alias_info.is_write)
    return found


def passed_on(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose tensor a node returns unchanged (``to`` the type that it has): exporters remove such nodes."""
    source = node.args[0] if node.args else None
    schema = getattr(node.target, "_schema", None)
    if not isinstance(source, torch.fx.Node) or schema is None or len(schema.returns) != 1:
        return None
    if schema.returns[0].alias_info is None:
        return None
    one, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    # As text: comparing dynamic sizes would make torch.export assume that they are equal.
    facts = [str((t.dtype, t.shape, t.stride(), t.storage_offset())) for t in (one, other)]
    return source if facts[0] == facts[1] else None
