"""Attention that an exporter wrote as products and a softmax, put together again as one call of torch.

The pattern is softmax(query * a @ transposed(key) * b + mask) @ value, with any of the factors and the mask left out.
If rows that see no key are set to zero behind it, the mask is the boolean one, because PyTorch does the same with it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.graph.node_owners import owner_of, set_owner

DOMAIN = "torch"
OPERATOR = "scaled_dot_product_attention"


def put_attention_together(model: ir.Model, entries: Container[ir.Value], *, exact: bool) -> None:
    """Replace the pattern by nodes of the operator ``torch.scaled_dot_product_attention``, in place.

    Args:
        entries: The values that are entries of the ``state_dict``, and so no constants.
        exact: Whether a scale stays if it is PyTorch's default but for the rounding of float32.
    """
    found, last_axis = False, -1 if model.opset_imports.get("", 1) >= 13 else 1
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Softmax" or node.domain:
            continue
        if (match := _matched(node, last_axis, entries)) is not None:
            _replace(match, exact=exact)
            found = True
    if found:
        passes.RemoveUnusedNodesPass()(model)


@dataclass
class _Match:
    query: ir.Value
    key: ir.Value
    value: ir.Value
    mask: ir.Value | None
    scale: float
    last: ir.Node
    inside: list[ir.Node] = field(default_factory=list)


def _matched(softmax: ir.Node, default_axis: int, entries: Container[ir.Value]) -> _Match | None:
    scores = softmax.inputs[0]
    product, mask, scale, inside = scores.producer() if scores is not None else None, None, 1.0, [softmax]
    last = _only_user(softmax)
    if scores is None or scores.shape is None or last is None or last.op_type != "MatMul":
        return None
    along = _attribute(softmax, "axis", default_axis) in (-1, len(scores.shape) - 1)
    if not along or last.inputs[0] is not softmax.outputs[0]:
        return None
    if product is not None and product.op_type == "Add":
        inside.append(product)
        sides = [value for value in product.inputs if value is not None]
        behind = [value for value in sides if _is_product(value)]
        if len(behind) != 1:
            return None
        mask = next(value for value in sides if value is not behind[0])
        product = behind[0].producer()
    product, scale, inside = _unscaled(product, scale, inside)
    if product is None or product.op_type != "MatMul" or product.inputs[0] is None or product.inputs[1] is None:
        return None
    inside.append(product)
    query, scale, inside = _unscaled_value(product.inputs[0], scale, inside)
    turned, scale, inside = _unscaled_value(product.inputs[1], scale, inside)
    key, value = _untransposed(turned, inside), last.inputs[1]
    if key is None or value is None or any(_only_user(node) is None or _call(node) != _call(last) for node in inside):
        return None
    match = _Match(query, key, value, mask, scale, last, inside)
    learned = any(value in entries for node in inside for value in node.inputs if node.op_type in ("Mul", "Div"))
    return None if learned else _with_empty_rows(match)


def _with_empty_rows(match: _Match) -> _Match:
    """The match with the node behind it that sets rows without a key to zero."""
    after = _only_user(match.last)
    choice = match.mask.producer() if match.mask is not None else None
    if after is None or choice is None or (after.op_type, choice.op_type) != ("Where", "Where"):
        return match
    seen, empty = choice.inputs[0], after.inputs[0].producer() if after.inputs[0] is not None else None
    behind: Any = seen
    for operator in ("Less", "ReduceSum", "Cast"):  # of how many keys a row sees, from the back
        if empty is None or empty.op_type != operator or not _counts_keys(empty):
            return match
        behind, empty = empty.inputs[0], empty.inputs[0].producer() if empty.inputs[0] is not None else None
    zero, hidden = [_number(value) for value in (after.inputs[1], choice.inputs[1])], _number(choice.inputs[2])
    hides = hidden is not None and hidden <= _HIDDEN
    if behind is seen and hides and zero == [0.0, 0.0] and after.inputs[2] is match.last.outputs[0]:
        match.mask, match.last = seen, after
    return match


_HIDDEN = -1e4
"""From here on down, what is added to a score leaves nothing of its weight."""


def _counts_keys(node: ir.Node) -> bool:
    """Whether a node asks for fewer than one, or adds up along the last axis."""
    second = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type == "Less":
        return _number(second) == 1
    if node.op_type == "Cast":
        return True
    axes, shape = _attribute(node, "axes", None), node.inputs[0].shape if node.inputs[0] is not None else None
    if axes is None and second is not None and second.const_value is not None:
        axes = second.const_value.numpy().reshape(-1).tolist()
    return axes is not None and shape is not None and list(axes) in ([-1], [len(shape) - 1])


def _replace(match: _Match, *, exact: bool) -> None:
    old, size = match.last.outputs[0], match.query.shape[-1] if match.query.shape is not None else None
    usual = isinstance(size, int) and abs(match.scale * size**0.5 - 1) < (1e-12 if exact else 1e-6)
    node = ir.node(OPERATOR, [match.query, match.key, match.value, match.mask], domain=DOMAIN,
                   attributes={} if usual else {"scale": match.scale}, name=match.last.name)  # fmt: skip
    new = node.outputs[0]
    new.name, new.shape, new.type = old.name, old.shape, old.type
    set_owner(node, owner_of(match.last))
    assert isinstance(match.last.graph, ir.Graph)
    match.last.graph.insert_before(match.last, node)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _call(node: ir.Node) -> Any:
    owner = owner_of(node)
    return owner.call if owner is not None else None


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def _only_user(node: ir.Node) -> ir.Node | None:
    uses = list(node.outputs[0].uses())
    return uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None


def _number(value: ir.Value | None) -> float | None:
    tensor = value.const_value if value is not None else None
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def _is_product(value: ir.Value) -> bool:
    node, _, _ = _unscaled(value.producer(), 1.0, [])
    return node is not None and node.op_type == "MatMul"


def _unscaled(node: ir.Node | None, scale: float, inside: list[ir.Node]) -> tuple[ir.Node | None, float, list[ir.Node]]:
    """A node without a factor behind it, and the scale with it."""
    number = _number(node.inputs[1]) if node is not None and node.op_type in ("Mul", "Div") else None
    if node is None or number is None or node.inputs[0] is None:
        return node, scale, inside
    return node.inputs[0].producer(), scale * number if node.op_type == "Mul" else scale / number, [*inside, node]


def _unscaled_value(value: ir.Value, scale: float, inside: list[ir.Node]) -> tuple[ir.Value, float, list[ir.Node]]:
    node = value.producer()
    _, factor, more = _unscaled(node, scale, inside)
    return (
        (value, scale, inside)
        if more is inside or node is None or node.inputs[0] is None
        else (node.inputs[0], factor, more)
    )


def _untransposed(value: ir.Value, inside: list[ir.Node]) -> ir.Value | None:
    """What a key was before its last two axes were exchanged, perhaps with the others joined in between."""
    node, joined = value.producer(), None
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        joined, inside[len(inside) :] = node, [node]
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Transpose" or node.inputs[0] is None or node.outputs[0].shape is None:
        return None
    rank = len(node.outputs[0].shape)
    if list(_attribute(node, "perm", ())) != [*range(rank - 2), rank - 1, rank - 2]:
        return None
    inside.append(node)
    if joined is None:
        return node.inputs[0]
    first = node.inputs[0].producer()
    if first is None or first.op_type != "Reshape" or first.inputs[0] is None:
        return None
    before, after = first.inputs[0].shape, value.shape
    if before is None or after is None or list(before) != [*list(after)[:-2], after[-1], after[-2]]:
        return None
    inside.append(first)
    return first.inputs[0]
