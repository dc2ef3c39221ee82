"""`select`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.errors import UsageError
from modelexport.terminal.shared_options import FILE, SELECTORS


def select(
    file: Path = FILE,
    selectors: Sequence[str] = SELECTORS,
    form: str = option(..., "The tool: ort, modelopt, olive, trt or nncf.", flag="--as", metavar="TOOL"),
) -> None:
    """Print the nodes of modules in the form that another tool's option takes, to exclude or include them there."""
    from modelexport.core.text import suggest
    from modelexport.tagged.file import read_tagged
    from modelexport.tools.quantize.nodes_for_other_tools import FORMS, excluded

    if form not in FORMS:
        raise UsageError(f"there is no form '{form}'{suggest(form, FORMS)}; the forms are {', '.join(FORMS)}")
    print(excluded(read_tagged(file), selectors, form), end="")
