"""`nodes`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.core.text import align, plural, shortened
from modelexport.terminal.printing import print_parts
from modelexport.terminal.shared_options import FILE_OR_FOLDER, JSON, SELECTORS

if TYPE_CHECKING:
    from modelexport.tagged.file import NodeRow


def nodes(file: Path = FILE_OR_FOLDER, modules: Sequence[str] = SELECTORS, as_json: bool = JSON) -> None:
    """List the nodes of module calls and of the calls inside them, in each part that runs them."""
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import parts_with

    listed, has_tags = {}, True
    for name, part in parts_with(file, *modules).items():
        tagged = read_tagged(part)
        listed[name] = tagged.describe_nodes(tagged.select(*modules))
        has_tags &= tagged.found_calls is None
    print_parts(listed, _format_nodes if has_tags else _format_connections, as_json=as_json)


def _format_connections(nodes: Sequence[NodeRow]) -> str:
    """The nodes of a file without tags: their inputs and outputs say more than calls that were found by names."""
    table = [("OPERATOR", "NAME", "CALL", "INPUTS", "OUTPUTS")]
    table += [(n.op_type, n.name, n.call or ".", _names(n.inputs), _names(n.outputs)) for n in nodes]
    return f"{align(table)}\n\n{plural(len(nodes), 'node')}"


def _names(values: Sequence[str]) -> str:
    return shortened(", ".join(name or '""' for name in values), 100)


def _format_nodes(nodes: Sequence[NodeRow]) -> str:
    lines = any(node.line for node in nodes)
    table = [["OPERATOR", "NAME", "CALL", *["LINE"] * lines, "EVIDENCE", "TAG", "ALSO OWNED BY"]]
    for n in nodes:
        also = ", ".join(call or "." for call in n.also)
        table.append([n.op_type, n.name, n.call or ".", *[n.line] * lines, n.evidence, n.source_module, also])
    return f"{align(table)}\n\n{plural(len(nodes), 'node')}"
