"""``NAME.reference.safetensors``: the values of a PyTorch run beside a file, which prove it without PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelexport.core.calls import ModuleCall
from modelexport.errors import FileFormatError, OutputError
from modelexport.format import documents, keys
from modelexport.runtime.choices import Choice
from modelexport.runtime.evidence import Computed, Evidence, SeenTensor
from modelexport.runtime.fingerprints import Fingerprint
from modelexport.tagged.file import TaggedFile

_TYPES = {
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""NumPy's name of an element type to that of safetensors; widest first, so that every tensor is aligned in the file."""

_INPUTS, _VALUES, _TENSORS = "inputs/", "values/", "tensors/"
_MODULES, _OUTPUTS, _WEIGHTS, _KEYS, _RUN = "modules", "outputs", "weights", "keys", "run"

TypeAndShape = tuple[str, tuple[int, ...]]


def reference_path(path: Path) -> Path:
    """Where the reference values of a file lie."""
    return path.with_suffix(".reference.safetensors")


@dataclass(frozen=True)
class ReferenceValues:
    """The PyTorch run that the reference values of a file keep; one tensor at a time is read."""

    inputs: Mapping[str, Any]
    """Name of an input of the file to its array."""
    outputs: Sequence[Any]
    """What the model returned, in order."""
    modules: Sequence[ModuleCall]
    """The calls whose values are kept; none where all are."""
    available: Collection[str]
    """Names of the values of the file that are kept."""
    read: Callable[[str], Any]
    """The name of a value to its array."""
    tensors: Sequence[SeenTensor]
    computed: Sequence[Computed]
    choices: Sequence[Choice]
    parents: Mapping[ModuleCall, ModuleCall | None]
    weights: Mapping[str, str]
    """Initializers, by the entries that they come from, to digests of their bytes."""
    keys: Mapping[str, str]
    """Content of a tensor to where it lies in the file."""
    read_key: Callable[[str], Any]

    def array(self, content: str) -> Any:
        return self.read_key(self.keys[content]).reshape(-1)

    def in_float64(self, *, from_right_values: bool) -> None:
        """Rounding was not measured when the values were kept."""
        return


class _Run(msgspec.Struct, frozen=True, array_like=True):
    """The part of a run that is no numbers."""

    calls: list[tuple[str, int]]
    """Address, and the index of the call around it; -1 for the root."""
    tensors: list[tuple[int, str, str, str, str, list[int]]]
    """Call, side, name, content, element type, shape."""
    computed: list[tuple[int, str, int, float, float, float, bool, bool]]
    """Call and the fingerprint of what an operation gave, and whether that was new."""
    choices: list[tuple[int, str, list[int], str, list[int]]] = []
    """Call, what was chosen from, and what was chosen: contents and shapes."""


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
        path: The file to write; it should not be there yet.
        run: The PyTorch run.
        inputs: Name of an input of the file to its array.
        weights: Digests of the file's parameters, so that another file's values are refused.
        modules: The calls whose values to keep, with those inside them; none for all.
        sidecar: For the names that values have in the file.
        announce: Told the size in bytes before anything is written.

    Raises:
        OutputError: The disk has no room for it.
    """
    kept = [t for t in run.tensors if not modules or _is_inside(t.call, set(modules), run.parents)]
    names = [value.name or "" for value in tagged.model.graph.outputs]
    names += [f"output {i}" for i in range(len(names), len(run.outputs))]
    arrays: dict[str, tuple[TypeAndShape, Callable[[], Any]]] = {}

    def hold(key: str, array: Any) -> None:
        arrays[key] = ((str(array.dtype), tuple(array.shape)), lambda: array)

    for name, array in inputs.items():
        hold(f"{_INPUTS}{name}", array)
    for name, array in zip(names, run.outputs, strict=False):
        hold(f"{_VALUES}{name}", array)
    where: dict[str, str] = {}
    named = _names(sidecar, tagged)
    for tensor in kept:
        name = named.get((tensor.call.address, tensor.side, tensor.name), "")
        key = f"{_VALUES}{name}" if name else f"{_TENSORS}{tensor.content}"
        if not name and tensor.content in where:
            continue
        where.setdefault(tensor.content, key)
        arrays.setdefault(key, ((tensor.dtype, tensor.shape), partial(run.array, tensor.content)))
    for choice in run.choices:
        for content, shape in ((choice.scores, choice.scores_shape), (choice.indices, choice.indices_shape)):
            if not modules and content not in where:
                where[content] = key = f"{_TENSORS}{content}"
                arrays[key] = ((content.partition(":")[0], shape), partial(run.array, content))
    known = {key: one for key, one in arrays.items() if one[0][0] in _TYPES}
    order = list(_TYPES)
    known = dict(sorted(known.items(), key=lambda one: order.index(one[1][0][0])))
    sizes = {key: _width(dtype) * prod(shape) for key, ((dtype, shape), _) in known.items()}
    metadata = {
        keys.FORMAT_VERSION_KEY: keys.FORMAT_VERSION,
        _OUTPUTS: json.dumps(names[: len(run.outputs)]),
        _MODULES: json.dumps([call.address for call in modules]),
        _WEIGHTS: json.dumps(dict(weights)),
        _KEYS: json.dumps({content: key for content, key in where.items() if key in known}),
        _RUN: msgspec.json.encode(_as_data(run, kept, _in(where, known))).decode(),
    }
    header = _header(metadata, {key: kind for key, (kind, _) in known.items()}, sizes)
    total = len(header) + sum(sizes.values())
    announce(total)
    if total > (free := shutil.disk_usage(path.parent).free):
        raise OutputError(
            f"the reference values need {total:,} bytes and {path.parent} has {free:,}: choose fewer modules"
        )
    with path.open("wb") as file:
        file.write(header)
        for _, read in known.values():
            file.write(np.ascontiguousarray(read()).tobytes())


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
    """Call, side and name of a tensor to the value of the main graph that the sidecar says it is."""
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
    )


def _header(metadata: Mapping[str, str], tensors: Mapping[str, TypeAndShape], sizes: Mapping[str, int]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key, (dtype, shape) in tensors.items():
        begin, end = end, end + sizes[key]
        entries[key] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _width(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@contextmanager
def open_reference(tagged: TaggedFile) -> Iterator[ReferenceValues]:
    """The reference values beside a file.

    Raises:
        FileFormatError: They are missing or damaged, or of another file.
    """
    import ml_dtypes  # noqa: F401 - gives NumPy the bfloat16 that safetensors asks it for
    from safetensors import SafetensorError, safe_open

    path = reference_path(tagged.path)
    if not path.is_file():
        raise FileFormatError(
            f"there is no {path} to verify {tagged.path} with: give the model with --model, another file with "
            f"--against, or export with --reference"
        )
    try:
        opened = safe_open(path, framework="numpy")
        # safetensors has no annotations here.
        metadata = opened.metadata() or {}  # type: ignore[no-untyped-call]
        version = metadata.get(keys.FORMAT_VERSION_KEY)
        if version not in keys.READ_VERSIONS or _RUN not in metadata:
            raise FileFormatError(
                f"{path} has the format version {version}, which this version cannot read: export again"
            )
        outputs, modules = json.loads(metadata[_OUTPUTS]), json.loads(metadata[_MODULES])
        run = msgspec.json.decode(metadata[_RUN], type=_Run)
        contents, weights = json.loads(metadata[_KEYS]), json.loads(metadata[_WEIGHTS])
        calls = [ModuleCall.parse(address) for address, _ in run.calls]
        tensors = [
            SeenTensor(calls[call], "inputs" if side == "inputs" else "outputs", name, content, dtype, tuple(shape))
            for call, side, name, content, dtype, shape in run.tensors
        ]
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged ({error}): export again with --reference") from error
    with opened as file:
        stored = list(file.keys())
        names = [value.name for value in tagged.model.graph.inputs]
        kept = [key.removeprefix(_INPUTS) for key in stored if key.startswith(_INPUTS)]
        chosen = [ModuleCall.parse(address) for address in modules]
        if set(kept) != set(names) or any(call not in tagged.calls for call in chosen):
            raise FileFormatError(f"{path} is not of {tagged.path}: inputs or modules differ; export with --reference")
        yield ReferenceValues(
            inputs={name: file.get_tensor(f"{_INPUTS}{name}") for name in kept},
            outputs=[file.get_tensor(f"{_VALUES}{name}") for name in outputs],
            modules=chosen,
            available={key.removeprefix(_VALUES) for key in stored if key.startswith(_VALUES)},
            read=lambda name: file.get_tensor(f"{_VALUES}{name}"),
            tensors=tensors,
            computed=[
                Computed(calls[call], Fingerprint(kind, size, norm, one, two, telling), new)
                for call, kind, size, norm, one, two, telling, new in run.computed
            ],
            choices=[
                Choice(calls[call], scores, tuple(shape), indices, tuple(chosen))
                for call, scores, shape, indices, chosen in run.choices
            ],
            parents={
                call: None if above < 0 else calls[above] for call, (_, above) in zip(calls, run.calls, strict=True)
            },
            weights=weights,
            keys=contents,
            read_key=file.get_tensor,
        )
