"""A file that is given the choices of a model, or is computed in float64: what that leaves of a difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.files.onnx_models import load_onnx
from modelexport.pytorch.model_run import ModelRun
from modelexport.runtime.sessions import CPU, open_session
from modelexport.verify.feeding import feeds
from modelexport.verify.kernels import outputs_in_double
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


def run_in_double(
    inputs: Mapping[str, Any] | Sequence[Any], path: Path, agrees: Callable[[Mapping[str, Any]], bool]
) -> tuple[Mapping[str, Any], str]:
    """The outputs of a file computed with float64 kernels, where only the runtime's float32 kernels are to blame.

    Args:
        agrees: Whether outputs are those of the model.

    Returns:
        As :func:`outputs_in_double`.
    """
    session = open_session(path)
    given = feeds(inputs, session)
    del session
    return outputs_in_double(load_onnx(path), path.parent, given, agrees)


def rounded_outputs(
    model: Any, inputs: Mapping[str, Any] | Sequence[Any], *, same_choices: bool = False
) -> list[Any] | None:
    """What a model returns with other roundings, to see what these do to it; ``None`` if it cannot be repeated.

    Args:
        same_choices: Not if the model then chooses otherwise, to compare with a file that was given its choices.
    """
    run = ModelRun(model, inputs, operations=False, choices=same_choices)
    rounded = run.rounded_otherwise()
    if rounded is None or [one.indices for one in run.choices] != [one.indices for one in rounded.choices]:
        return None
    return rounded.outputs
