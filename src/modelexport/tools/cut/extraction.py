"""``extract``: write one module call of a tagged file as a model of its own. ``graph_cutter.py`` cuts the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec
import onnx_ir as ir

from modelexport.core.calls import ROOT, ModuleCall, Side, common_stack
from modelexport.core.result_display import Written
from modelexport.core.text import first_few, suggest
from modelexport.errors import UsageError
from modelexport.files.onnx_models import fits_inside, save_model
from modelexport.files.output_folders import check_output_folder
from modelexport.files.path_or_model import Source
from modelexport.files.replaceable_files import check_writable
from modelexport.format.cut_record import CutRecord, CutValue
from modelexport.format.documents import Value
from modelexport.format.dtypes import dtype_name
from modelexport.format.keys import CUT_FROM
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import inputs_and_results, required_inputs, sizes_of
from modelexport.graph.properties import record
from modelexport.regions.graph_cutter import Cut, Cutter
from modelexport.regions.region import Region
from modelexport.regions.shared_files import size_of_weights
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tagged.file import TaggedFile, as_tagged
from modelexport.tools.cut.call_interfaces import CallInterface, interface_of


class ExtractedValue(Value, frozen=True):
    """An input or output of an extracted model."""

    value: str
    """Its name in the file that it was cut out of."""


class Extracted(Written, msgspec.Struct, frozen=True, kw_only=True):
    """One call that was written to a file."""

    path: str
    call: str
    tag: str
    nodes: int
    """The number of nodes in the file, with those of nested graphs."""
    borrowed: int
    """The number of these that belong to other calls and compute a constant or a size."""
    bytes: int
    """Bytes of the weights."""
    inputs: list[ExtractedValue]
    outputs: list[ExtractedValue]


def extract(source: Source | TaggedFile, name: str, output: str | Path) -> Extracted:
    """Write one module call as a model of its own.

    Its inputs are the values that enter the call's nodes, with the names and in the order of ``forward``'s arguments
    if the sidecar identifies them; its outputs are the values that leave them. Nodes of other calls that compute only
    from weights and constants are included, as are sizes that can be read from the inputs. Only weights that the call
    needs are read. They are embedded up to 1 GB; above, they are written to ``output`` with ``.data`` appended.

    Args:
        source: A path, an open model, or what :func:`modelexport.load` returned.
        name: An address (``encoder.layer.0``, ``shared@1``) or a tag.
        output: The file to write.

    Raises:
        UsageError: The call does not exist or has no nodes; the message says why.
        FileFormatError: Weights in other files are missing.
        OutputError: ``output`` cannot be written. An existing file of that name is unchanged.
    """
    output, tagged = Path(output), as_tagged(source)
    call = tagged.find(name)
    check_writable(output, [tagged.path])
    with checked_and_written(output.parent, [tagged.path]) as staging:
        return _write(tagged, Cutter(tagged), call, staging, output)


def extract_all(tagged: TaggedFile, names: Sequence[str], folder: str | Path) -> list[Extracted]:
    """Write the calls that selectors pick, each to ``folder/ADDRESS.onnx``; all of them or none.

    Calls without nodes that a glob or a class picks are left out.
    """
    calls, cutter = tagged.select(*names).calls, Cutter(tagged)
    if len(calls) > len(names):
        calls = tuple(call for call in calls if cutter.has_nodes(call)) or calls
    folder = Path(folder)
    check_output_folder(folder)
    targets = {call: folder / f"{file_stem(call)}.onnx" for call in calls}
    for target in targets.values() if folder.is_dir() else ():
        check_writable(target, [tagged.path])
    with checked_and_written(folder, [tagged.path], make=True) as staging:
        return [_write(tagged, cutter, call, staging, target) for call, target in targets.items()]


def extract_values(
    tagged: TaggedFile, outputs: Sequence[str], output: str | Path, *, inputs: Sequence[str] = ()
) -> Extracted:
    """Write the nodes between values as a model of its own: those that ``outputs`` depend on, as far as ``inputs``.

    The values may be in branches and bodies, too. What depends only on weights and constants is recomputed.

    Args:
        outputs: Names of values, which the model returns in this order.
        output: The file to write.
        inputs: Names of values that the model takes, in this order; by default the inputs of the file.

    Raises:
        UsageError: There is no such value, nothing computes an output, or it also depends on other inputs.
        FileFormatError: Weights in other files are missing, or a value has no type that is known.
        OutputError: ``output`` cannot be written. An existing file of that name is unchanged.
    """
    output = Path(output)
    check_writable(output, [tagged.path])
    values = {value.name: value for value in inputs_and_results(tagged.model) if value.name}
    if unknown := [name for name in (*outputs, *inputs) if name not in values]:
        raise UsageError(
            f"{tagged.path} has no value '{unknown[0]}'{suggest(unknown[0], [str(name) for name in values])}"
            f"; `modelexport nodes {tagged.path} . --json` lists them"
        )
    returned, start = [values[name] for name in outputs], [values[name] for name in inputs]
    if absent := [value.name for value in returned if value.producer() is None or value in start]:
        raise UsageError(f"no node computes '{absent[0]}': name a value that is the result of a node")
    found = Region.between(returned, lambda value: value.producer() is not None and value not in start)
    region, cutter = Region(found.nodes, [*dict.fromkeys([*start, *found.inputs])], returned), Cutter(tagged)
    if start and (more := [value.name or "" for value in cutter.needs(region).inputs if value not in start]):
        raise UsageError(f"'{outputs[0]}' also depends on {first_few(more)}: give it with --from as well")
    calls = {owner.call for node in region.nodes if (owner := owner_of(node)) is not None}
    inside = {above for call in calls for above in tagged.calls.stack(call)}
    cut = cutter.cut(region, "the region", inside=inside, above={ROOT})
    cut.reorder(start or [value for value in tagged.model.graph.inputs if value in cut.inputs], returned)
    with checked_and_written(output.parent, [tagged.path]) as staging:
        return _save(tagged, cut, common_stack(map(tagged.calls.stack, calls))[-1], staging, output)


def file_stem(call: ModuleCall) -> str:
    """A unique file name for a call, safe on every file system: the address, percent-encoded if necessary.

    The root's is ``@0``; a name that is too long for a file system ends in a hash of the rest.
    """
    stem = quote(call.path, safe="") + (f"@{call.index}" if call.index or not call.path else "")
    if len(stem) > 200:
        stem = f"{stem[:160]}-{hashlib.sha256(stem.encode()).hexdigest()[:16]}"
    return stem


def _write(tagged: TaggedFile, cutter: Cutter, call: ModuleCall, staging: Path, output: Path) -> Extracted:
    """Cut a call out and write it into a folder, from which it will be moved to ``output``."""
    call = tagged.top if call == ROOT else call
    if not cutter.has_nodes(call):
        modules = tagged.hierarchy.modules if tagged.hierarchy is not None else []
        reason = next((module.reason for module in modules if module.path == call.path), "")
        reason = reason or "it returns its input, or its operations were folded away or merged into others"
        raise UsageError(f"'{call}' has no nodes in {tagged.path}: {reason}")
    cut = cutter.cut_call(call)
    interface = interface_of(tagged, call, cut.inputs, cut.outputs)  # as in the module's `forward`
    if call != tagged.top:  # the whole has the order of the file
        cut.reorder(interface.inputs, interface.outputs)
    cut.rename(interface.names)
    record(cut.model, CUT_FROM, _origin(tagged, call, cut, interface))
    return _save(tagged, cut, call, staging, output)


def _origin(tagged: TaggedFile, call: ModuleCall, cut: Cut, interface: CallInterface) -> CutRecord:
    """Where a cut comes from; if the file was itself cut out of another one, then from there."""
    outer, names = tagged.cut, dict[str | None, str]()
    if outer is not None:
        values = [*required_inputs(tagged.model), *tagged.model.graph.outputs]
        names = {value.name: each.value for value, each in zip(values, [*outer.inputs, *outer.outputs], strict=False)}

    def described(values: Sequence[ir.Value], matched: Mapping[ir.Value, str], side: Side) -> list[CutValue]:
        tensors = {tensor.name: tensor for tensor in getattr(interface.entry, side, ())}
        described = []
        for value in values:
            tensor = tensors.get(matched.get(value, ""))
            other = "" if tensors else None
            name = tensor.name if tensor is not None and _has_layout(value, tensor.shape) else other
            described.append(CutValue(names.get(value.name, value.name or ""), name))
        return described

    return CutRecord(
        str(call),
        tagged.path.name if outer is None else outer.file,
        described(cut.inputs, interface.names, "inputs"),
        described(cut.outputs, interface.results, "outputs"),
    )


def _has_layout(value: ir.Value, shape: Sequence[int | str]) -> bool:
    """Whether a value may have the axes of a tensor in the same order."""
    sizes = sizes_of(value)
    return len(sizes) == len(shape) and all(
        a == b or (isinstance(a, str) != isinstance(b, str)) or (isinstance(a, str) and b not in sizes)
        for a, b in zip(sizes, shape, strict=True)
    )


def _save(tagged: TaggedFile, cut: Cut, call: ModuleCall, staging: Path, output: Path) -> Extracted:
    """Write a cut into a folder, from which it will be moved to ``output``."""
    size = size_of_weights(cut.model, tagged.path)
    save_model(cut.model, staging / output.name, external=not fits_inside(size))
    return Extracted(
        path=str(output),
        call=str(call),
        tag=tagged.tags[call],
        nodes=sum(1 for _ in cut.model.graph.all_nodes()),
        borrowed=cut.borrowed,
        bytes=size,
        inputs=[_describe(value, source) for value, source in zip(required_inputs(cut.model), cut.inputs, strict=True)],
        outputs=[_describe(value, source) for value, source in zip(cut.model.graph.outputs, cut.outputs, strict=True)],
    )


def _describe(value: ir.Value, source: ir.Value) -> ExtractedValue:
    dtype = dtype_name(value.dtype) if value.dtype is not None else ""
    return ExtractedValue(value.name or "", dtype, sizes_of(value), source.name or "")
