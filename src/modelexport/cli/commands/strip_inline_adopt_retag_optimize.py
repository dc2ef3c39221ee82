"""Commands that convert or restore tags: `strip`, `inline`, `adopt`, `retag`, `optimize`."""

from __future__ import annotations

from pathlib import Path

from modelexport.cli.printing import print_parts, print_result
from modelexport.cli.progress import stages_on_line
from modelexport.cli.shared_options import FILE, JSON, OUTPUT
from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError


def strip(file: Path = FILE, output: Path = OUTPUT) -> None:
    """Convert a file with tags as attributes to one with tags as metadata, which ONNX Runtime accepts."""
    from modelexport.tagged.strip_and_inline import strip as run

    run(file, output)
    print(output)


def inline(file: Path = FILE, output: Path = OUTPUT) -> None:
    """Convert a file with a function for each module to a flat one."""
    from modelexport.tagged.strip_and_inline import inline as run

    run(file, output)
    print(output)


def adopt(
    file: Path = argument(..., "An ONNX file of another exporter.", metavar="FILE.onnx", file="read"),
    output: Path = OUTPUT,
    keep_torch_metadata: bool = option(False, "Keep pkg.torch.* keys, which contain paths of the exporting machine."),
    as_json: bool = JSON,
) -> None:
    """Tag a file of another exporter, from the information about modules in the file."""
    from modelexport.cli import show_changed
    from modelexport.lineage.adoption import adopt as run

    adopted = run(file, output, keep_torch_metadata=keep_torch_metadata)
    print_result(
        show_changed.adopted_document(adopted),
        lambda: show_changed.format_adopted(adopted),
        as_json=as_json,
    )


def retag(
    changed: Path = argument(
        ..., "The file that a tool made from TAGGED.", metavar="CHANGED.onnx|CHANGED/", file="read"
    ),
    source: Path = option(
        ..., "The file that the tool read.", flag="--from", metavar="TAGGED.onnx|TAGGED/", file="read"
    ),
    output: Path = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Restore the tags of a file that another tool changed."""
    from modelexport.cli import show_changed
    from modelexport.lineage.retagging import retag as run
    from modelexport.packages.changed_packages import retag_package

    if source.is_dir() != changed.is_dir():
        raise UsageError(f"{changed} and {source} are a file and a folder: give two files, or two folders")
    if source.is_dir():
        reports = retag_package(changed, source=source, output=output)
    else:
        reports = {"": run(changed, source=source, output=output)}
    print_parts(reports, show_changed.format_retag, as_json=as_json)


def optimize(
    file: Path = FILE,
    tool: str = option(..., "ort-extended, onnxslim, float16, ...", flag="--with", metavar="TOOL"),
    output: Path = OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Run another package's optimizer, quantizer or converter on FILE, and restore the tags in the result."""
    from modelexport.cli import show_changed
    from modelexport.lineage.optimize_tools import optimize_file as run

    with stages_on_line()(tool):
        report = run(file, tool, output)
    print_result(report, lambda: show_changed.format_retag(report), as_json=as_json)
