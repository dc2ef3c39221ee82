"""`strip`."""

from __future__ import annotations

from pathlib import Path

from modelexport.terminal.shared_options import FILE, OUTPUT


def strip(file: Path = FILE, output: Path = OUTPUT) -> None:
    """Convert a file with tags as attributes to one with tags as metadata, which ONNX Runtime accepts."""
    from modelexport.tagged.strip_and_inline import strip as run

    run(file, output)
    print(output)
