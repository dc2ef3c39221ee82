"""Example inputs of a model, given as a module or by name, described and saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from modelexport.errors import OutputError
from modelexport.files.replaceable_files import check_writable
from modelexport.files.safetensors_files import errors_of_writing
from modelexport.pytorch.inputs.generated_inputs import generate_inputs
from modelexport.pytorch.loading import load_model
from modelexport.pytorch.nested_tensors import Inputs, as_array, tensors_in
from modelexport.runtime.checked_writing import checked_and_written


def example_inputs(
    model: nn.Module | str | Path,
    *,
    spec: Mapping[str, Any] | str | Path | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
    batch: int = 2,
) -> Inputs:
    """Example inputs that the model ran with: those that its factory returns, otherwise generated ones.

    Args:
        model: The module, or its name as on the command line: a directory, ``package.module:factory``.
        spec: Replaces or adds to the generated inputs: a dict, or the path of a JSON file with name ->
            ``{"dtype": "int64", "shape": [2, 8], "range": [0, 100]}`` (100 is excluded), ``{"value": [[1, 2]]}``, or
            ``null`` to leave an argument out; or the path of arrays by name (``.npz``, ``.safetensors``).
        directory: The folder of the model's tokenizer or ``preprocessor_config.json``.
        seed: The seed of the values and of random weights.
        batch: The first dimension; 1 if the model accepts no other.

    Raises:
        InputsError: ``spec`` is wrong, or an argument cannot be generated; the message then shows the JSON to write.
        ModelLoadError: ``model`` does not name a model.
    """
    has_weights = True
    if not isinstance(model, nn.Module):
        loaded = load_model(str(model), seed=seed)
        if loaded.inputs is not None and spec is None:
            return loaded.inputs
        model, directory, has_weights = loaded.model, directory or loaded.directory, loaded.weights is None
    return generate_inputs(model, spec=spec, directory=directory, seed=seed, batch=batch, has_weights=has_weights)


def describe_inputs(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Name to element type, shape, smallest and largest element of every tensor in example inputs."""
    described = {}
    for name, array in input_arrays(inputs).items():
        numbers = array.astype("float64") if array.dtype.kind in "fV" else array
        least, largest = (numbers.min().item(), numbers.max().item()) if array.size else (None, None)
        described[name] = {"dtype": str(array.dtype), "shape": list(array.shape), "least": least, "largest": largest}
    return described


def save_inputs(inputs: Inputs, path: Path) -> None:
    """Write the tensors in example inputs to a file, by name: ``.npz`` or ``.safetensors``."""
    import numpy as np
    from safetensors.numpy import save_file

    check_writable(path, alone=True)
    arrays = input_arrays(inputs)
    plain = all(array.dtype.isbuiltin == 1 for array in arrays.values())  # .npz does not keep the type bfloat16
    with checked_and_written(path.parent) as staging:
        if path.suffix == ".npz" and plain:
            np.savez(staging / path.name, **arrays)
        elif path.suffix == ".safetensors":
            ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
            with errors_of_writing():
                save_file(ordered, staging / path.name, metadata={"made_by": "modelexport"})
        else:
            suffixes = ".npz or .safetensors" if plain else ".safetensors"
            raise OutputError(f"cannot write inputs to {path}: give a name that ends in {suffixes}")


def input_arrays(inputs: Inputs) -> dict[str, Any]:
    """The tensors in example inputs as NumPy arrays, by the names of ``forward``'s arguments."""
    return {name: as_array(tensor) for name, tensor in tensors_in(inputs)}
