"""`inputs`."""

from __future__ import annotations

from pathlib import Path

from modelexport.core.declared_options import option
from modelexport.terminal.model_argument import Loading, ModelChoice
from modelexport.terminal.printing import print_result
from modelexport.terminal.progress import stages_on_line
from modelexport.terminal.shared_options import INPUTS, JSON, MODEL


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
