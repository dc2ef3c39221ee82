"""ONNX Runtime's own operators in the place of what transformers' fusions recognise, and where they are.

Parameters have no tensors while the fusions run, so nothing is computed from weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import msgspec
import onnx
import onnx_ir as ir

from modelexport.capture.transformers_exporter import apply_fusions
from modelexport.core.calls import CallTree, ModuleCall, Port
from modelexport.core.module_tree import ModuleTree
from modelexport.exporting.fused_decoders import tidy_fused
from modelexport.exporting.options import FuseFor
from modelexport.graph.missing_types import fill_types
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import CONTRIBUTED, GROUP_QUERY_ATTENTION, all_nodes, is_cached_attention
from modelexport.graph.size_symbols import replace_symbol
from modelexport.graph.snapshot import SourceGraph, take_snapshot
from modelexport.lineage.owners_after_passes import derive_owners

_COS, _POSITIONS = 7, 9
"""Inputs of GroupQueryAttention: the tables of its rotation (the second is behind the first), and positions in them."""
_HEAD = 8
_CACHE = 4
"""Axes of keys and values: rows, heads, tokens, values of a head."""
_OTHER_ATTENTIONS = ("MultiHeadAttention", "Attention")


class FusedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """A fused operator in the modules of one class."""

    op_type: str
    module_class: str
    nodes: int
    calls: int
    """Calls of modules of this class that own such a node."""
    of: int
    """Calls of modules of this class."""
    without: list[str]
    """The addresses of the others."""


class Fusion(msgspec.Struct, frozen=True, kw_only=True):
    """What fusing a graph for ONNX Runtime gave."""

    target: FuseFor
    before: int
    """Nodes before."""
    after: int
    operators: list[FusedOperator]
    unfused: dict[str, str]
    """Address of a call whose attention is not one operator, to the reason where it is known."""
    lost: list[str]
    """Addresses of calls of which no value that they return is in the graph any more."""


def fuse_graph(model: ir.Model, target: FuseFor, *, row: str | None = None) -> Mapping[str, ir.Value]:
    """Fuse an optimised graph in place; every node has the owners of what it replaces.

    Args:
        model: Its nodes have owners and its parameters no tensors.
        row: The symbol of the batch in a graph that takes several tokens for one row only, if they follow others.

    Returns:
        The name of each value of the graph to the value that it is now, where there is one.

    Raises:
        UsageError: The fusions do not take the graph.
    """
    before = take_snapshot(model)
    if row is not None:
        # The fusion asks for a batch of one. It reads this symbol as a number; what computes with sizes does not.
        replace_symbol(model, row, "1")
    apply_fusions(model, target.removeprefix("ort-"))
    if row is not None:
        replace_symbol(model, "1", row)
    rotated = [keys for node in list(all_nodes(model)) if (keys := rotate_before_attention(node, before))]
    packed = tidy_fused(model)
    model.opset_imports.update({node.domain: 1 for node in all_nodes(model) if node.domain == CONTRIBUTED})
    fill_types(model)
    model.graph.sort()
    values = dict(derive_owners(before, model))
    for group in packed:
        for node in group[:-1]:
            set_owner(node, owner_of(group[-1]))
    for value in rotated:
        values.pop(value.name or "", None)
        value.name = None
    return values


def rotate_before_attention(node: ir.Node, before: SourceGraph) -> ir.Value | None:
    """Rotate queries and keys before an attention that would not read the positions of a first prompt.

    Without a past, ONNX Runtime's GroupQueryAttention takes the first position for all rows and counts on from it:
    wrong for a batch whose rows are padded differently.

    Returns:
        The rotated keys if the graph had them in another layout: under that value's name, until owners are known.
    """
    if not is_cached_attention(node) or not node.attributes.get_int("do_rotary", 0):
        return None
    query, key = node.inputs[:2]
    positions = node.inputs[_POSITIONS] if len(node.inputs) > _POSITIONS else None
    if positions is None or query is None or key is None or (query.shape is not None and query.shape[0] == 1):
        return None
    cos, sin = node.inputs[_COS : _COS + 2]
    for index, value, heads in ((0, query, "num_heads"), (1, key, "kv_num_heads")):
        rotation = ir.node(
            "RotaryEmbedding",
            [value, positions, cos, sin],
            attributes={
                "interleaved": node.attributes.get_int("rotary_interleaved", 0),
                "num_heads": node.attributes.get_int(heads),
            },
            domain=CONTRIBUTED,
        )
        rotated = rotation.outputs[0]
        rotated.shape, rotated.type = value.shape, value.type
        assert node.graph is not None
        node.graph.insert_before(node, rotation)
        node.replace_input_with(index, rotated)
    for index in (_COS, _COS + 1, _POSITIONS):
        node.replace_input_with(index, None)
    for name in ("do_rotary", "rotary_interleaved"):
        node.attributes.pop(name, None)
    # The value that the graph appended to the cache that the attention updates now.
    update = before.producer.get(node.outputs[1].name or "")
    rotated.name = None if update is None or len(before.nodes[update].inputs) < 2 else before.nodes[update].inputs[1]
    return rotated if rotated.name else None


def describe_fusion(
    model: ir.Model,
    target: FuseFor,
    before: int,
    tree: ModuleTree,
    calls: CallTree,
    boundaries: Mapping[Port, str],
    present: tuple[Collection[str], Collection[str]],
) -> Fusion:
    """What a fused graph, whose nodes have their owners, has in which modules.

    Args:
        before: Nodes of the graph before.
        boundaries: Values that calls get and return, by the names that they were captured with.
        present: Those names that the graph had before, and has now.
    """
    classes = {traced.call: tree[traced.call.path].class_name for traced in calls}
    fused: dict[tuple[str, str], list[set[ModuleCall]]] = defaultdict(list)
    for node in all_nodes(model):
        owner = owner_of(node)
        if owner is not None and _is_fused(node):
            name = classes[owner.call]
            # One node may compute several modules of a class: the projections of an attention.
            fused[node.op_type, name].append({call for call in owner.calls if classes[call] == name})
    operators = []
    for (op_type, name), owners in sorted(fused.items()):
        all_calls = [call for call, class_name in classes.items() if class_name == name]
        owning = set().union(*owners)
        without = [call.address for call in all_calls if call not in owning]
        operators.append(
            FusedOperator(
                op_type=op_type,
                module_class=name,
                nodes=len(owners),
                calls=len(owning),
                of=len(all_calls),
                without=without,
            )
        )
    return Fusion(
        target=target,
        before=before,
        after=sum(1 for _ in all_nodes(model)),
        operators=operators,
        unfused=dict(_unfused(model)),
        lost=_lost(boundaries, *present),
    )


def _is_fused(node: ir.Node) -> bool:
    """Whether an operator is ONNX Runtime's own; it has some in the standard domain that the standard does not have."""
    return node.domain == CONTRIBUTED or (not node.domain and not onnx.defs.has(node.op_type))


def _unfused(model: ir.Model) -> Iterator[tuple[str, str]]:
    """The calls whose attention is not GroupQueryAttention, and the reason as far as the graph shows it."""
    for node in all_nodes(model):
        owner = owner_of(node)
        is_other = node.domain == CONTRIBUTED and node.op_type in _OTHER_ATTENTIONS
        uses = node.outputs[0].uses() if node.op_type == "Softmax" else ()
        weighs_values = any(user.op_type in ("MatMul", "FusedMatMul") and index == 0 for user, index in uses)
        if owner is not None and (is_other or weighs_values):
            yield owner.call.address, _reason(model)


def _reason(model: ir.Model) -> str:
    caches = [value.shape for value in model.graph.outputs if value.shape is not None and len(value.shape) == _CACHE]
    widths = {width for shape in caches if isinstance(width := shape[-1], int) and width % _HEAD}
    if widths:
        return f"its heads have {min(widths)} values, and {GROUP_QUERY_ATTENTION} takes multiples of {_HEAD}"
    if not caches:
        return f"the graph returns no keys and values, which {GROUP_QUERY_ATTENTION} makes"
    return "the fusions do not recognize its form, or take several tokens after a cache for one row only"


def _lost(boundaries: Mapping[Port, str], before: Collection[str], now: Collection[str]) -> list[str]:
    returned: dict[ModuleCall, list[str]] = defaultdict(list)
    for port, name in boundaries.items():
        if port.side == "outputs" and name in before:
            returned[port.call].append(name)
    return sorted(call.address for call, names in returned.items() if not any(name in now for name in names))
