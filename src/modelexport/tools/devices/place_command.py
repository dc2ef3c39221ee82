"""`place`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from modelexport.core.declared_options import option
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE, JSON, parsed_pairs


def place(
    file: Path = FILE,
    rule: Sequence[str] = option(
        ..., "The device of modules: 'gpu: model.layers.*'.", metavar="'DEVICE: SELECTOR ...'"
    ),
    output: Path | None = option(
        None, "Write the session options here.", flag="-o --output", metavar="SESSION.json", file="written alone"
    ),
    provider: Sequence[str] = option(
        (), "A device of the session, in order: NAME[,option=value...].", flag="--device --provider", metavar="NAME"
    ),
    library: Sequence[str] = option((), "The library of a plug-in provider.", metavar="NAME=PATH", file="libraries"),
    check: bool = option(True, "Do not open a session."),
    as_json: bool = JSON,
) -> None:
    """Assign modules of FILE to devices: write ONNX Runtime's session options, and show where the modules run."""
    from modelexport.files.atomic_writing import write_alone
    from modelexport.tools.devices import placement_text
    from modelexport.tools.devices.placing import place as run

    libraries = {name: Path(path) for name, path in parsed_pairs("--library", library).items()}
    placement = run(file, rule, check=check, providers=provider or list(libraries), libraries=libraries)
    if output is not None:
        write_alone(output, f"{json.dumps(placement.session_options(), indent=1)}\n".encode())
    print_result(placement, lambda: placement_text.format_placement(placement, output, libraries), as_json=as_json)
    if placement.faults:
        raise typer.Exit(1)
