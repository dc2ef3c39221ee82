"""Example inputs under the names that a file has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime

from modelexport.errors import InputsError
from modelexport.pytorch.model_run import as_array
from modelexport.pytorch.values import tensors_in
from modelexport.runtime.sessions import input_names


def feeds(inputs: Mapping[str, Any] | Sequence[Any], runs: onnxruntime.InferenceSession) -> dict[str, Any]:
    """The tensors in example inputs under the names of a file's inputs: by name, or by order where names differ.

    Raises:
        InputsError: They are not those that the file takes.
    """
    return under_names(inputs, input_names(runs))


def under_names(inputs: Mapping[str, Any] | Sequence[Any], wanted: Sequence[str]) -> dict[str, Any]:
    """The same for a list of names. An exporter leaves out what has no effect: more may be given than the file takes.

    Raises:
        InputsError: One is missing, or which is which cannot be told.
    """
    given = {_plain(name): as_array(tensor) for name, tensor in tensors_in(inputs)}
    by_name = {name: given.get(_plain(name.removeprefix("input."))) for name in wanted}
    if all(array is not None for array in by_name.values()):
        return by_name
    if len(given) != len(wanted):
        raise InputsError(f"the file takes {len(wanted)} inputs ({', '.join(wanted)}) and {len(given)} were given")
    return dict(zip(wanted, given.values(), strict=True))


def _plain(name: str) -> str:
    """A name as the exporter writes it: ``past.0`` is ``past_0``."""
    return re.sub(r"\W", "_", name)
