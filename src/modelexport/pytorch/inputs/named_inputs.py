"""Example inputs by the names of a file's inputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import onnxruntime

from modelexport.core.text import plural
from modelexport.errors import InputsError
from modelexport.pytorch.nested_tensors import Inputs, as_array, tensors_in
from modelexport.runtime.sessions import input_names


def feeds(inputs: Inputs, runs: onnxruntime.InferenceSession) -> dict[str, Any]:
    """The tensors in example inputs by the names of a file's inputs: matched by name, or by order if names differ."""
    return under_names(inputs, input_names(runs))


def under_names(inputs: Inputs, wanted: Sequence[str]) -> dict[str, Any]:
    """The same for a list of names. More may be given than the file takes: exporters omit inputs without effect."""
    arrays = {_plain(name): as_array(tensor) for name, tensor in tensors_in(inputs)}
    by_name = {name: arrays.get(_plain(name.removeprefix("input."))) for name in wanted}
    if all(array is not None for array in by_name.values()):
        return by_name
    if len(arrays) != len(wanted):
        raise InputsError(f"the file takes {plural(len(wanted), 'input')} ({', '.join(wanted)}), not {len(arrays)}")
    return dict(zip(wanted, arrays.values(), strict=True))


def _plain(name: str) -> str:
    """The name that the exporter writes: ``past.0`` becomes ``past_0``."""
    return re.sub(r"\W", "_", name)
