"""The owners of a graph that was traced: the name of each node begins with the scopes of its calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from modelexport.capture.lines_of_code import LinesOfCode
from modelexport.core.calls import ROOT, ModuleCall, Port, Side
from modelexport.core.owners import Evidence, Owner
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, enclosing_nodes, nested_graphs
from modelexport.lineage.derived_and_inferred_owners import complete_lines, place_unowned

_SCOPE = re.compile(r"(?:^|/)c(\d+)/[^/]*$")


def assign_owners(
    model: ir.Model, calls: Sequence[ModuleCall], lines: LinesOfCode, ports: Mapping[Port, ir.Value]
) -> None:
    """Assign owners by the scope in each node's name; a node without one, made by a pass, by its neighbors.

    The line of a node is in its doc string, as the stack on which it was traced, if the exporter wrote that. Nodes of a
    scripted function have no scope: those that compute what a call returns are that call's.
    """
    for node in all_nodes(model):
        scope, stack, node.doc_string = _SCOPE.search(node.name or ""), node.doc_string or "", None
        if scope is not None:
            set_owner(node, Owner((calls[int(scope[1])],), Evidence.EXACT, lines.traced(stack)))
    values: dict[tuple[ModuleCall, Side], list[ir.Value]] = {}
    for port, value in ports.items():
        values.setdefault((port.call, port.side), []).append(value)
    for call in reversed(calls):  # the calls inside another one came after it
        given, pending = {*values.get((call, "inputs"), ())}, values.get((call, "outputs"), [])
        while pending:
            value = pending.pop()
            maker = value.producer()
            if value not in given and maker is not None and owner_of(maker) is None:
                made = [maker, *(each for graph in nested_graphs(maker) for each in graph.all_nodes())]
                for each in made:
                    if owner_of(each) is None:
                        set_owner(each, Owner((call,), Evidence.DERIVED))
                pending += [taken for each in made for taken in each.inputs if taken is not None]
    place_unowned(model)
    for node in all_nodes(model):
        # Between an input and an output of the graph, around the model.
        set_owner(node, owner_of(node) or Owner((ROOT,), Evidence.DERIVED))
    nodes = list(all_nodes(model))
    complete_lines(nodes, enclosing_nodes(nodes))


def name_after_owners(model: ir.Model) -> None:
    """Name nodes and values after their owner instead of by scope numbers: ``/encoder.layer.0/Add_1``."""
    counts: Counter[str] = Counter()
    for node in all_nodes(model):
        owner = owner_of(node)
        base = f"/{owner.call.address}/{node.op_type}" if owner and owner.call != ROOT else f"/{node.op_type}"
        node.name = f"{base}_{counts[base]}" if counts[base] else base
        counts[base] += 1
        for position, value in enumerate(node.outputs):
            value.name = f"{node.name}_output_{position}"
