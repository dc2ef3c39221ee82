"""Example inputs of a model or of what names one, shown and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from modelexport.errors import OutputError
from modelexport.files.atomic import check_writable, written_together
from modelexport.pytorch.inputs import generate_inputs
from modelexport.pytorch.loading import load_model
from modelexport.pytorch.model_run import as_array
from modelexport.pytorch.values import tensors_in

Inputs = Mapping[str, Any] | Sequence[Any]


def example_inputs(
    model: nn.Module | str | Path,
    *,
    spec: Mapping[str, Any] | str | Path | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
    batch: int = 2,
) -> Inputs:
    """Arguments that a model has run with: its own where what names it gives some, else generated ones.

    Args:
        model: The module, or what names one on the command line: a directory, ``package.module:factory``.
        spec: Replaces or adds to what would be generated: a dict, or the path of a JSON file with name ->
            ``{"dtype": "int64", "shape": [2, 8], "range": [0, 100]}``, ``{"value": [[1, 2]]}``, or ``null``.
        directory: Where the model's tokenizer or ``preprocessor_config.json`` lies.
        seed: For the values, and for random weights.
        batch: The first dimension; 1 where the model takes no other.

    Raises:
        InputsError: ``spec`` is wrong, or an argument cannot be generated; the message then has the JSON to write.
        ModelLoadError: ``model`` names none.
    """
    has_weights = True
    if not isinstance(model, nn.Module):
        loaded = load_model(str(model), seed=seed)
        if loaded.inputs is not None and spec is None:
            given: Inputs = loaded.inputs
            return given
        model, directory, has_weights = loaded.model, directory or loaded.directory, loaded.weights is None
    return generate_inputs(model, spec=spec, directory=directory, seed=seed, batch=batch, has_weights=has_weights)


def describe_inputs(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Name to element type, shape, and least and largest element, of every tensor in example inputs."""
    found = {}
    for name, array in arrays_in(inputs).items():
        numbers = array.astype("float64") if array.dtype.kind in "fV" else array
        least, largest = (numbers.min().item(), numbers.max().item()) if array.size else (None, None)
        found[name] = {"dtype": str(array.dtype), "shape": list(array.shape), "least": least, "largest": largest}
    return found


def save_inputs(inputs: Inputs, path: Path) -> None:
    """Write the tensors in example inputs to a file, by name: ``.npz`` or ``.safetensors``.

    Raises:
        OutputError: It has another suffix, or cannot be written.
    """
    import numpy as np
    from safetensors.numpy import save_file

    check_writable(path)
    arrays = arrays_in(inputs)
    with written_together(path.parent) as staging:
        if path.suffix == ".npz":
            np.savez(staging / path.name, **arrays)
        elif path.suffix == ".safetensors":
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, staging / path.name)
        else:
            raise OutputError(f"cannot write inputs to {path}: give a name that ends in .npz or .safetensors")


def arrays_in(inputs: Inputs) -> dict[str, Any]:
    """The tensors in example inputs as NumPy arrays, under the names of ``forward``'s arguments."""
    return {name: as_array(tensor) for name, tensor in tensors_in(inputs)}
