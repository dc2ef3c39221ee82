"""``update-weights``: new weights of the same shapes for an exported file, without exporting again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from modelexport.core.collected_messages import READING
from modelexport.core.result_display import Written
from modelexport.core.text import first_few, suggest
from modelexport.errors import FileFormatError, WeightsError
from modelexport.files.document_digests import check_document, read_document
from modelexport.files.linked_weights import check_present_weights_files
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.replaceable_files import check_writable
from modelexport.files.safetensors_files import read_header
from modelexport.format import documents, keys
from modelexport.format.dtypes import dtype_name
from modelexport.format.keys import SIDECAR_SUFFIX
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.format.versions import check_version
from modelexport.graph.nodes import initializers
from modelexport.graph.parameter_plans import lost_entries, parameter_plans, record_own_names, state_dict_of
from modelexport.graph.properties import forget_values, format_version, is_tagged, text_of
from modelexport.graph.unique_names import names_of_initializers
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.weights.packed.known_formats import entry_name
from modelexport.weights.recorded_transforms import compute_planned

_EXTRA_STATE = "_extra_state"
"""The last part of the key of what ``nn.Module.get_extra_state`` returns, which need not be a tensor."""
_LISTED = 3
"""How many names of each kind the message has."""


class UpdateResult(Written, msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``update-weights``."""

    path: str
    files: list[str]
    replaced: int
    """Initializers with new values."""
    transformed: int
    """How many of these are computed from an entry instead of being one."""
    kept: int
    """Initializers that do not come from an entry."""
    used: int
    """Entries that were written into the file."""
    unused: int
    """Given entries that the graph does not use."""


def update_weights(
    path: Source, state_dict: Mapping[str, Any] | str | Path, output: str | Path, *, strict: bool = False
) -> UpdateResult:
    """Write a file with other weights and the same graph and tags.

    In a file without tags, the entries are its initializers by their own names; those without a new value stay, and
    entries without an initializer are refused.

    Weights in a file beside the model are written to a file beside the output, one tensor at a time; embedded weights
    stay embedded. The sidecar is copied.

    Args:
        path: The tagged file.
        state_dict: Key to tensor (a NumPy array, a torch tensor, or what has a ``dtype`` and NumPy converts), or a
            ``.safetensors`` file. One of the names of a tied parameter is enough.
        output: The file to write.
        strict: Refuse entries that the module does not have. A checkpoint often holds more than one model uses.

    Raises:
        WeightsError: The weights do not fit: entries are missing, have another shape or type, or are surplus (with
            ``strict``, or if others are missing). Its attributes list them all.
        FileFormatError: ``path`` is not an ONNX file, or the weights are not a safetensors file.
        OutputError: The output cannot be written. An existing file of that name is unchanged.
    """
    path, output = as_path(path), Path(output)
    check_writable(output, [path] if isinstance(state_dict, Mapping) else [path, Path(state_dict)])
    weights = _InMemory(state_dict) if isinstance(state_dict, Mapping) else WeightsInFile(Path(state_dict))
    model = load_onnx(path)
    check_version(path, format_version(model))
    plans, tied, read = planned(path, model, weights, strict)
    values = list(initializers(model))
    tensors = {value: new_tensor(path, value, plan, read) for value, plan in plans.items()}
    if not is_tagged(model):
        forget_values(model)
    external = any(isinstance(value.const_value, ir.ExternalTensor) for value in values)
    sidecar = path.with_suffix(SIDECAR_SUFFIX)
    documents = {}
    try:
        check_document(path, model, SIDECAR_SUFFIX)
        documents = {SIDECAR_SUFFIX: read_document(sidecar)} if sidecar.exists() else {}
    except FileFormatError as error:
        READING.info("not used: %s", error)
    with checked_and_written(output.parent, [path]) as staging:
        target = staging / output.name
        save_model(model, target, external=external, tensors=tensors, same_graph=True)
        for suffix, content in documents.items():
            target.with_suffix(suffix).write_bytes(content)
        files = [str(output.parent / file.name) for file in sorted(staging.iterdir())]
    return UpdateResult(
        path=str(output),
        files=files,
        replaced=len(plans),
        transformed=sum(bool(plan.steps) for plan in plans.values()),
        kept=len(values) - len(plans),
        used=len(tied),
        unused=len(weights.types.keys() - tied.keys()),
    )


class _InMemory:
    """A mapping of tensors."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self.types = {
            key: (str(entry.dtype).removeprefix("torch."), list(entry.shape))
            if hasattr(entry, "dtype")
            else (type(entry).__name__, [])
            for key, entry in tensors.items()
            if key.rpartition(".")[2] != _EXTRA_STATE
        }

    def read(self, key: str) -> np.ndarray:
        tensor = self._tensors[key]
        return ir.tensor(tensor.detach() if hasattr(tensor, "detach") else tensor).numpy()


class WeightsInFile:
    """A safetensors file that is read one tensor at a time."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            wrong = f"{path} is not a file" if path.exists() else f"there is no file {path}"
            raise FileFormatError(f"{wrong}: give the weights as a .safetensors file")
        try:
            self._places = {entry_name(name): place for name, place in read_header(path).tensors.items()}
        except WeightsError as error:
            reason = str(error)
            hint = "" if "save_file" in reason else ", or write it with safetensors.torch.save_file"
            raise FileFormatError(reason + hint) from error
        self.types = {key: (dtype_name(place.dtype), list(place.shape)) for key, place in self._places.items()}

    def read(self, key: str) -> np.ndarray:
        return self._places[key].tensor(key).numpy()


def planned(
    path: Path, model: ir.Model, weights: _InMemory | WeightsInFile, strict: bool = False
) -> tuple[dict[ir.Value, ParameterPlan], dict[str, tuple[str, ...]], Callable[[str], np.ndarray]]:
    """How each initializer is computed, each entry's names, and a function that reads an entry of the new weights."""
    check_present_weights_files(model)  # missing files are allowed: their weights are replaced
    if not is_tagged(model):
        names = names_of_initializers(model)
        record_own_names(model, [value for value, name in names.items() if name in weights.types])
    try:
        entries = state_dict_of(model)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from error
    if not (plans := parameter_plans(model)):
        has = first_few(names_of_initializers(model).values()) or "none"
        raise WeightsError(f"no initializer of {path} has a name in the weights; it has {has}")
    _check_recorded(path, entries, plans, set(lost_entries(model)))
    tied = {key: names for plan in plans.values() for names in plan.groups() for key in names}
    check_placed(path, model, entries, weights)
    check_weights_fit(path, entries, dict.fromkeys(tied.values()).keys(), weights, strict)

    def read(key: str) -> np.ndarray:
        return weights.read(next(name for name in tied[key] if name in weights.types))

    return plans, tied, read


def check_placed(path: Path, model: ir.Model, entries: Collection[str], weights: _InMemory | WeightsInFile) -> None:
    """Refuse entries without an initializer if the entries that a file lists are its initializers, not a module's.

    Such an entry may be computed into an initializer of another name, as a transposed weight is, which would stay old.
    """
    unplaced = [key for key in weights.types if key not in entries]
    if unplaced and (not is_tagged(model) or text_of(model, keys.ADOPTED) is not None):
        raise WeightsError(
            f"{path} has no initializer with the name of {len(unplaced)} of the {len(weights.types)} entries "
            f"({first_few(unplaced, _LISTED)}), and does not record what they became: restore that with "
            f"`modelexport retag {path.name} --from` an export of the model by modelexport, or leave out these entries "
            "if the file does not use them",
            surplus=unplaced,
        )


def _check_recorded(
    path: Path,
    entries: Mapping[str, documents.StateDictEntry],
    plans: Mapping[ir.Value, ParameterPlan],
    told_lost: Collection[str],
) -> None:
    """Refuse a file in which another tool has quantized, packed or folded parameters, or merged them with constants."""
    changed = [value.name or "" for value, plan in plans.items() if not plan.recorded]
    there = {key for plan in plans.values() for key in plan.keys}
    lost = [key for key, entry in entries.items() if entry.used and (key not in there or key in told_lost)]
    if changed or lost:
        lists = {"changed": changed, "lost": lost}
        problems = " and ".join(f"{word} {first_few(names)}" for word, names in lists.items() if names)
        raise WeightsError(
            f"another tool has {problems} in {path}: put the weights into the file that it was made from, with "
            "`modelexport update-weights`, and run the tool on that again",
            missing=[*changed, *lost],
        )


def new_tensor(path: Path, value: ir.Value, plan: ParameterPlan, read: Callable[[str], np.ndarray]) -> ir.LazyTensor:
    """The new tensor of an initializer, computed when it is written."""
    old = value.const_value
    assert old is not None
    dtype, shape = old.dtype, tuple(old.shape.numpy())

    def compute() -> ir.TensorProtocol:
        array = compute_planned(plan, {key: read(key) for key in plan.inputs()})
        if array.dtype != dtype.numpy() or array.shape != shape:
            raise FileFormatError(
                f"{path}: initializer {value.name} is {_type(str(dtype.numpy()), shape)}, but its entries give "
                f"{_type(str(array.dtype), array.shape)}: another tool changed it; export the file again"
            )
        return ir.Tensor(np.asarray(array, order="C"), dtype=dtype)

    return ir.LazyTensor(compute, dtype=dtype, shape=ir.Shape(shape), name=value.name)


def check_weights_fit(
    path: Path,
    entries: Mapping[str, documents.StateDictEntry],
    groups: Collection[tuple[str, ...]],
    weights: _InMemory | WeightsInFile,
    strict: bool = False,
) -> None:
    """Compare keys, shapes and types, and the names of tied parameters with each other."""
    types = weights.types
    missing = [names[0] for names in groups if not any(name in types for name in names)]
    # If entries are missing, surplus ones show a misspelled name.
    surplus = [key for key in types if key not in entries] if strict or missing else []
    misshapen = [
        key
        for key, given_type in types.items()
        if (entry := entries.get(key)) is not None and given_type != (entry.dtype, entry.shape)
    ]
    untied = [] if misshapen else [key for names in groups for key in _differing(names, weights)]
    prefix = _prefix([names for names in groups if names[0] in missing], types)
    lists = {
        "missing": missing,
        "surplus": [
            key if prefix or index >= _LISTED else f"{key}{suggest(key, missing)}" for index, key in enumerate(surplus)
        ],
        "of another shape or type": [
            f"{key}: {_type(*types[key])} instead of {_type(entries[key].dtype, entries[key].shape)}"
            for key in misshapen
        ],
        "tied in the module and different in these weights": untied,
    }
    if any(lists.values()):
        listed = ", and ".join(
            f"{len(keys)} {word} ({first_few(keys, _LISTED)})" for word, keys in lists.items() if keys
        )
        raise WeightsError(
            f"the weights do not fit {path}: {listed}{prefix}; "
            "give the state_dict of a module like the one that was exported",
            missing=missing,
            surplus=surplus,
            misshapen=misshapen,
        )


def _prefix(missing: Sequence[tuple[str, ...]], keys: Collection[str]) -> str:
    """The prefix that the keys have in addition to the missing names, or lack, if one explains all that are missing."""
    first = missing[0] if missing else ()
    for prefix in {key.removesuffix(name) for name in first for key in keys if key.endswith(f".{name}")}:
        if all(any(prefix + name in keys for name in names) for names in missing):
            return f"; all keys have the prefix '{prefix}' in addition"
    for prefix in {name.removesuffix(key) for name in first for key in keys if name.endswith(f".{key}")}:
        if all(any(name.startswith(prefix) and name[len(prefix) :] in keys for name in names) for names in missing):
            return f"; all keys lack the prefix '{prefix}'"
    return ""


def _differing(names: tuple[str, ...], weights: _InMemory | WeightsInFile) -> list[str]:
    """The names of a tied parameter whose tensor differs from that of the first name in the weights."""
    known_names = [name for name in names if name in weights.types]
    if len(known_names) < 2:
        return []
    first = weights.read(known_names[0]).tobytes()
    return [name for name in known_names[1:] if weights.read(name).tobytes() != first]


def _type(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"
