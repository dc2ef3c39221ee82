"""Example inputs by the names of a file's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnxruntime

from modelexport.core.text import plural
from modelexport.errors import InputsError
from modelexport.pytorch.inputs.other_sizes import names_in_file
from modelexport.pytorch.nested_tensors import Inputs, as_array, tensors_in
from modelexport.runtime.sessions import input_names


def feeds(inputs: Inputs, runs: onnxruntime.InferenceSession) -> dict[str, Any]:
    """The tensors in example inputs by the names of a file's inputs: matched by name, or by order if names differ."""
    return under_names(inputs, input_names(runs))


def under_names(inputs: Inputs, wanted: Sequence[str]) -> dict[str, Any]:
    """The same for a list of names. More may be given than the file takes: exporters omit inputs without effect."""
    names = names_in_file(inputs, wanted)
    arrays = {names[name]: as_array(tensor) for name, tensor in tensors_in(inputs) if name in names}
    if arrays.keys() != {*wanted}:
        count = len(list(tensors_in(inputs)))
        raise InputsError(f"the file takes {plural(len(wanted), 'input')} ({', '.join(wanted)}), not {count}")
    return {name: arrays[name] for name in wanted}
