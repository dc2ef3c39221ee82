"""Nodes that an exporter merged because several calls compute the same, as one node for each call again."""

from __future__ import annotations

import onnx_ir as ir

from modelexport.core.calls import ModuleCall, common_stack
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import draws, nested_graphs
from modelexport.tagged.file import TaggedFile


def separate_merged_nodes(tagged: TaggedFile) -> None:
    """Copy the nodes of several calls, if a call has no others: the copy computes what runs nearest to that call.

    A node of a later call than the one that uses its result was also one of that earlier call, and is copied, too, if
    the exporter recorded the earlier call. Other files do not tell the calls of a module apart, nor what is earlier.
    """
    nodes = [*tagged.model.graph.all_nodes()]
    stack, order = tagged.calls.stack, {each.call: place for place, each in enumerate(tagged.calls)}
    owners = [owner for node in nodes if (owner := owner_of(node)) is not None]
    running = {call for owner in owners for call in common_stack([stack(each) for each in owner.calls])}
    for node in reversed(nodes):
        owner = owner_of(node)
        if owner is None or nested_graphs(node) or draws(node):
            continue
        copies: dict[ModuleCall, ir.Node] = {}
        for place, value in enumerate(node.outputs):
            for use in list(value.uses()):
                user = owner_of(use.node)
                shared = [len(common_stack([stack(call), stack(user.call)])) if user else 0 for call in owner.calls]
                call = owner.calls[shared.index(max(shared))]
                is_recorded = user is not None and user.evidence is Evidence.EXACT
                if user and is_recorded and order[user.call] < order[call] and user.call not in stack(call):
                    call = user.call
                elif call == owner.call or call in running:
                    continue
                if call not in copies:
                    copies[call] = _copy(node, Owner((call,), user.evidence if user else owner.evidence))
                use.node.replace_input_with(use.idx, copies[call].outputs[place])
        if copies:
            set_owner(node, Owner(tuple(call for call in owner.calls if call not in copies), owner.evidence))


def _copy(node: ir.Node, owner: Owner) -> ir.Node:
    outputs = [
        ir.Value(name=f"{value.name}.{owner.call}", type=value.type, shape=value.shape) for value in node.outputs
    ]
    copy = ir.Node(node.domain, node.op_type, node.inputs, node.attributes.values(), overload=node.overload,
                   outputs=outputs, version=node.version, name=node.name)  # fmt: skip
    set_owner(copy, owner)
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_after(node, copy)
    return copy
