"""A file that is given the choices of a model: what a tie leaves of a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.files.onnx_models import load_onnx
from modelexport.pytorch.model_run import ModelRun
from modelexport.runtime.sessions import CPU, open_session
from modelexport.verify.feeding import feeds
from modelexport.verify.ties import outputs_with_choices


def run_with_choices(
    model: Any, inputs: Mapping[str, Any] | Sequence[Any], path: Path
) -> tuple[Mapping[str, Any], str]:
    """The outputs of a file that takes others of equal scores than the model, given the model's choice; what it took.

    Returns:
        Nothing where it takes the same, or others that are not as good.
    """
    file = load_onnx(path)
    session = open_session(path)
    given = feeds(inputs, session)
    del session
    return outputs_with_choices(file, path.parent, given, ModelRun(model, inputs), provider=CPU)
