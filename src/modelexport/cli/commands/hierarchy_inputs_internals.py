"""Commands that show a model without exporting it: `hierarchy`, `inputs`, `internals`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from modelexport.cli.model_argument import Loading, ModelChoice
from modelexport.cli.printing import print_result
from modelexport.cli.progress import stages_on_line
from modelexport.cli.shared_options import INPUTS, JSON, MODEL
from modelexport.core.declared_options import option
from modelexport.exporting.options import LevelOptions

HierarchyView = Literal["static", "traced", "compare"]
EVERY_MODULE = LevelOptions(granularity="all")


def hierarchy(
    model: str = MODEL,
    mode: HierarchyView = option("static", "What to show."),
    trace: bool = option(False, "Print one line for each step of the traced run."),
    inputs: Path | None = INPUTS,
    *,
    levels: LevelOptions = EVERY_MODULE,
    loading: Loading,
    as_json: bool = JSON,
) -> None:
    """Show the module tree of MODEL; nothing is exported."""
    choice = ModelChoice(model, inputs, loading)
    from modelexport.cli.show_models import HierarchyMode, format_hierarchy
    from modelexport.pytorch.hierarchy_overview import hierarchy as run

    runs = trace or mode != "static"
    stages = stages_on_line()
    loaded, example = choice.load(stages, make_inputs=runs)
    with stages("trace"):
        overview = run(loaded.model, example if runs else None, **dataclasses.asdict(levels), timed=runs and as_json)
    shown: HierarchyMode = "trace" if trace else mode
    print_result(overview.document(), lambda: format_hierarchy(shown, overview), as_json=as_json)


def inputs(
    model: str = MODEL,
    spec: Path | None = INPUTS,
    output: Path | None = option(
        None, "Save them: .npz or .safetensors.", flag="-o --output", metavar="OUT", file="written alone"
    ),
    *,
    loading: Loading,
    as_json: bool = JSON,
) -> None:
    """Show the example inputs that MODEL is run with, or save them."""
    from modelexport.cli.show_models import format_inputs

    stages = stages_on_line()
    _, example = ModelChoice(model, spec, loading).load(stages)
    from modelexport.pytorch.inputs.example_inputs import describe_inputs, save_inputs

    if output is not None:
        save_inputs(example, output)
    described = describe_inputs(example)
    print_result(described, lambda: format_inputs(described), as_json=as_json)


def internals(model: str = MODEL, inputs: Path | None = INPUTS, *, loading: Loading, as_json: bool = JSON) -> None:
    """Show what PyTorch's own exporters record about MODEL's modules; nothing is written."""
    from modelexport.cli.show_models import format_internals

    stages = stages_on_line()
    loaded, example = ModelChoice(model, inputs, loading).load(stages)
    from modelexport.capture.internals.both_exporters import study

    with stages("export"):
        records = study(loaded.model, example, loaded.name)
    print_result(records, lambda: format_internals(records), as_json=as_json)
