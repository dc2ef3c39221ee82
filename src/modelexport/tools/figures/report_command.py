"""`report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.errors import UsageError
from modelexport.runtime import CPU
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import DEVICE, FILE_OR_FOLDER, check_processor, parsed_sizes
from modelexport.terminal.table_options import SIZE


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What each module computes"""

    with_values: bool = option(
        False, "Also run FILE node by node, and show the range of what each module computes.", flag="--values"
    )
    data: Path | None = option(None, "Inputs for that: arrays, texts, or a folder of images.", metavar="X", file="read")
    processor: Path | None = option(
        None, "The folder of the tokenizer or image processor that the inputs need.", metavar="DIR", file="read"
    )


def report(
    file: Path = FILE_OR_FOLDER,
    output: Path = option(..., "The page to write.", flag="-o --output", metavar="OUT.html", file="written alone"),
    size: Sequence[str] = SIZE,
    profiled: bool = option(False, "Also run FILE, and show the time of each module.", flag="--profile"),
    against: Path | None = option(
        None,
        "A quantized version of FILE: show its error, and with --profile its time.",
        metavar="OTHER.onnx",
        file="read",
    ),
    provider: str = DEVICE,
    *,
    ranges: Ranges,
) -> None:
    """Write the tree of FILE, its coverage, its verification and its cost to one page."""
    from modelexport.runtime.devices import find_device
    from modelexport.tools.figures.report_page import write_report_page

    stages = stages_on_line()
    if (device := find_device(provider)).compiles:
        raise UsageError(
            f"ONNX Runtime has no times of nodes on {device}: `modelexport profile --device` cuts calls out"
        )
    if provider != CPU and not profiled:
        raise UsageError("--device is where times are measured: give --profile")
    if ranges.data is not None and not ranges.with_values:
        raise UsageError("--data are for the ranges of values: give --values")
    check_processor(ranges.data, ranges.processor)
    if ranges.data is not None and file.is_dir():
        raise UsageError(f"{file} is a folder: give --data with one of its parts")
    if against is not None and file.is_dir():
        raise UsageError(f"{file} is a folder: give --against with one of its parts")
    with stages("report"):
        write_report_page(
            file,
            output,
            sizes=parsed_sizes(size),
            profiled=profiled,
            provider=provider,
            against=against,
            with_values=ranges.with_values,
            data=ranges.data,
            processor=ranges.processor,
        )
    print(output)
