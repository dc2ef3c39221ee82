"""``adopt``: make a tagged file from a file that another exporter wrote."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.json_decoding import decode_json
from modelexport.core.result_display import Written
from modelexport.core.tags import Tags
from modelexport.core.version import __version__
from modelexport.errors import UsageError
from modelexport.files.atomic_writing import check_writable
from modelexport.files.linked_weights import check_files
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.files.path_or_model import as_path
from modelexport.format import documents, keys
from modelexport.format.call_tree import call_tree_entries, encode_call_tree
from modelexport.format.node_tags import write_tags
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.copies import copy_of
from modelexport.graph.node_owners import owned_operators, owner_of
from modelexport.graph.nodes import all_nodes, initializers
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.lineage.other_exporters.calls_from_stacks import infer, place_by_stacks
from modelexport.lineage.other_exporters.local_functions import inline_functions
from modelexport.lineage.other_exporters.recorded_stacks import CallSource, read_fx_nodes, read_metadata
from modelexport.lineage.other_exporters.torchscript_names import read_scoped_names
from modelexport.runtime.checked_writing import written_together
from modelexport.tagged.encodings.metadata import drop_torch_metadata, initializer_tags, write_owner
from modelexport.tagged.file import read_tagged
from modelexport.tagged.tree_and_nodes import TreeRow, tree_rows, untagged_operators
from modelexport.weights.recorded_transforms import ParameterPlan, record_plan

_SPECIFICATION = "pkg.torch.export.graph_signature.InputSpec."
"""What ``torch.onnx`` records about an initializer: its ``kind``, and whether a buffer is ``persistent``."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Adopted(Written):
    """The result of ``adopt``."""

    path: Path
    files: Sequence[str]
    tree: Sequence[TreeRow]
    coverage: documents.Coverage
    sources: dict[str, int]
    """Each source of calls (``other_exporters/recorded_stacks.py``) to the number of nodes that got theirs from it."""
    operators: dict[str, int]
    """The operators of the nodes without an owner, to the number of such nodes."""
    untagged: Sequence[str]
    """The names of these nodes."""
    repeated: Sequence[str]
    """Paths of modules whose parameters are used repeatedly in what looks like one call but may be several."""


def adopt(program: Any, output: str | Path, *, keep_torch_metadata: bool = False) -> Adopted:
    """Write a tagged file of a model that another exporter made. Nodes whose call cannot be found stay untagged.

    Local functions are inlined. Initializers that are parameters under their own name are marked as such.

    Args:
        program: An ONNX file or an ``onnx.ModelProto``; or, in the process that exported, a ``torch.onnx.ONNXProgram``,
            the result of ``transformers.exporters.OnnxExporter``, or an ``onnx_ir.Model``. These are not changed. They
            still have the FX node of each ONNX node, and with it the call; a file has the module at most.
        output: The file to write.
        keep_torch_metadata: Keep the exporter's own ``pkg.torch.*`` keys, which contain paths of the exporting machine.

    Raises:
        FileFormatError: The file is missing, not ONNX, or has tags that are damaged or of an unknown version.
        OutputError: ``output`` cannot be written. An existing file of that name is unchanged.
        UsageError: ``program`` has an unsupported type, or contains no information about modules.
    """
    output = Path(output)
    path = as_path(program) if isinstance(program, str | os.PathLike | onnx.ModelProto) else None
    check_writable(output, [path] if path is not None else ())
    if path is not None:
        model = load_onnx(path)
        check_files(model)
        if keys.FORMAT_VERSION_KEY in model.metadata_props:
            return _adopt_tagged(path, output, keep_torch_metadata)
        name = str(path)
    else:
        model, name = copy_of(_model_of(program)), "the program"
        if keys.FORMAT_VERSION_KEY in model.metadata_props:
            raise UsageError("the program has tags of modelexport already: save it, there is nothing to adopt")
    in_functions = inline_functions(model)
    found = read_scoped_names(model) | in_functions | read_metadata(model) | read_fx_nodes(model)
    if not found:
        raise UsageError(
            f"nothing in {name} says which module a node came from: no metadata of torch.onnx, no namespaces, no local "
            "functions, no scoped names of nodes; export the model again, with modelexport or torch.onnx.export"
        )
    placing = place_by_stacks(model, found)
    placing.sources[CallSource.NEIGHBOURS] += infer(model)
    tags = Tags(placing.tree, placing.calls)
    repeated = _repeated(model, {node for node, known in found.items() if known.stack[-1].index is None})
    parameters = _parameters(model, {module.path for module in placing.tree})
    if not keep_torch_metadata:
        drop_torch_metadata(model)
    name_nodes_apart(model)
    for node in all_nodes(model):
        owner = owner_of(node)
        if owner is not None:
            write_owner(node, owner, tags)
        else:
            node.metadata_props.pop(keys.NAMESPACE, None)
    for value in initializers(model):
        value.metadata_props[keys.HIERARCHY_TAGS] = json.dumps(initializer_tags(value, tags))
        if value in parameters:
            record_plan(value, ParameterPlan([value.name or ""], []))
    properties = model.metadata_props
    properties[keys.FORMAT_VERSION_KEY] = FORMAT_VERSION
    properties[keys.VERSION_KEY] = __version__
    properties[keys.CALL_TREE] = encode_call_tree(call_tree_entries(tags.calls, tags.tag))
    tree = tree_rows(owned_operators(model), placing.calls, tags.tag)
    return _write(model, output, tree, placing.sources, repeated, [path] if path is not None else [])


def _model_of(program: Any) -> ir.Model:
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
    return model


def _adopt_tagged(path: Path, output: Path, keep_torch_metadata: bool) -> Adopted:
    """Adopt a file that has our tags: they are kept; a new node gets an owner if its neighbors agree."""
    tagged = read_tagged(path)
    text, damaged = tagged.model.metadata_props.get(keys.ADOPTED, "{}"), f"{path} has damaged tags"
    earlier = decode_json(text, kind=dict[CallSource, int], damaged=damaged, then="adopt the original again")
    sources = Counter(earlier)
    if not earlier:
        sources[CallSource.TAGS] = sum(owner_of(node) is not None for node in tagged.nodes)
    source_tags = tagged.source_tags  # read before nodes get owners without tags
    sources[CallSource.NEIGHBOURS] += infer(tagged.model)
    if not keep_torch_metadata:
        drop_torch_metadata(tagged.model)
    for node in tagged.nodes:
        if (owner := owner_of(node)) is not None:
            properties = node.metadata_props
            properties[keys.NAMESPACE] = tagged.tags[owner.call].removeprefix("/")
            properties[keys.LAYER_ANNOTATION] = owner.call.annotation
            if keys.CALL not in properties:
                write_tags(properties, [owner.call.address], [source_tags[owner.call]], owner.evidence)
    tree = tree_rows(owned_operators(tagged.model), tagged.calls, tagged.tags.__getitem__)
    return _write(tagged.model, output, tree, sources, [], [path])


def _write(
    model: ir.Model,
    output: Path,
    tree: Sequence[TreeRow],
    sources: Counter[CallSource],
    repeated: Sequence[str],
    reads: Sequence[Path],
) -> Adopted:
    counted = {source.value: sources[source] for source in CallSource if sources[source]}
    model.metadata_props[keys.ADOPTED] = json.dumps(counted)
    owners = [(node, owner_of(node)) for node in all_nodes(model)]
    check_files(model)
    with written_together(output.parent, reads) as staging:
        save_model(model, staging / output.name)
        files = [str(output.parent / file.name) for file in sorted(staging.iterdir())]
    return Adopted(
        path=output,
        files=files,
        tree=tree,
        coverage=documents.Coverage.of(None if owner is None else owner.evidence for _, owner in owners),
        sources=counted,
        operators=untagged_operators(owned_operators(model)),
        untagged=[node.name or "" for node, owner in owners if owner is None],
        repeated=repeated,
    )


def _repeated(model: ir.Model, unnumbered: set[ir.Node]) -> list[str]:
    """The modules with a parameter that the same operator uses more than once in what looks like one call.

    Args:
        model: The adopted model.
        unnumbered: The nodes whose module is known, but not the number of the call.
    """
    found: dict[str, None] = {}
    for value in initializers(model):
        enclosing = (value.name or "").rpartition(".")[0]
        uses: Counter[tuple[ModuleCall, str]] = Counter()
        for node, _ in value.uses():
            if node in unnumbered and (owner := owner_of(node)) is not None and owner.call.path == enclosing != "":
                uses[owner.call, node.op_type] += 1
        if any(count > 1 for count in uses.values()):
            found[enclosing] = None
    return list(found)


def _parameters(model: ir.Model, paths: set[str]) -> set[ir.Value]:
    """The initializers that are parameters or buffers under their own name.

    ``torch.onnx`` records which of them are. Without this record, a name is taken for a ``state_dict`` key if it is a
    name in one of the file's known modules.
    """
    found = set()
    for value in initializers(model):
        kind = value.metadata_props.get(f"{_SPECIFICATION}kind")
        if kind is not None:
            persistent = value.metadata_props.get(f"{_SPECIFICATION}persistent") != "False"
            is_entry = kind == "PARAMETER" or (kind == "BUFFER" and persistent)
        else:
            enclosing, dot, _ = (value.name or "").rpartition(".")
            is_entry = bool(dot) and enclosing in paths
        if is_entry:
            found.add(value)
    return found
