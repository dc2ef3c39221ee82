"""`cost`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import FILE_OR_FOLDER, parsed_sizes
from modelexport.terminal.table_options import ONLY, SIZE, TableOptions, show


def cost(
    file: Path = FILE_OR_FOLDER, selectors: Sequence[str] = ONLY, size: Sequence[str] = SIZE, *, shown: TableOptions
) -> None:
    """Show the cost of each module: parameters, operations, bytes, memory."""
    from modelexport.packages.measured_parts import cost_parts

    sizes = parsed_sizes(size)
    with stages_on_line()("cost"):
        tables = cost_parts(file, sizes)
    show(tables, "flops", selectors, shown)
