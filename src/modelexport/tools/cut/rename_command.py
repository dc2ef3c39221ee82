"""`rename`."""

from __future__ import annotations

from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.core.text import plural
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE, JSON, OUTPUT


def rename(
    file: Path = FILE,
    output: Path = OUTPUT,
    values: bool = option(False, "Name values as well: /encoder/layer.0/MatMul_1_output_0."),
    as_json: bool = JSON,
) -> None:
    """Name the nodes of FILE after their modules: /encoder/layer.0/attention/self/MatMul_1."""
    from modelexport.tools.cut.renaming import rename as run

    renamed = run(file, output, values=values)
    also = f" and {plural(len(renamed.values), 'value')}" if values else ""
    text = f"{renamed.path}: {plural(len(renamed.renamed), 'node')}{also} renamed"
    print_result(renamed, lambda: text, as_json=as_json)
