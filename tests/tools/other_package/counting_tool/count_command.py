"""`modelexport count`: the operators of a file, or of each part of a package, each with its number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from modelexport.tagged.package import files_of
from modelexport.terminal.printing import print_parts
from modelexport.terminal.shared_options import FILE_OR_FOLDER, JSON


def count(path: Path = FILE_OR_FOLDER, as_json: bool = JSON) -> None:
    """Count the operators of FILE, or of the parts in FOLDER."""
    import modelexport

    files = files_of(path)
    counts = {name: Counter(node.op_type for node in modelexport.load(file).nodes) for name, file in files.items()}
    print_parts(counts, _format, as_json=as_json)


def _format(counts: Counter[str]) -> str:
    return "\n".join(f"{name} {n}" for name, n in counts.most_common())
