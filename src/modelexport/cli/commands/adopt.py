"""`adopt`."""

from __future__ import annotations

from pathlib import Path

from modelexport.core.declared_options import argument, option
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import JSON, OUTPUT


def adopt(
    file: Path = argument(..., "An ONNX file of another exporter.", metavar="FILE.onnx", file="read file"),
    output: Path = OUTPUT,
    keep_torch_metadata: bool = option(False, "Keep pkg.torch.* keys, which contain paths of the exporting machine."),
    as_json: bool = JSON,
) -> None:
    """Tag a file of another exporter, from the information about modules in the file."""
    from modelexport.lineage.adoption import adopt as run
    from modelexport.terminal import show_retag

    adopted = run(file, output, keep_torch_metadata=keep_torch_metadata)
    print_result(show_retag.adopted_document(adopted), lambda: show_retag.format_adopted(adopted), as_json=as_json)
