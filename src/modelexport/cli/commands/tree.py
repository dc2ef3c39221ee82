"""`tree`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from modelexport.core.declared_options import option
from modelexport.terminal.printing import document_of_parts, fitting_depth, format_headings, left_out, print_result
from modelexport.terminal.shared_options import FILE_OR_FOLDER, JSON


def tree(
    file: Path = FILE_OR_FOLDER,
    depth: int | None = option(None, "Show N levels below the root.", metavar="N", least=0),
    check: bool = option(False, "Also check that the weights files are unchanged."),
    as_json: bool = JSON,
) -> None:
    """Show the module tree in FILE, or in each part of FOLDER; without a tree, what the file has."""
    from modelexport.files.linked_weights import weights_faults
    from modelexport.graph.node_owners import owned_operators
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.file_overview import format_overview, overview
    from modelexport.tagged.package import files_of
    from modelexport.tagged.tree_display import format_tree, tree_rows, untagged_operators

    documents: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    faults: list[str] = []
    for name, part in files_of(file).items():
        tagged = read_tagged(part, checked=not check)
        operators = list(owned_operators(tagged.model))
        untagged = untagged_operators(operators)
        rows = tree_rows(operators, tagged.calls, tagged.tags.__getitem__)
        levels = [row.depth for row in rows if row.nodes]
        to = depth if as_json else fitting_depth(levels, depth)
        shown = [row for row in rows if to is None or row.depth <= to]
        faults_of_part = weights_faults(tagged.model) if check else []
        faults += faults_of_part
        documents[name] = {"path": str(part), "coverage": tagged.coverage, "tree": shown, "untagged": untagged}
        documents[name] |= {"weights": faults_of_part} if check else {}
        more = left_out(levels, to) if depth is None else ""
        texts[name] = "\n".join([format_tree(shown, tagged.coverage, untagged), *([more] if more else [])])
        if tagged.found_calls is not None and len(tagged.calls) == 1:
            facts = overview(tagged)
            documents[name]["file"], texts[name] = facts, format_overview(facts, str(part))
    text = "\n".join([format_headings(texts), *dict.fromkeys(faults)])
    print_result(document_of_parts(documents), lambda: text, as_json=as_json)
    if faults:
        raise typer.Exit(1)
