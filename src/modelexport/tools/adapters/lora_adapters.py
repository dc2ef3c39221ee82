"""LoRA adapters put into a tagged file: merged into its weights, or as inputs that can be given at each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelexport.core.text import short_repr
from modelexport.errors import UsageError, WeightsError
from modelexport.files.path_or_model import Source, as_path
from modelexport.graph.bound_tensors import bind_tensors
from modelexport.regions import Sharing
from modelexport.regions.shared_files import save_edited
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tools.adapters.adapted_file import AdaptedFile
from modelexport.tools.adapters.onnx_adapter_files import ADAPTER_SUFFIX, write_adapter_file
from modelexport.tools.adapters.peft_adapters import changes


class MergedAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """A file with adapters in its weights."""

    __repr__ = short_repr

    path: str
    adapters: list[str]
    pairs: int
    """Low-rank pairs that were added to weights."""
    whole: int
    """Entries that an adapter replaced."""
    initializers: int
    """Initializers with new values."""
    unused: list[str]
    """Entries that an adapter changes and no output of the file depends on."""
    untied: list[str]
    """Entries that shared a tensor with another module, which keeps the old one."""
    weights: list[str]
    """Files with weights beside it."""


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as ONNX Runtime takes it."""

    path: str
    adapter: str
    inputs: int
    bytes: int


class AdapterInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A file that takes adapters as optional inputs."""

    __repr__ = short_repr

    path: str
    pairs: int
    """Weights that get a low-rank pair."""
    whole: list[str]
    """Initializers that can be replaced whole, because no operator is known that would take a pair."""
    nodes: int
    """Nodes that were added."""
    inputs: list[str]
    """The optional inputs; without an adapter the file computes what it did."""
    unused: list[str]
    adapters: list[AdapterFile]
    weights: list[str]


def merge_adapters(
    path: Source,
    adapters: Sequence[str | Path],
    output: str | Path,
    *,
    weights: str | Path | None = None,
    sharing: Sharing = "auto",
) -> MergedAdapters:
    """Write a tagged file with LoRA adapters added to its weights, one after the other.

    Weights that do not change stay where they are. Where an adapter changes one name of a tied parameter, the other
    modules keep the old tensor.

    Args:
        adapters: Folders that PEFT wrote.
        weights: The entries to start from; those in the file if left out.

    Raises:
        WeightsError: An adapter is for another model or of another kind, or an entry cannot be computed from the file.
        FileFormatError: A file is missing or damaged.
        OutputError: ``output`` cannot be written. What was there before is still there.
    """
    path, output = as_path(path), Path(output)
    work = AdaptedFile(path, adapters, output, weights)
    if grouped := [key for key, pairs in work.changes.pairs.items() if any(pair.groups > 1 for pair in pairs)]:
        raise WeightsError(
            f"{grouped[0]} is the weight of a convolution in groups, to which a pair cannot be added: use --as-inputs"
        )
    facts = work.tagged.facts()
    untied = work.untie()
    tensors = {value: work.tensor(value) for value in work.touched}
    if weights is not None:
        tensors |= {value: work.tensor(value) for value in work.plans if value not in tensors}
    bind_tensors(tensors)
    with checked_and_written(output.parent, [path]) as staging:
        files = save_edited(work.tagged, facts, output, staging, sharing)
    return MergedAdapters(
        path=str(output),
        adapters=[str(adapter.path) for adapter in work.changes.adapters],
        pairs=sum(map(len, work.changes.pairs.values())),
        whole=len(work.changes.whole),
        initializers=len(tensors),
        unused=work.unused,
        untied=untied,
        weights=files,
    )


def adapters_as_inputs(
    path: Source, adapters: Sequence[str | Path], output: str | Path, *, sharing: Sharing = "auto"
) -> AdapterInputs:
    """Write a tagged file that takes LoRA adapters as optional inputs, and each adapter as a file beside it.

    Each weight that an adapter changes gets a low-rank pair of any rank; without one, the file computes what it did.
    The adapter ``french`` becomes ``NAME.french.onnx_adapter``; :func:`write_adapter` makes more of them for the file.

    Args:
        adapters: Folders that PEFT wrote.

    Raises:
        WeightsError: An adapter is for another model or of another kind.
        FileFormatError: A file is missing or damaged.
        OutputError: ``output`` cannot be written. What was there before is still there.
    """
    path, output = as_path(path), Path(output)
    work = AdaptedFile(path, adapters, output, None, merged=False)
    names = [f"{output.stem}.{adapter.name}{ADAPTER_SUFFIX}" for adapter in work.changes.adapters]
    if len(set(names)) < len(names):
        raise UsageError("two of the adapters are folders of the same name: give one at a time, or rename a folder")
    facts = work.tagged.facts()
    work.untie()
    added, whole, pairs = work.make_inputs()
    files = [work.values(changes(work.path, work.entries, [adapter])) for adapter in work.changes.adapters]
    inputs = [value.name or "" for value in work.inputs]
    with checked_and_written(output.parent, [path]) as staging:
        written = save_edited(work.tagged, facts and facts.moved(added.moved), output, staging, sharing)
        sizes = [write_adapter_file(values, staging / name) for values, name in zip(files, names, strict=True)]
    return AdapterInputs(
        path=str(output),
        pairs=pairs,
        whole=whole,
        nodes=added.added,
        inputs=inputs,
        unused=work.unused,
        adapters=[
            AdapterFile(path=str(output.parent / name), adapter=str(adapter.path), inputs=len(values), bytes=size)
            for name, adapter, values, size in zip(names, work.changes.adapters, files, sizes, strict=True)
        ],
        weights=written,
    )


def write_adapter(path: Source, adapter: str | Path, output: str | Path) -> AdapterFile:
    """Write a LoRA adapter for a file that takes adapters as inputs.

    Args:
        path: What :func:`adapters_as_inputs` wrote.
        adapter: A folder that PEFT wrote.
        output: A file that ends in ``.onnx_adapter``.

    Raises:
        WeightsError: The adapter is for another model, or changes a module for which the file has no inputs.
        FileFormatError: A file is missing or damaged.
        OutputError: ``output`` cannot be written.
    """
    path, output = as_path(path), Path(output)
    work = AdaptedFile(path, [adapter], output, None, merged=False)
    values = work.values(work.changes)
    with checked_and_written(output.parent) as staging:
        size = write_adapter_file(values, staging / output.name)
    return AdapterFile(path=str(output), adapter=str(adapter), inputs=len(values), bytes=size)
