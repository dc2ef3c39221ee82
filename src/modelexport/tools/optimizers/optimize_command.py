"""`optimize`."""

from __future__ import annotations

from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.terminal.printing import print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import FILE, JSON, OUTPUT


def optimize(
    file: Path = FILE,
    tool: str = option(..., "ort-extended, onnxslim, float16, ...", flag="--with", metavar="TOOL"),
    output: Path = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Run another package's optimizer, quantizer or converter on FILE, and restore the tags in the result."""
    from modelexport.terminal import show_retag
    from modelexport.tools.optimizers.optimize_tools import optimize_file as run

    with stages_on_line()(tool):
        report = run(file, tool, output)
    print_result(report, lambda: show_retag.format_retag(report), as_json=as_json)
