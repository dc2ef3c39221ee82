"""`documents`."""

from __future__ import annotations

from pathlib import Path

from modelexport.format.keys import SIDECAR_SUFFIX
from modelexport.terminal.shared_options import FILE


def documents(file: Path = FILE) -> None:
    """Write the tables that `export --no-documents` omitted, from the tags in FILE."""
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.table_writing import write_tables

    written = write_tables(read_tagged(file))
    print(f"wrote {', '.join(map(str, written))}")
    if not (sidecar := file.with_suffix(SIDECAR_SUFFIX)).exists():
        print(f"{sidecar.name} has facts of the model that are not in the file, such as the names of arguments: export")
