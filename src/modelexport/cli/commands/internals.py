"""`internals`."""

from __future__ import annotations

from pathlib import Path

from modelexport.terminal.model_argument import Loading, ModelChoice
from modelexport.terminal.printing import print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import INPUTS, JSON, MODEL


def internals(model: str = MODEL, inputs: Path | None = INPUTS, *, loading: Loading, as_json: bool = JSON) -> None:
    """Show what PyTorch's own exporters record about MODEL's modules; nothing is written."""
    from modelexport.cli.show_models import format_internals

    stages = stages_on_line()
    loaded, example = ModelChoice(model, inputs, loading).load(stages)
    from modelexport.capture.internals.both_exporters import study

    with stages("export"):
        records = study(loaded.model, example, loaded.name)
    print_result(records, lambda: format_internals(records), as_json=as_json)
