"""`retag`."""

from __future__ import annotations

from pathlib import Path

from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError
from modelexport.terminal.printing import print_parts
from modelexport.terminal.shared_options import JSON, OUTPUT


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
    from modelexport.lineage.retagging import retag as run
    from modelexport.packages.changed_packages import retag_package
    from modelexport.terminal import show_retag

    if source.is_dir() != changed.is_dir():
        raise UsageError(f"{changed} and {source} are a file and a folder: give two files, or two folders")
    if source.is_dir():
        reports = retag_package(changed, source=source, output=output)
    else:
        reports = {"": run(changed, source=source, output=output)}
    print_parts(reports, show_retag.format_retag, as_json=as_json)
