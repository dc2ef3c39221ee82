"""`modelexport count`: the operators of a file, each with its number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE, JSON


def count(file: Path = FILE, as_json: bool = JSON) -> None:
    """Count the operators of FILE."""
    import modelexport

    counts = Counter(node.op_type for node in modelexport.load(file).nodes)
    print_result(dict(counts), lambda: "\n".join(f"{name} {n}" for name, n in counts.most_common()), as_json=as_json)
