"""``NAME.reference.safetensors``: the values of a PyTorch run beside a file, which prove it without PyTorch."""

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
from modelexport.core.limits import BATCH_BYTES
from modelexport.errors import FileFormatError, InputsError, OutputError
from modelexport.files.regular import file_digest
from modelexport.files.safetensors_files import encode_header
from modelexport.format import keys
from modelexport.format.call_tree import parse_call
from modelexport.format.dtypes import SAFETENSORS_NAMES, parse_dtype
from modelexport.runtime.sessions import split_batches
from modelexport.tagged.file import TaggedFile

_TYPES = [name for name in SAFETENSORS_NAMES if not name.startswith("float8")]
"""The element types of values that are kept, widest first, so that every tensor is aligned in the file. The reader of
safetensors for NumPy does not read those of eight bits."""

_INPUTS, _VALUES = "inputs/", "values/"
_MODULES, _OUTPUTS = "modules", "outputs"

TypeAndShape = tuple[str, tuple[int, ...]]


def reference_path(path: Path) -> Path:
    """Where the reference values of a file lie."""
    return path.with_suffix(".reference.safetensors")


@dataclass(frozen=True)
class ReferenceValues:
    """The reference values of a file, of which one tensor at a time is read: a reference for ``verify_calls``."""

    inputs: Mapping[str, Any]
    """Name of an input of the file to its array."""
    outputs: Sequence[str]
    """The names under which the model's outputs are kept, in order."""
    modules: Sequence[ModuleCall]
    """The calls whose values are kept; none where all are."""
    available: Collection[str]
    read: Callable[[str], Any]
    """The name of a value to its array."""

    def __call__(self, names: Collection[str]) -> dict[str, Any]:
        return {name: self.read(name) for name in names}


def write_reference(
    path: Path,
    *,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    values: Mapping[str, TypeAndShape],
    read: Callable[[Collection[str]], Mapping[str, Any]],
    modules: Sequence[ModuleCall] = (),
    announce: Callable[[int], None] = lambda size: None,
    batch_bytes: int = BATCH_BYTES,
    model_digest: str = "",
) -> None:
    """Write the reference values of a file, the same bytes for the same values.

    Args:
        path: The file to write; it should not be there yet.
        inputs: Name of an input of the file to its array.
        outputs: Name to what the model returns, in order.
        values: Name of a boundary value to its element type and shape.
        read: Gives the arrays of some of these; asked for at most ``batch_bytes`` at a time.
        modules: The calls whose values these are; none for all.
        announce: Told the size in bytes before anything is computed or written.
        model_digest: The SHA-256 of the model that they belong to.

    Raises:
        InputsError: ``read`` gives other types or shapes than announced: the model does not repeat itself.
        OutputError: The disk has no room for it.
    """
    held = {f"{_INPUTS}{name}": array for name, array in inputs.items()}
    held |= {f"{_VALUES}{name}": array for name, array in outputs.items()}
    tensors = {key: (str(array.dtype), tuple(array.shape)) for key, array in held.items()}
    tensors |= {f"{_VALUES}{name}": kind for name, kind in values.items() if f"{_VALUES}{name}" not in held}
    known = {key: tensors[key] for key in tensors if tensors[key][0] in _TYPES}
    known = dict(sorted(known.items(), key=lambda one: _TYPES.index(one[1][0])))
    sizes = {key: int(parse_dtype(dtype).itemsize * prod(shape)) for key, (dtype, shape) in known.items()}
    metadata = {
        keys.FORMAT_VERSION_KEY: keys.FORMAT_VERSION,
        keys.MODEL_DIGEST: model_digest,
        _OUTPUTS: json.dumps([*outputs]),
        _MODULES: json.dumps([call.address for call in modules]),
    }
    header = encode_header(known, metadata)
    total = len(header) + sum(sizes.values())
    announce(total)
    if total > (free := shutil.disk_usage(path.parent).free):
        raise OutputError(
            f"the reference values need {total:,} bytes and {path.parent} has {free:,}: choose fewer modules"
        )
    with path.open("wb") as file:
        file.write(header)
        for batch in split_batches(sizes, batch_bytes):
            missing = {key.removeprefix(_VALUES) for key in batch if key not in held}
            found = read(missing) if missing else {}
            for key in batch:
                array = held[key] if key in held else found.get(key.removeprefix(_VALUES))
                if array is None or (str(array.dtype), tuple(array.shape)) != known[key]:
                    raise InputsError(f"the model computes {key} otherwise in a second run: its values cannot be kept")
                file.write(np.ascontiguousarray(array).tobytes())


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
        if version not in keys.READ_VERSIONS:
            raise FileFormatError(
                f"{path} has the format version {version}, which this version cannot read: export again"
            )
        outputs = msgspec.json.decode(metadata[_OUTPUTS], type=list[str])
        modules = msgspec.json.decode(metadata[_MODULES], type=list[str])
        calls = [parse_call(address) for address in modules]
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged ({error}): export again with --reference") from error
    if metadata.get(keys.MODEL_DIGEST) not in (None, "", file_digest(tagged.path)):
        raise FileFormatError(f"{path} is of another export than {tagged.path}: export with --reference")
    with opened as file:
        stored = list(file.keys())
        names = [value.name for value in tagged.model.graph.inputs]
        kept = [key.removeprefix(_INPUTS) for key in stored if key.startswith(_INPUTS)]
        if set(kept) != set(names) or any(call not in tagged.calls for call in calls):
            raise FileFormatError(f"{path} is not of {tagged.path}: inputs or modules differ; export with --reference")
        yield ReferenceValues(
            inputs={name: file.get_tensor(f"{_INPUTS}{name}") for name in kept},
            outputs=outputs,
            modules=calls,
            available={key.removeprefix(_VALUES) for key in stored if key.startswith(_VALUES)},
            read=lambda name: file.get_tensor(f"{_VALUES}{name}"),
        )
