"""`hierarchy`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from modelexport.core.declared_options import option
from modelexport.exporting.options import LevelOptions
from modelexport.terminal.model_argument import Loading, ModelChoice
from modelexport.terminal.printing import print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import INPUTS, JSON, MODEL

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
