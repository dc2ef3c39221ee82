"""`inline`."""

from __future__ import annotations

from pathlib import Path

from modelexport.terminal.shared_options import FILE, OUTPUT


def inline(file: Path = FILE, output: Path = OUTPUT) -> None:
    """Convert a file with a function for each module to a flat one."""
    from modelexport.tagged.strip_and_inline import inline as run

    run(file, output)
    print(output)
