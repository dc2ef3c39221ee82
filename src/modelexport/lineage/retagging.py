"""``retag``: restore the tags of a model that another tool changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import onnx_ir as ir
import onnx_ir.passes.common as passes

from modelexport.core.calls import ModuleCall
from modelexport.core.garbage_collection import only_new_garbage
from modelexport.core.result_display import Written
from modelexport.core.text import shortened
from modelexport.errors import FileFormatError, UntaggedNodeError, UsageError
from modelexport.files.linked_weights import check_weights_files
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.files.path_or_model import Source, as_path
from modelexport.files.replaceable_files import check_writable
from modelexport.format import documents, keys
from modelexport.graph.coverage import count_coverage
from modelexport.graph.inlined_functions import inline_calls
from modelexport.graph.node_owners import owner_of, set_owner
from modelexport.graph.nodes import all_nodes, initializers, inputs_and_results, is_sorted, undefined_values
from modelexport.graph.parameter_plans import (
    lost_entries,
    parameter_plans,
    record_lost,
    record_state_dict,
    state_dict_of,
    used_keys,
)
from modelexport.graph.properties import (
    drop_tag_attributes,
    drop_texts,
    forget_values,
    properties_of,
    put_texts,
    record,
    recorded,
)
from modelexport.graph.snapshot import take_snapshot
from modelexport.graph.unique_names import branches_named_apart, free_name, name_nodes_apart, name_values_apart
from modelexport.lineage.entries_of_changed_files import Inheritance, inherited
from modelexport.lineage.owners_by_matching import Descent, Reason, trace_owners
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged.documents.encoded_documents import documents_after
from modelexport.tagged.documents.export_facts import facts_of_sidecar
from modelexport.tagged.encodings.metadata import drop_foreign_metadata, write_tags
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.traces.array_differences import Difference

RELATED = 0.4
"""The smallest share of its values that a changed file must have in common with the tagged one.

Measured on 330 files (22 models, 15 tools): 0.58 or more; the lowest is a ResNet simplified by onnxsim. Two different
models have up to 0.82 in common (two decoders), so only some wrong files are refused.
"""


_MADE_AGAIN = re.compile(r"gemm_(input|output)_shape(_token_\d+)?")
"""Initializers that ONNX Runtime makes. It cannot load a file that has one where it makes another of the same name."""


class SeveralOwners(msgspec.Struct, frozen=True):
    """A node with several owners that it did not have in the tagged file."""

    name: str
    op_type: str
    calls: list[str]
    """The owners' addresses, the one that produces the output first."""
    reason: Reason


class UnclearInitializer(msgspec.Struct, frozen=True):
    """An initializer whose name does not identify its entries."""

    name: str
    parameter: list[str]
    """All entries that it may come from."""


class RetagReport(Written, msgspec.Struct, frozen=True, kw_only=True):
    """What ``retag`` wrote, and what it could not determine."""

    path: str
    files: list[str]
    coverage: documents.Coverage
    common: int
    """The number of values of the changed file that are values of the tagged one, or variants of them."""
    values: int
    """The number of values of the changed file, with initializers."""
    fused: list[SeveralOwners]
    """Nodes that replace several nodes, of several calls."""
    unclear: list[SeveralOwners]
    """New nodes between nodes of several calls, each of which they may belong to."""
    initializers: list[UnclearInitializer]
    """Initializers that may come from any of several parameters."""
    unrecorded: int
    """Initializers whose entries are known, but not how they are computed from them: quantized, packed or fused."""
    lost: list[str]
    """Entries that the tagged file uses but no initializer of the changed file comes from."""
    gone: list[str]
    """Calls that had nodes in the tagged file and have none now."""
    inlined: bool
    """Whether local functions of the changed file were replaced by their bodies."""
    outputs: list[Difference] | None = None
    """After ``optimize``: how far each output is from the tagged file's; ``None`` if outputs were not compared."""
    tried: list[str] = []
    """The inputs with which outputs were compared, or why they were not."""


@only_new_garbage()
def retag(changed: Source, *, source: Source, output: str | Path) -> RetagReport:
    """Restore the tags of a model that another tool changed.

    The output is a tagged file like an exported one. The documents that are beside ``source`` are written for it, too.
    Local functions are inlined, since calls of different modules share their bodies.

    Args:
        changed: The file that the tool wrote.
        source: The tagged file that the tool read.
        output: The file to write.

    Raises:
        FileFormatError: A file is missing, damaged, or without its weights.
        UsageError: The files are not related; the message gives the number of common values.
        UntaggedNodeError: No owner was found for a node, though all nodes of ``source`` have one. Nothing is written.
        OutputError: The output cannot be written. An existing file of that name is unchanged.
    """
    changed, source, output = as_path(changed), as_path(source), Path(output)
    check_writable(output, [changed, source])
    tagged = read_tagged(source)
    if tagged.found_calls is not None and tagged.found_calls.were_lost:
        raise FileFormatError(
            f"no node of {source} has tags: another tool has dropped them; give the exported file itself"
        )
    check_weights_files(tagged.model)
    model, inlined = _flat(changed, tagged)
    check_weights_files(model)
    return write_retagged(model, tagged, output, changed=changed, inlined=inlined)


def write_retagged(
    model: ir.Model,
    tagged: TaggedFile,
    output: Path,
    *,
    changed: Path | None = None,
    inlined: bool = False,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    save: Callable[[ir.Model, Path, Mapping[str, bytes]], None] | None = None,
    check: bool = True,
    inputs: Mapping[str, Any] | None = None,
) -> RetagReport:
    """Restore the tags of a model in memory that was made from a tagged file, and write it.

    Args:
        model: Changed in place; it has no local functions.
        changed: The file that it was read from, if it may have been made from another one.
        inlined: Whether it had local functions.
        beside: What else is written with it: the end of each name to the content.
        save: Writes the model to a file with its documents, if its weights go elsewhere.
        check, inputs: As :func:`modelexport.runtime.checked_writing.checked_and_replaced` has them.

    Raises:
        As :func:`retag`.
    """
    coverage, descent, inheritance = _restored(model, tagged, changed)
    name_nodes_apart(model)
    there = list(initializers(model))
    names = {value.name for value in there}
    for value in there:
        if _MADE_AGAIN.fullmatch(value.name or ""):
            value.name = free_name(f"kept_{value.name}", names)
    tags, entries = tagged.call_tags, state_dict_of(tagged.model)
    record_state_dict(model, entries)
    still_used = used_keys(model)
    lost = [key for key, entry in entries.items() if entry.used and key not in still_used]
    _carry_over(tagged.model, model)
    drop_foreign_metadata(model)
    write_tags(model, tags)
    if without := [*lost, *inheritance.shared] or lost_entries(tagged.model):
        record_lost(model, without)
    facts = None if tagged.hierarchy is None else facts_of_sidecar(tagged.hierarchy, descent.values)
    documents = documents_after(tagged.path, facts, model, tags, untagged=True)
    reads = [tagged.path] if changed is None else [tagged.path, changed]
    with checked_and_written(output.parent, reads, check=check, inputs=inputs) as staging:
        if save is None:
            save_model(model, staging / output.name, documents=documents)
        else:
            save(model, staging / output.name, documents)
        for suffix, document in {**documents, **beside}.items():
            (staging / output.name).with_suffix(suffix).write_bytes(document)
        files = [str(output.parent / file.name) for file in sorted(staging.iterdir())]
    several = [
        SeveralOwners(node.name or "", node.op_type, [str(call) for call in owner.calls], reason)
        for node, reason in descent.several.items()
        if (owner := owner_of(node)) is not None
    ]
    left = _owners(all_nodes(model))
    return RetagReport(
        path=str(output),
        files=files,
        coverage=coverage,
        common=descent.common,
        values=descent.total,
        fused=[node for node in several if node.reason != "between"],
        unclear=[node for node in several if node.reason == "between"],
        initializers=[UnclearInitializer(name, list(entries)) for name, entries in inheritance.unclear.items()],
        unrecorded=sum(not plan.recorded for plan in parameter_plans(model).values()),
        lost=lost,
        gone=[str(call) for call in _owners(tagged.nodes) if call not in left],
        inlined=inlined,
    )


def with_calls_restored(source: TaggedFile, path: Path) -> TaggedFile | None:
    """A file without tags, with the calls of the file that it was made from; ``None`` if it was not."""
    try:
        model, _ = _flat(path, source)
        coverage, _, _ = _restored(model, source, path)
    except (FileFormatError, UsageError, UntaggedNodeError):
        return None
    record_state_dict(model, state_dict_of(source.model))
    return None if coverage.untagged else TaggedFile(path, model, source.call_tags, encoding="none")


def _restored(
    model: ir.Model, tagged: TaggedFile, changed: Path | None
) -> tuple[documents.Coverage, Descent, Inheritance]:
    """Restore owners and parameters in a model, in place; returns what was found about nodes and initializers.

    Raises:
        UsageError: It was not made from the tagged file.
        UntaggedNodeError: A node has no owner.
    """
    forget_tags(model)
    with branches_named_apart(tagged.model, model):
        before = take_snapshot(tagged.model)
        owners = {node: owner_of(node) for node in all_nodes(model)}
        descent = trace_owners(before, model)
        if None not in owners.values():  # what made it kept them up to date
            for node, owner in owners.items():
                set_owner(node, owner)
        if changed is not None:
            _check_related(changed, tagged, descent)
        coverage, untagged = count_coverage(model)
        if untagged and not tagged.coverage.untagged:
            raise UntaggedNodeError(untagged)
        inheritance = inherited(tagged.model, before, model, descent)
    return coverage, descent, inheritance


_OURS = "modelexport."


def _carry_over(source: ir.Model, model: ir.Model) -> None:
    """Copy the properties of the tagged model to the changed one, if they still hold."""
    others = {key: text for key, text in properties_of(source).items() if not key.startswith(_OURS)}
    put_texts(model, others | properties_of(model))
    for key in (keys.OUTPUTS, keys.EXPOSED, keys.REPLACED, keys.CUT_FROM, keys.VALID_IF, keys.ADOPTED):
        record(model, key, recorded(source, key))


def _flat(path: Path, tagged: TaggedFile) -> tuple[ir.Model, bool]:
    """The changed model, with local functions inlined and without tags that the tool kept."""
    model = load_onnx(path, ours=False)  # properties that the tool kept may no longer hold
    called = {node.op_identifier() for node in all_nodes(model)} - model.functions.keys()
    if any(domain for domain, *_ in called) and (lost := called & load_onnx(tagged.path).functions.keys()):
        raise FileFormatError(f"{path} is damaged: it calls {min(lost)[1]}, a function that the tool lost")
    inlined = bool(model.functions)
    if inlined:
        _forget_names(model)
        inline_calls(model, name=str(path))
        passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # onnx_ir has no annotation here
        passes.RemoveUnusedOpsetsPass()(model)
    try:
        if not is_sorted(model.graph):  # some tools append new nodes at the end
            model.graph.sort()
    except ValueError as error:
        raise FileFormatError(f"{path} is damaged: its nodes form a cycle") from error
    name_values_apart(model)
    if undefined := undefined_values(model):
        names = shortened(", ".join(undefined), 200)
        raise FileFormatError(
            f"{path} is damaged: its nodes or outputs use {names}, which nothing computes: the tool lost it"
        )
    if tagged.encoding == "attributes":
        drop_tag_attributes(model)
    return model, inlined


def forget_tags(model: ir.Model) -> None:
    """Remove our properties from a model that was changed, in place: they may no longer hold for it."""
    forget_values(model)
    drop_texts([model, *all_nodes(model), *initializers(model)], lambda key: key.startswith(_OURS))


def _forget_names(model: ir.Model) -> None:
    """Rename the nodes and values in the bodies of functions to neutral names, in place.

    A value named ``linear`` in a body is a different value in each call, and must not be matched with the tagged
    file's.
    """
    number = 0
    for function in model.functions.values():
        for node in function.all_nodes():
            node.name = None
            for value in node.outputs:
                value.name = f"inlined_{number}"
                number += 1


def _check_related(changed: Path, tagged: TaggedFile, descent: Descent) -> None:
    """Refuse a file that was not made from the tagged file."""
    share = descent.common / max(descent.total, 1)
    values = [*inputs_and_results(tagged.model), *initializers(tagged.model)]
    has_all = descent.common >= len(values)  # a tool wrote many nodes for one
    if share < RELATED and not has_all:
        count = f"{descent.common:,} of its {descent.total:,} values ({share:.0%})"
        raise UsageError(
            f"{changed} was not made from {tagged.path}: {count} come from there; give the tagged file "
            "that the tool read, and let the tool keep the names of values"
        )


def _owners(nodes: Iterable[ir.Node]) -> dict[ModuleCall, None]:
    owners = {id(owner): owner for node in nodes if (owner := owner_of(node)) is not None}
    return {call: None for owner in owners.values() for call in owner.calls}
