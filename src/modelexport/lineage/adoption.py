"""``adopt``: write what was found of the calls of a file that another exporter wrote into a tagged file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from modelexport.core.result_display import Written
from modelexport.errors import FileFormatError, UsageError
from modelexport.files.linked_weights import check_weights_files
from modelexport.files.onnx_models import save_model
from modelexport.files.path_or_model import as_path
from modelexport.files.replaceable_files import check_writable
from modelexport.format import documents, keys
from modelexport.graph.copies import copy_of
from modelexport.graph.node_owners import owned_operators, owner_of, required_owner
from modelexport.graph.nodes import all_nodes
from modelexport.graph.properties import is_tagged, recorded
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged.encodings.metadata import drop_foreign_metadata, write_tags
from modelexport.tagged.file import TaggedFile, read_tagged, read_untagged
from modelexport.tagged.found_calls.find_calls import record_sources
from modelexport.tagged.found_calls.owners_from_neighbors import infer_owners
from modelexport.tagged.found_calls.recorded_stacks import CallSource
from modelexport.tagged.tree_display import TreeRow, tree_rows


@dataclass(frozen=True, kw_only=True, repr=False)
class Adopted(Written):
    """The result of ``adopt``."""

    path: Path
    files: Sequence[str]
    tree: Sequence[TreeRow]
    coverage: documents.Coverage
    sources: dict[CallSource, int]
    """Each source of calls to the number of nodes that got theirs from it."""
    repeated: Sequence[str]
    """Paths of modules whose parameters are used repeatedly in what looks like one call but may be several."""


def adopt(program: Any, output: str | Path, *, keep_torch_metadata: bool = False) -> Adopted:
    """Write a tagged file of a model that another exporter made. Every command finds the same calls without it.

    Local functions are inlined. If the file has tags already, nodes without one get the call that is around them.

    Args:
        program: An ONNX file or an ``onnx.ModelProto``; or, in the process that exported, a ``torch.onnx.ONNXProgram``,
            the result of ``transformers.exporters.OnnxExporter``, or an ``onnx_ir.Model``. These are not changed. They
            still have the FX node of each ONNX node, and with it the call; a file has the module at most.
        output: The file to write.
        keep_torch_metadata: Keep the exporter's own ``pkg.torch.*`` keys, which contain paths of the exporting machine.

    Raises:
        FileFormatError: The file is missing, not ONNX, or has tags that are damaged or of an unknown version.
        OutputError: ``output`` cannot be written. An existing file of that name is unchanged.
        UsageError: ``program`` has an unsupported type, or is in memory and has tags.
    """
    output = Path(output)
    path = as_path(program) if isinstance(program, str | os.PathLike | onnx.ModelProto) else None
    reads = [path] if path is not None else []
    check_writable(output, reads)
    tagged = read_tagged(path) if path is not None else read_untagged(Path("the program"), _model_of(program))
    model, tags, found = tagged.model, tagged.call_tags, tagged.found_calls
    sources = found.sources if found is not None else _complete(tagged)
    check_weights_files(model)
    if not keep_torch_metadata:
        drop_foreign_metadata(model)
    write_tags(model, tags)
    with checked_and_written(output.parent, reads) as staging:
        save_model(model, staging / output.name)
        files = [str(output.parent / file.name) for file in sorted(staging.iterdir())]
    evidence = (required_owner(node).evidence for node in all_nodes(model))
    return Adopted(
        path=output,
        files=files,
        tree=tree_rows(owned_operators(model), tags.calls, tags.tag),
        coverage=documents.Coverage.of(evidence),
        sources=dict(sources),
        repeated=found.repeated if found is not None else (),
    )


def _model_of(program: Any) -> ir.Model:
    """A copy of the model of a program in memory."""
    model = program
    try:
        for attribute in ("program", "model"):
            model = getattr(model, attribute, model)
    except ValueError as error:  # several graphs in one export
        raise UsageError(f"{error}: adopt takes one graph at a time") from error
    if not isinstance(model, ir.Model):
        raise UsageError(
            f"cannot adopt a {type(program).__name__}: give a file, a torch.onnx.ONNXProgram, the result of "
            "OnnxExporter, or an onnx_ir.Model"
        )
    if is_tagged(model):
        raise UsageError("the program has tags of modelexport already: save it, there is nothing to adopt")
    return copy_of(model)


def _complete(tagged: TaggedFile) -> Counter[CallSource]:
    """Give owners to the nodes without tags of a file that has tags, in place; returns the sources of all."""
    damaged = f"{tagged.path} has damaged tags"
    earlier = recorded(tagged.model, keys.ADOPTED, damaged=damaged) or {}
    if unknown := [name for name in earlier if name not in set(CallSource)]:
        raise FileFormatError(f"{damaged} ('{unknown[0]}' is not a source of calls): adopt the original again")
    sources = Counter({CallSource(name): count for name, count in earlier.items()})
    if not sources:
        sources[CallSource.TAGS] = sum(owner_of(node) is not None for node in tagged.nodes)
    if inferred := infer_owners(tagged.model, tagged.calls):
        sources[CallSource.NEIGHBOURS] += inferred
    record_sources(tagged.model, sources)
    return sources
