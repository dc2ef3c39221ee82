"""A table as node data for Google's Model Explorer, which shows each node's figure in its graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from modelexport.errors import UsageError
from modelexport.files.atomic import check_writable, written_together
from modelexport.measure.table import Table

_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 0.5, "bgColor": "#ffe08a"}, {"stop": 1, "bgColor": "#e8590c"}]


def write_node_data(table: Table, path: Path, *, column: str) -> None:
    """Write one column as node data, by the names of the nodes' outputs in the file.

    Raises:
        OutputError: The file cannot be written. An existing file of that name is unchanged.
        UsageError: The column does not exist, or its figures are formulas.
    """
    check_writable(path)
    document = node_data_document(table, column)
    with written_together(path.parent) as staging:
        (staging / path.name).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def node_data_document(table: Table, name: str) -> dict[str, Any]:
    """``{graph: {"name", "results": {value: {"value"}}, "gradient"}}``.

    Nodes that ONNX Runtime made and whose values are not in the file are left out; the figures of several nodes for
    the same value are added up.
    """
    column = table.column(name)
    sums: dict[str, Any] = {}
    for node in table.nodes:
        if node.value and name in node.figures:
            sums[node.value] = sums.get(node.value, 0) + node.figures[name]
    results = {value: {"value": column.number(figure)} for value, figure in sums.items()}
    if any(isinstance(result["value"], str) for result in results.values()):
        raise UsageError(f"{name} depends on sizes that are not given: give them with --size NAME=N")
    data = {"name": f"{name} ({column.unit})", "results": results, "gradient": _GRADIENT}
    return {table.graph: data}
