"""`kit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.core.text import plural
from modelexport.terminal.printing import print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import ARRAYS, FILE, JSON


def kit(
    file: Path = FILE,
    output: Path = option(..., "The folder to write.", flag="-o --output", metavar="KIT/", file="written folder"),
    modules: Sequence[str] = option(
        (),
        "Calls to write as parts, in addition to the whole file; by default all calls.",
        flag="--module",
        metavar="SELECTOR",
    ),
    inputs: Path | None = ARRAYS,
    seed: int = option(0, "The seed of random inputs.", metavar="N", least=0),
    as_json: bool = JSON,
) -> None:
    """Write modules of FILE with inputs and right outputs, and runners for Python, Node and browsers.

    On the other machine: `python runner.py`; then here `modelexport verify FILE --results results.json`.
    """
    from modelexport.tools.devices.kits import write_kit

    result = write_kit(file, output, modules=modules, inputs=inputs, seed=seed, tell=stages_on_line().tell)
    text = f"{result.path}: {plural(len(result.parts), 'part')}; on the other machine: python runner.py [PROVIDER]"
    print_result(result, lambda: text, as_json=as_json)
