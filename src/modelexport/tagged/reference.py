"""``NAME.reference.safetensors``: the values of a PyTorch run, stored to verify the file beside it without PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from modelexport.core.calls import ModuleCall
from modelexport.core.decoding import decode_json
from modelexport.errors import FileFormatError, OutputError, WeightsError
from modelexport.files.safetensors_files import Place, encode_header, read_header
from modelexport.format import documents, keys
from modelexport.format.dtypes import SAFETENSORS_NAMES, dtype_name, parse_dtype
from modelexport.graph.nodes import required_inputs
from modelexport.graph.requested import requested_outputs
from modelexport.runtime.choices import Choice
from modelexport.runtime.evidence import Computed, Decision, Evidence, RandomPart, SeenTensor
from modelexport.runtime.fingerprints import Fingerprint
from modelexport.tagged.file import TaggedFile

_TYPES = [name for name, code in SAFETENSORS_NAMES.items() if not code.startswith("F8_")]
"""Element types that safetensors reads into NumPy; widest first, so that every tensor is aligned in the file."""

_INPUTS, _VALUES, _TENSORS = "inputs/", "values/", "tensors/"
_MODULES, _OUTPUTS, _WEIGHTS, _KEYS, _RUN = "modules", "outputs", "weights", "keys", "run"


class _Kept(NamedTuple):
    """A tensor to write; it is read when it is written."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Any]

    @classmethod
    def of(cls, array: Any) -> _Kept:
        return cls(str(array.dtype), tuple(array.shape), lambda: array)


def reference_path(path: Path) -> Path:
    """The path of the reference values of a file."""
    return path.with_suffix(keys.REFERENCE_SUFFIX)


@dataclass(frozen=True)
class ReferenceValues:
    """The PyTorch run in the reference values of a file; one tensor is read at a time."""

    inputs: Mapping[str, Any]
    """Name of an input of the file to its array."""
    outputs: Sequence[Any]
    """The tensors that the model returned, in order."""
    modules: Sequence[ModuleCall]
    """The calls whose values are stored; empty if all are."""
    available: Collection[str]
    """Names of the values of the file that are stored."""
    read: Callable[[str], Any]
    """The name of a value to its array."""
    tensors: Sequence[SeenTensor]
    computed: Sequence[Computed]
    choices: Sequence[Choice]
    parents: Mapping[ModuleCall, ModuleCall | None]
    weights: Mapping[str, str]
    """Initializers, by the entries that they come from, to digests of their bytes."""
    keys: Mapping[str, str]
    """Content of a tensor to its place in the file."""
    read_key: Callable[[str], Any]

    def array(self, content: str) -> Any:
        return self.read_key(self.keys[content]).reshape(-1)

    @property
    def quiet(self) -> Sequence[Computed]:
        return ()

    @property
    def decisions(self) -> Sequence[Decision]:
        return ()

    @property
    def random(self) -> RandomPart:
        return RandomPart()

    def in_float64(self, given: Collection[str] = ()) -> None:
        """``None``: rounding was not measured when the values were stored."""
        return

    def rounded_otherwise(self, given: Collection[str] = ()) -> None:
        """``None`` likewise."""
        return


class _Run(msgspec.Struct, frozen=True, array_like=True):
    """The description of a run, without its arrays."""

    calls: list[tuple[str, int]]
    """Address, and the index of the call that it ran in; -1 for the root."""
    tensors: list[tuple[int, str, str, str, str, list[int]]]
    """Call, side, name, content, element type, shape."""
    computed: list[tuple[int, str, int, float, float, float, bool, bool]]
    """Call and the fingerprint of an operation's result, and whether the result was new."""
    choices: list[tuple[int, str, list[int], str, list[int]]] = []
    """Call, scores, and the indices chosen from them: contents and shapes."""
    results: list[int] = []
    """The places in ``computed`` of the results of branches and loops."""


def write_reference(
    path: Path,
    tagged: TaggedFile,
    run: Evidence,
    *,
    inputs: Mapping[str, Any],
    weights: Mapping[str, str],
    modules: Sequence[ModuleCall] = (),
    sidecar: documents.Hierarchy | None = None,
    announce: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the reference values of a file, the same bytes for the same values.

    Args:
        path: The file to write; it should not exist yet.
        run: The PyTorch run.
        inputs: Name of an input of the file to its array.
        weights: Digests of the file's parameters, so that values of another file are refused.
        modules: The calls whose values to store, with those inside them; all if empty.
        sidecar: The sidecar, for the names of values in the file.
        announce: Called with the size in bytes before anything is written.

    Raises:
        OutputError: There is not enough space on the disk.
    """
    seen = [t for t in run.tensors if not modules or _is_inside(t.call, set(modules), run.parents)]
    requested = requested_outputs(tagged.model.metadata_props, run.outputs)
    outputs = _output_names(tagged, len(requested))
    found = {f"{_INPUTS}{name}": _Kept.of(array) for name, array in inputs.items()}
    found |= {f"{_VALUES}{name}": _Kept.of(array) for name, array in zip(outputs, requested, strict=True)}
    where = _add_boundaries(found, seen, run, _names(sidecar, tagged))
    for choice in () if modules else run.choices:
        for content, shape in ((choice.scores, choice.scores_shape), (choice.indices, choice.indices_shape)):
            if content not in where:
                where[content] = f"{_TENSORS}{content}"
                found[where[content]] = _Kept(content.partition(":")[0], shape, partial(run.array, content))
    arrays = {key: kept for dtype in _TYPES for key, kept in found.items() if kept.dtype == dtype}
    header = encode_header(
        {key: (kept.dtype, kept.shape) for key, kept in arrays.items()},
        {
            keys.FORMAT_VERSION_KEY: keys.FORMAT_VERSION,
            _OUTPUTS: json.dumps(outputs),
            _MODULES: json.dumps([call.address for call in modules]),
            _WEIGHTS: json.dumps(dict(weights)),
            _KEYS: json.dumps({content: key for content, key in where.items() if key in arrays}),
            _RUN: msgspec.json.encode(
                _as_data(run, seen, {content for content, key in where.items() if key in arrays})
            ).decode(),
        },
    )
    total = len(header) + sum(_nbytes(kept) for kept in arrays.values())
    announce(total)
    if total > (free := shutil.disk_usage(path.parent).free):
        raise OutputError(
            f"the reference values need {total:,} bytes and {path.parent} has {free:,}: choose fewer modules"
        )
    with path.open("wb") as file:
        file.write(header)
        for kept in arrays.values():
            file.write(np.ascontiguousarray(kept.read()).tobytes())


def _output_names(tagged: TaggedFile, count: int) -> list[str]:
    """Names for the model's outputs: those of the file's outputs, as far as there are any."""
    names = [value.name or "" for value in tagged.model.graph.outputs]
    names += [f"output {i}" for i in range(len(names), count)]
    return names[:count]


def _add_boundaries(
    arrays: dict[str, _Kept], seen: Sequence[SeenTensor], run: Evidence, values: Mapping[tuple[str, str, str], str]
) -> dict[str, str]:
    """Add the tensors at boundaries, each content once, by each name that it has in the file.

    Returns:
        Content of a tensor to where it lies.
    """
    where: dict[str, str] = {}
    for tensor in seen:
        name = values.get((tensor.call.address, tensor.side, tensor.name), "")
        key = f"{_VALUES}{name}" if name else f"{_TENSORS}{tensor.content}"
        if not name and tensor.content in where:
            continue
        where.setdefault(tensor.content, key)
        arrays.setdefault(key, _Kept(tensor.dtype, tensor.shape, partial(run.array, tensor.content)))
    return where


def _nbytes(kept: _Kept) -> int:
    return int(parse_dtype(kept.dtype).itemsize * prod(kept.shape))


def _in(where: Mapping[str, str], known: Collection[str]) -> set[str]:
    """The contents that the file has."""
    return {content for content, key in where.items() if key in known}


def _is_inside(call: ModuleCall, chosen: set[ModuleCall], parents: Mapping[ModuleCall, ModuleCall | None]) -> bool:
    around: ModuleCall | None = call
    while around is not None:
        if around in chosen:
            return True
        around = parents[around]
    return False


def _names(sidecar: documents.Hierarchy | None, tagged: TaggedFile) -> dict[tuple[str, str, str], str]:
    """Call, side and name of a tensor to its value in the main graph, as recorded in the sidecar."""
    made = {value.name for node in tagged.model.graph for value in node.outputs}
    return {
        (call.address, side, tensor.name): tensor.value
        for call in (sidecar.calls if sidecar is not None else ())
        for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs))
        for tensor in tensors
        if tensor.value is not None and tensor.value in made
    }


def _as_data(run: Evidence, tensors: Sequence[SeenTensor], contents: set[str]) -> _Run:
    numbers = {call: index for index, call in enumerate(run.parents)}
    choices = [c for c in run.choices if {c.scores, c.indices} <= contents]
    return _Run(
        [(call.address, -1 if parent is None else numbers[parent]) for call, parent in run.parents.items()],
        [
            (numbers[t.call], t.side, t.name, t.content, t.dtype, list(t.shape))
            for t in tensors
            if t.content in contents
        ],
        [(numbers[c.call], *c.fingerprint, c.new) for c in run.computed],
        [(numbers[c.call], c.scores, list(c.scores_shape), c.indices, list(c.indices_shape)) for c in choices],
        [place for place, one in enumerate(run.computed) if one.chosen],
    )


@contextmanager
def open_reference(tagged: TaggedFile) -> Iterator[ReferenceValues]:
    """Open the reference values beside a file.

    Raises:
        FileFormatError: They are missing or damaged, or belong to another file.
    """
    path = reference_path(tagged.path)
    if not path.is_file():
        raise FileFormatError(
            f"there is no {path} to verify {tagged.path} with: give the model with --model, another file with "
            f"--against, or export with --reference"
        )
    stored = _read_stored(path)
    run, calls = stored.run, stored.calls
    results = set(run.results)
    with stored.opened as file:
        names = [value.name for value in required_inputs(tagged.model)]
        kept = [key.removeprefix(_INPUTS) for key in stored.places if key.startswith(_INPUTS)]
        if set(kept) != set(names) or any(call not in tagged.calls for call in stored.chosen):
            raise FileFormatError(
                f"{path} does not belong to {tagged.path}: inputs or modules differ; export with --reference"
            )
        yield ReferenceValues(
            inputs={name: file.get_tensor(f"{_INPUTS}{name}") for name in kept},
            outputs=[file.get_tensor(f"{_VALUES}{name}") for name in stored.outputs],
            modules=stored.chosen,
            available={key.removeprefix(_VALUES) for key in stored.places if key.startswith(_VALUES)},
            read=lambda name: file.get_tensor(f"{_VALUES}{name}"),
            tensors=stored.tensors,
            computed=[
                Computed(calls[call], Fingerprint(kind, size, norm, one, two, telling), new, place in results)
                for place, (call, kind, size, norm, one, two, telling, new) in enumerate(run.computed)
            ],
            choices=[
                Choice(calls[call], scores, tuple(shape), indices, tuple(chosen))
                for call, scores, shape, indices, chosen in run.choices
            ],
            parents={
                call: None if above < 0 else calls[above] for call, (_, above) in zip(calls, run.calls, strict=True)
            },
            weights=stored.weights,
            keys=stored.contents,
            read_key=file.get_tensor,
        )


@dataclass(frozen=True)
class _Stored:
    """The parts of a file of reference values."""

    opened: Any
    places: Mapping[str, Place]
    outputs: list[str]
    chosen: list[ModuleCall]
    run: _Run
    calls: list[ModuleCall]
    tensors: list[SeenTensor]
    contents: dict[str, str]
    weights: dict[str, str]


def _read_stored(path: Path) -> _Stored:
    """Read all but the values.

    Raises:
        FileFormatError: They are damaged, or of a format version that cannot be read.
    """
    import ml_dtypes  # noqa: F401 - adds to NumPy the bfloat16 that safetensors needs
    from safetensors import SafetensorError, safe_open

    try:
        places = read_header(path).tensors
        opened = safe_open(path, framework="numpy")
        metadata = opened.metadata() or {}  # type: ignore[no-untyped-call]  # safetensors has no annotation here
        version = metadata.get(keys.FORMAT_VERSION_KEY)
        if version not in keys.READ_VERSIONS or _RUN not in metadata:
            raise FileFormatError(
                f"{path} has the format version {version}, which this version cannot read: export again"
            )
        outputs, modules = (decode_json(metadata[key], kind=list[str]) for key in (_OUTPUTS, _MODULES))
        run = decode_json(metadata[_RUN], kind=_Run)
        contents, weights = (decode_json(metadata[key], kind=dict[str, str]) for key in (_KEYS, _WEIGHTS))
        _check_complete(run, outputs, contents, places)
        calls = [ModuleCall.parse(address) for address, _ in run.calls]
        chosen = [ModuleCall.parse(address) for address in modules]
        tensors = [
            SeenTensor(calls[call], "inputs" if side == "inputs" else "outputs", name, content, dtype, tuple(shape))
            for call, side, name, content, dtype, shape in run.tensors
        ]
        if len(set(calls)) != len(calls):
            raise ValueError("it lists a call twice")
    except (SafetensorError, WeightsError, OSError, LookupError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is damaged ({error}): export again with --reference") from error
    return _Stored(opened, places, outputs, chosen, run, calls, tensors, contents, weights)


def _check_complete(
    run: _Run, outputs: Sequence[str], contents: Mapping[str, str], places: Mapping[str, Place]
) -> None:
    """Look whether all tensors that the run speaks of are kept, and calls lie in calls that began before.

    Raises:
        ValueError: They are not, or do not.
    """
    needed = [*(f"{_VALUES}{name}" for name in outputs), *contents.values()]
    if missing := next((key for key in needed if key not in places), None):
        raise ValueError(f"there is no tensor {missing}")
    for call, _, name, content, dtype, shape in run.tensors:
        if not 0 <= call < len(run.calls) or content not in contents:
            raise ValueError(f"the tensor {name} has no call, or no content")
        place = places[contents[content]]
        if dtype_name(place.dtype) != dtype or prod(place.shape) != prod(shape):
            raise ValueError(f"the tensor {name} is kept with another type or size")
    if any(not 0 <= call < len(run.calls) for call, *_ in run.computed):
        raise ValueError("an operation has no call")
    if any(not -1 <= above < number for number, (_, above) in enumerate(run.calls)):
        raise ValueError("a call runs in one that began after it")
