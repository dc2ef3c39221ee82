"""A table as node data for Google's Model Explorer: the figure of each node, shown in its graph of the file.

Its adapter for ONNX knows a node by its name. It draws the branches of an ``If`` into the graph around it, under longer
names, and the body of a loop of the main graph as a graph of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from modelexport.errors import UsageError
from modelexport.files.atomic_writing import write_alone
from modelexport.tables.table import Table
from modelexport.tagged.file import TaggedFile

ExplorerPlace = tuple[str, str]
"""The name of a graph and that of a node in it, as Model Explorer has them."""
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 0.5, "bgColor": "#ffe08a"}, {"stop": 1, "bgColor": "#e8590c"}]


def explorer_places(tagged: TaggedFile) -> Mapping[ir.Node, ExplorerPlace]:
    """Where Model Explorer shows the nodes of a file; without those that it does not show or whose name it makes up.

    A file with functions has other nodes than its flat model, so there none is known.
    """
    if tagged.encoding == "functions":
        return {}
    main, places = tagged.model.graph.name or "", {}

    def walk(graph: ir.Graph, drawn_as: str, prefix: str) -> None:
        seen: set[str] = set()
        for node in graph:
            name = f"{prefix}{node.name}"
            if node.name and name not in seen:
                places[node] = drawn_as, name
            seen.add(name)
            for attribute in node.attributes.values():
                if attribute.type is not ir.AttributeType.GRAPH:
                    continue
                if node.op_type == "If" and not node.domain:
                    walk(attribute.as_graph(), drawn_as, f"{name}/{attribute.name}/")
                elif drawn_as == main:
                    walk(attribute.as_graph(), f"{name}/{attribute.name}", "")

    walk(tagged.model.graph, main, "")
    return places


def write_node_data(table: Table, path: Path, *, column: str) -> None:
    """Write one column as node data, under the names of the file's nodes."""
    write_alone(path, msgspec.json.format(msgspec.json.encode(node_data_document(table, column)), indent=1))


def node_data_document(table: Table, name: str) -> dict[str, Any]:
    """``{graph: {"name", "results": {node: {"value"}}, "gradient"}}``.

    Nodes that ONNX Runtime made and that lead to no node of the file are left out; the figures of several that lead to
    the same one are added up.
    """
    column = table.column(name)
    sums: dict[ExplorerPlace, Any] = {}
    for node in table.nodes:
        if node.place[1] and name in node.figures:
            sums[node.place] = sums.get(node.place, 0) + node.figures[name]
    graphs: dict[str, Any] = {}
    for (graph, key), figure in sums.items():
        data = {"name": f"{name} ({column.unit})", "results": {}, "gradient": _GRADIENT}
        graphs.setdefault(graph, data)["results"][key] = {"value": column.number(figure)}
    if not graphs:
        raise UsageError(
            f"no node of {table.name} has a figure of {name} to show; of a file with functions, make a flat one first "
            "with `modelexport inline`"
        )
    return graphs
