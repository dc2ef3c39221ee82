"""`values`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from modelexport.core.declared_options import option
from modelexport.runtime.devices import CPU
from modelexport.terminal.model_argument import Loading, ModelChoice
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import FILE_OR_FOLDER, THROUGH, check_processor, device_text, parsed_sizes
from modelexport.terminal.table_options import ONLY, SIZE, TableOptions, show


@dataclass(frozen=True, kw_only=True)
class RunForValues:
    """How FILE is run"""

    data: Path | None = option(
        None, "Inputs of one run or of several: arrays, texts, or a folder of images.", metavar="X", file="read"
    )
    processor: Path | None = option(
        None, "The folder of the tokenizer or image processor that the inputs need.", metavar="DIR", file="read"
    )
    size: Sequence[str] = SIZE
    provider: str | None = option(
        None,
        "The device to run on, such as cpu; by default nodes are computed as the standard defines them.",
        flag="--device --provider",
        metavar="NAME",
    )
    through: str | None = THROUGH


def values(
    file: Path = FILE_OR_FOLDER,
    selectors: Sequence[str] = ONLY,
    model: str | None = option(
        None, "Show the values of the same model in PyTorch beside.", metavar="MODEL", file="model"
    ),
    *,
    how: RunForValues,
    loading: Loading,
    shown: TableOptions,
) -> None:
    """Run FILE, and show the range of what each module computes and the first NaN or infinity.

    The exit status is 1 if an output has NaN or infinities.
    """
    from modelexport.tables import columns
    from modelexport.tools.figures.values import describe_origin
    from modelexport.tools.figures.values import values as measured_values

    shown.check(columns.VALUES)
    check_processor(how.data, how.processor)
    loading.check(model, "--model")
    stages = stages_on_line()
    ranges: Any = None
    given: Any = how.data
    if model is not None:
        loaded, example = ModelChoice(model, how.data, loading).of_file(file).load(stages)
        from modelexport.pytorch.inputs.named_inputs import feeds
        from modelexport.runtime.sessions import open_file, session_options
        from modelexport.tools.figures.call_ranges import ranges_of_calls

        given = [feeds(example, open_file(file, session_options("none", "cpu")))]
        with stages("run PyTorch"):
            ranges = ranges_of_calls(loaded.model, example)
    with stages("run"):
        found = measured_values(
            file,
            given,
            sizes=parsed_sizes(how.size),
            processor=how.processor,
            torch_ranges=ranges,
            device=device_text(how.provider or CPU, how.through) if how.provider or how.through is not None else None,
        )
    quiet = shown.as_json or shown.as_csv
    show({"": found.table}, "largest", selectors, shown, {"": found}, [found.page()])
    if not quiet:
        for line in found.lines:
            print(line)
        for origin in found.found.inside:
            print("inside, gone before the outputs: " + describe_origin(origin, found.found.runs)[0])
    if found.first is not None:
        raise typer.Exit(1)
