"""``NAME.reference.safetensors``: the trace of a PyTorch run, stored to verify the file beside it without PyTorch.

Arrays have the types of the model; fingerprints are those of the run in float64.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelexport.core.calls import ModuleCall
from modelexport.core.json_decoding import decode_json
from modelexport.errors import FileFormatError, NotWrittenError, WeightsError
from modelexport.files.safetensors_files import encode_header, read_header
from modelexport.format import documents, keys
from modelexport.format.dtypes import SAFETENSORS_NAMES, parse_dtype
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.kept_outputs import requested_outputs
from modelexport.graph.nodes import required_inputs
from modelexport.tagged.file import TaggedFile
from modelexport.traces.fingerprints import Fingerprint
from modelexport.traces.tolerances import FROM_STORED_VALUES
from modelexport.traces.trace import Choice, Content, SeenTensor, TensorPlace, Trace

_TYPES = [name for name, code in SAFETENSORS_NAMES.items() if not code.startswith("F8_")]
"""Element types that safetensors reads into NumPy; widest first, so that every tensor is aligned in the file."""
_INPUTS, _VALUES, _TENSORS, _CHOICES, _DRAWN = "inputs/", "values/", "tensors/", "choices/", "drawn/"
_MODULES, _OUTPUTS, _WEIGHTS, _TRACE = "modules", "outputs", "weights", "trace"


def reference_path(path: Path) -> Path:
    """The path of the reference values of a file."""
    return path.with_suffix(keys.REFERENCE_SUFFIX)


@dataclass(frozen=True)
class ReferenceValues:
    """The contents of a file of reference values."""

    dtype: str
    """The floating-point type of the model."""
    inputs: Mapping[str, Any]
    """Name of an input of the file to its array."""
    outputs: Sequence[Any]
    """The tensors that the model returned, in order."""
    modules: Sequence[ModuleCall]
    """The calls whose values are stored; empty if all are."""
    weights: Mapping[str, str]
    """Initializers, by the entries that they come from, to digests of their bytes."""
    trace: Trace


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A trace without its arrays."""

    dtype: str
    exact: bool
    calls: list[tuple[str, int]]
    """Address, and the index of the call that it ran in; -1 for the root's."""
    contents: list[tuple[Fingerprint, list[int], list[int], str]]
    """Fingerprint, the calls that computed it and those that got or returned it, and the key of its array."""
    tensors: list[tuple[int, str, str, int, str, list[int]]]
    """Call, side, name, content, element type, shape."""
    choices: int
    drawn: list[int]
    """The calls that drew random numbers."""


def write_reference(
    path: Path,
    tagged: TaggedFile,
    trace: Trace,
    *,
    dtype: str,
    inputs: Mapping[str, Any],
    outputs: Sequence[Any],
    weights: Mapping[str, str],
    modules: Sequence[ModuleCall] = (),
    sidecar: documents.Hierarchy | None = None,
    announce: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the reference values of a file, the same bytes for the same values.

    Args:
        path: The file to write; it should not exist yet.
        trace: The PyTorch run.
        dtype: The floating-point type of the model.
        inputs: Name of an input of the file to its array.
        outputs: What the model returned, in its own types.
        weights: Digests of the file's parameters, so that values of another file are refused.
        modules: The calls whose values to store, with those inside them; all if empty.
        sidecar: The sidecar, for the names of values in the file.
        announce: Called with the size in bytes before anything is written.
    """
    kept = [t for t in trace.tensors if not modules or _is_inside(t.place.call, set(modules), trace.parents)]
    requested = requested_outputs(tagged.model, outputs)
    names = [value.name or "" for value in tagged.model.graph.outputs]
    names = [*names, *(f"output {i}" for i in range(len(names), len(requested)))][: len(requested)]
    arrays = {f"{_INPUTS}{name}": array for name, array in inputs.items()}
    arrays |= {f"{_VALUES}{name}": array for name, array in zip(names, requested, strict=True)}
    where = _add_boundaries(arrays, kept, _names(sidecar, tagged))
    for number, choice in enumerate([] if modules else trace.choices):
        arrays[f"{_CHOICES}{number}/scores"], arrays[f"{_CHOICES}{number}/indices"] = choice
    for number, (_, array) in enumerate(trace.random_numbers):
        arrays[f"{_DRAWN}{number}"] = array
    arrays = {key: np.asarray(array) for kind in _TYPES for key, array in arrays.items() if str(array.dtype) == kind}
    description = _described(trace, kept, where, dtype, with_choices=not modules)
    header = encode_header(
        {key: (str(array.dtype), array.shape) for key, array in arrays.items()},
        {
            keys.FORMAT_VERSION_KEY: FORMAT_VERSION,
            _OUTPUTS: json.dumps(names),
            _MODULES: json.dumps([call.address for call in modules]),
            _WEIGHTS: json.dumps(dict(weights)),
            _TRACE: msgspec.json.encode(description).decode(),
        },
    )
    total = len(header) + sum(array.nbytes for array in arrays.values())
    announce(total)
    if total > (free := shutil.disk_usage(path.parent).free):
        raise NotWrittenError(
            f"the reference values need {total:,} bytes and {path.parent} has {free:,}: choose fewer modules"
        )
    with path.open("wb") as file:
        file.write(header)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _add_boundaries(
    arrays: dict[str, Any], kept: Sequence[SeenTensor], values: Mapping[tuple[str, str, str], str]
) -> dict[Content, str]:
    """Add the tensors at boundaries, each content once, by each name that it has in the file; returns their keys."""
    where: dict[Content, str] = {}
    for tensor in kept:
        place, content = tensor.place, tensor.content
        name = values.get((place.call.address, place.side, place.name), "")
        if not name and content in where:
            continue
        key = f"{_VALUES}{name}" if name else f"{_TENSORS}{len(where)}"
        where.setdefault(content, key)
        if key not in arrays:
            dtype = parse_dtype(tensor.dtype).numpy()
            arrays[key] = content.array.astype(dtype).reshape(tensor.shape)
    return where


def _names(sidecar: documents.Hierarchy | None, tagged: TaggedFile) -> dict[tuple[str, str, str], str]:
    """Call, side and name of a tensor to its value in the main graph, as recorded in the sidecar."""
    produced = {value.name for node in tagged.model.graph for value in node.outputs}
    return {
        (call.address, side, tensor.name): tensor.value
        for call in (sidecar.calls if sidecar is not None else ())
        for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs))
        for tensor in tensors
        if tensor.value is not None and tensor.value in produced
    }


def _is_inside(call: ModuleCall, chosen: set[ModuleCall], parents: Mapping[ModuleCall, ModuleCall | None]) -> bool:
    around: ModuleCall | None = call
    while around is not None:
        if around in chosen:
            return True
        around = parents[around]
    return False


def _described(
    trace: Trace, kept: Sequence[SeenTensor], where: Mapping[Content, str], dtype: str, *, with_choices: bool
) -> _Stored:
    numbers = {call: index for index, call in enumerate(trace.parents)}
    contents = {content: place for place, content in enumerate(trace.contents)}

    def numbered(calls: Collection[ModuleCall]) -> list[int]:
        return [numbers[call] for call in calls if call in numbers]

    return _Stored(
        dtype,
        trace.is_float64,
        [(call.address, -1 if parent is None else numbers[parent]) for call, parent in trace.parents.items()],
        [
            (known.fingerprint, numbered(known.computed), numbered(known.passed), where.get(known, ""))
            for known in contents
        ],
        [
            (numbers[t.place.call], t.place.side, t.place.name, contents[t.content], t.dtype, list(t.shape))
            for t in kept
        ],
        len(trace.choices) if with_choices else 0,
        [numbers[call] for call, _ in trace.random_numbers],
    )


@contextmanager
def open_reference(tagged: TaggedFile) -> Iterator[ReferenceValues]:
    """Open the reference values beside a file."""
    path = reference_path(tagged.path)
    if not path.is_file():
        raise FileFormatError(
            f"there is no {path} to verify {tagged.path} with: give the model with --model, or "
            "export with --reference; another file is compared by `modelexport compare FILE OTHER --numbers`"
        )
    stored = _read(path)
    names = {value.name for value in required_inputs(tagged.model)}
    if set(stored.inputs) != names or any(call not in tagged.calls for call in stored.modules):
        raise FileFormatError(
            f"{path} does not belong to {tagged.path}: inputs or modules differ; export with --reference"
        )
    yield stored


def _read(path: Path) -> ReferenceValues:
    """Read reference values."""
    import ml_dtypes  # noqa: F401 - adds to NumPy the bfloat16 that safetensors needs
    from safetensors import SafetensorError, safe_open

    try:
        places = read_header(path).tensors
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            version = metadata.get(keys.FORMAT_VERSION_KEY)
            if version != FORMAT_VERSION or _TRACE not in metadata:
                raise FileFormatError(
                    f"{path} has the format version {version}, which this version cannot read: export again"
                )
            outputs, modules = (decode_json(metadata[key], kind=list[str]) for key in (_OUTPUTS, _MODULES))
            run = decode_json(metadata[_TRACE], kind=_Stored)
            trace = _as_trace(run, file.get_tensor)
            inputs = [key.removeprefix(_INPUTS) for key in places if key.startswith(_INPUTS)]
            trace.outputs = [file.get_tensor(f"{_VALUES}{name}") for name in outputs]
            return ReferenceValues(
                dtype=run.dtype,
                inputs={name: file.get_tensor(f"{_INPUTS}{name}") for name in inputs},
                outputs=trace.outputs,
                modules=[ModuleCall.parse(address) for address in modules],
                weights=decode_json(metadata[_WEIGHTS], kind=dict[str, str]),
                trace=trace,
            )
    except (SafetensorError, WeightsError, OSError, LookupError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is damaged ({error}): export again with --reference") from error


def _as_trace(run: _Stored, read: Callable[[str], Any]) -> Trace:
    """The trace; its arrays are in float64.

    Raises:
        ValueError: The description contradicts itself.
    """
    if any(not -1 <= above < number for number, (_, above) in enumerate(run.calls)):
        raise ValueError("a call runs in one that began after it")
    calls = [ModuleCall.parse(address) for address, _ in run.calls]
    if len(set(calls)) != len(calls):
        raise ValueError("it lists a call twice")
    trace = Trace(is_float64=run.exact, stored_tolerance=FROM_STORED_VALUES)
    trace.parents = {
        call: None if above < 0 else calls[above] for call, (_, above) in zip(calls, run.calls, strict=True)
    }
    contents = []
    for fingerprint, computed, passed, key in run.contents:
        content = trace.contents.known(fingerprint)
        content.computed = {calls[call]: None for call in computed}
        content.passed = {calls[call]: None for call in passed}
        content.array = _widened(read(key)) if key else None
        contents.append(content)
    for call, side, name, which, dtype, shape in run.tensors:
        tensor = contents[which]
        if tensor.array is None or tensor.array.size != prod(shape):
            raise ValueError(f"the tensor {name} is kept with another size, or not at all")
        place = TensorPlace(calls[call], "inputs" if side == "inputs" else "outputs", name)
        trace.tensors.append(SeenTensor(place, tensor, dtype, tuple(shape)))
    trace.choices = [
        Choice(_widened(read(f"{_CHOICES}{number}/scores")), read(f"{_CHOICES}{number}/indices"))
        for number in range(run.choices)
    ]
    trace.random_numbers = [(calls[call], _widened(read(f"{_DRAWN}{number}"))) for number, call in enumerate(run.drawn)]
    return trace


def _widened(array: Any) -> Any:
    return array if array.dtype.kind in "biu" else array.astype(np.float64)
