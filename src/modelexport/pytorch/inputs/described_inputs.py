"""Arguments from the user: arrays in a file, or a JSON object of types and shapes, or of values."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelexport.core.limits import MOST_ELEMENTS
from modelexport.core.text import reason_of
from modelexport.errors import FileFormatError, InputsError
from modelexport.files.regular_files import read_json
from modelexport.pytorch.inputs.argument_tensors import COUNTED, InputMaker
from modelexport.pytorch.inputs.trial_runs import Inputs
from modelexport.runtime.input_files import read_feeds

_EXAMPLE = '{"NAME": {"dtype": "int64", "shape": [2, 8], "range": [0, 100]}} or {"NAME": {"value": [[1, 2]]}}'


def read_spec(spec: Mapping[str, Any] | str | Path | None, accepted: list[str] | None, maker: InputMaker) -> Inputs:
    """The arguments that ``spec`` gives; ``accepted`` is ``None`` if the forward takes any name."""
    if isinstance(spec, str | Path):
        spec = _read_file(Path(spec))
    if not isinstance(spec, Mapping | None):
        raise InputsError(f"the inputs are a {type(spec).__name__}, not a JSON object: write {_EXAMPLE}")
    inputs: Inputs = {}
    for name, entry in (spec or {}).items():
        if accepted is not None and name not in accepted:
            raise InputsError(f"{type(maker.model).__name__} takes no input {name}: it takes {', '.join(accepted)}")
        try:
            inputs[name] = None if entry is None else _read_entry(name, entry, maker)
        except (ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
            raise InputsError(f"input {name}: {reason_of(error)}") from error
    return inputs


def _read_file(path: Path) -> Mapping[str, Any]:
    """The arrays in a file, or the object in one of JSON."""
    if path.suffix not in (".npz", ".safetensors"):
        return read_json(path, InputsError, f"write {_EXAMPLE}, or give arrays (.npz, .safetensors)")
    try:
        return read_feeds(path, seed=0)
    except FileFormatError as error:
        raise InputsError(str(error)) from error


def _read_entry(name: str, entry: Any, maker: InputMaker) -> Any:
    """One argument of the spec. Raises ValueError, or an exception of torch, if the entry is wrong."""
    if isinstance(entry, np.ndarray):  # torch does not take bfloat16 from NumPy
        plain = entry if entry.dtype.isbuiltin == 1 else entry.astype(np.float32)
        return torch.as_tensor(plain, dtype=getattr(torch, entry.dtype.name), device=maker.device)
    if not isinstance(entry, Mapping) or not (entry.keys() <= {"dtype", "shape", "range"} or "value" in entry):
        raise ValueError(f"this is neither a shape nor a value; write {_EXAMPLE}")
    dtype = getattr(torch, str(entry["dtype"]), None) if "dtype" in entry else None
    if "dtype" in entry and not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {entry['dtype']!r}; give float32, int64, bool or another torch dtype")
    if "value" in entry:
        value = entry["value"]
        return torch.tensor(value, dtype=dtype, device=maker.device) if isinstance(value, list) or dtype else value
    shape, bounds = entry.get("shape"), entry.get("range")
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f'"shape" is a list of sizes such as [2, 8], not {shape!r}')
    if prod(shape) > MOST_ELEMENTS:
        raise ValueError(f'"shape" has {prod(shape):,} elements, and at most {MOST_ELEMENTS:,} are allowed: {shape!r}')
    numbers = isinstance(bounds, list | tuple) and all(type(bound) in (int, float) for bound in bounds)
    if bounds is not None and not (numbers and len(bounds) == 2 and bounds[0] < bounds[1]):
        raise ValueError(f'"range" is [low, high] with low below high, not {bounds!r}')
    shape = tuple(shape)
    counts = name.endswith(COUNTED) if bounds is None else all(type(bound) is int for bound in bounds)
    dtype = dtype or (torch.int64 if counts else maker.dtype)
    if bounds is not None and dtype.is_floating_point:
        values = torch.rand(shape, generator=maker.generator(name)) * (bounds[1] - bounds[0]) + bounds[0]
    elif dtype.is_floating_point:
        values = maker.floats(name, shape)
    elif bounds is None and name.endswith("mask"):
        values = torch.ones(shape)
    elif bounds is None and maker.is_of_tokens(name):
        values = maker.tokens(name, shape)
    else:
        values = maker.integers(name, shape, *(bounds or (0, 2)))
    return values.to(maker.device, dtype)
