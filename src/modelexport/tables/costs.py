"""``cost``: the storage, computation and memory traffic of a file by module, from its graph. Nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.text import bytes_text, plural
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source, as_path
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, draws, initializers, nested_graphs, stored_tensors
from modelexport.graph.parameter_plans import parameter_plan, state_dict_of
from modelexport.graph.size_conditions import check_sizes, conditions_of
from modelexport.runtime.shapes import Shapes, find_shapes
from modelexport.tables import columns
from modelexport.tables.html_page import Page, embedded_page
from modelexport.tables.live_memory import live_bytes
from modelexport.tables.model_explorer import explorer_places
from modelexport.tables.operator_costs import work_of
from modelexport.tables.table import NodeFigures, Table
from modelexport.tagged.file import TaggedFile, as_tagged
from modelexport.traces.inputs_and_example_sizes import example_sizes, shapes_in_run
from modelexport.weights.packed.repacking import packed_size


class CostTable(Table):
    """The result of :func:`cost`. A notebook shows it as an interactive page."""

    def _repr_html_(self) -> str:
        return embedded_page(Page(self, columns.FLOPS.name))


def cost(file: Source | TaggedFile, sizes: Mapping[str, int] | None = None) -> CostTable:
    """The storage, computation and memory traffic of each module call of a tagged file, in one run.

    Args:
        sizes: Names of dynamic axes to sizes. The others have those of the example, or small ones with which the file
            runs, which a note of the table says.

    Returns:
        A table of ``parameters`` (elements of the ``state_dict`` entries in the file), ``bytes`` (of all initializers),
        ``precision`` (bits of an element of a parameter, scales included), ``macs`` and ``flops``,
        ``activation_bytes`` (of the outputs of nodes), ``intensity`` (operations for each byte read or written) and
        ``peak_bytes`` (of the values alive at one time).

    Raises:
        FileFormatError: It is missing or damaged.
        UsageError: It has no dynamic axis of a name in ``sizes``, is not right for these sizes, or is a folder.
    """
    tagged = read_one(file)
    chosen, note = example_sizes(tagged, sizes or {})
    check_sizes(conditions_of(tagged.model), chosen)
    shapes = find_shapes(tagged.model, chosen)
    results = (value for node in tagged.nodes for value in node.outputs)
    if shapes.computed or any(value.name and value.name not in shapes.sizes for value in results):
        shapes = shapes.completed(shapes_in_run(tagged, chosen))
    constant = constant_values(tagged.model)
    nodes, unknown = _node_figures(tagged, shapes, constant)
    direct, unused = _stored(tagged)
    live = live_bytes(tagged.model, shapes, constant)
    for node, figures in zip(tagged.nodes, nodes, strict=True):
        if node in live and isinstance(figures.figures, dict):
            figures.figures[columns.PEAK_BYTES.name] = live[node]
    notes = _notes(tagged, shapes, unknown)
    return CostTable(
        calls=tagged.calls,
        tags=tagged.tags,
        columns=columns.COST,
        nodes=(*nodes, *unused),
        direct=direct,
        name=tagged.path.name,
        notes=(note, *notes) if note else tuple(notes),
        shapes=shapes,
    )


def read_one(file: Source | TaggedFile) -> TaggedFile:
    """A tagged file that is not a package, which has a table for each part."""
    if not isinstance(file, TaggedFile) and (file := as_path(file)).is_dir():
        raise UsageError(f"{file} is a folder: use cost_parts and profile_parts, which measure each part")
    return as_tagged(file)


def constant_values(model: ir.Model) -> frozenset[str]:
    """The names of values that depend only on weights and constants: a runtime computes them once, in advance."""
    constant = {value.name or "" for value in initializers(model)}
    for node in all_nodes(model):
        is_known = all(value is None or value.name in constant for value in node.inputs)
        is_early = node.graph is model.graph or node.op_type == "Constant"
        if is_known and is_early and not nested_graphs(node) and not draws(node):
            constant.update(value.name or "" for value in node.outputs)
    return frozenset(constant)


def _node_figures(
    tagged: TaggedFile, shapes: Shapes, constant: frozenset[str]
) -> tuple[list[NodeFigures], Counter[str]]:
    """The computation and traffic of each node, and the operators of the nodes for which they are not known."""
    figures_of_nodes = []
    unknown: Counter[str] = Counter()
    places = explorer_places(tagged)
    for node in tagged.nodes:
        owner = owner_of(node)
        figures: dict[str, Any] = {}
        if not all(value.name in constant for value in node.outputs):
            work = work_of(node, shapes)
            if work is None:
                unknown[node.op_type] += 1
            else:
                figures[columns.MACS.name], figures[columns.FLOPS.name] = work
            written = _total(shapes.bytes(value) for value in node.outputs if value.name)
            read = _total(shapes.bytes(value) for value in node.inputs if value is not None)
            if node.op_type.startswith("Gather"):  # it reads only the elements that it selects
                read = written
            figures[columns.ACTIVATION_BYTES.name] = written
            figures[columns.MOVED_BYTES.name] = written + read
        figures_of_nodes.append(
            NodeFigures(
                node.name or "", node.op_type, owner.calls if owner else (), figures, place=places.get(node, ("", ""))
            )
        )
    return figures_of_nodes, unknown


def _total(sizes: Iterable[int | None]) -> int:
    return sum((size for size in sizes if size is not None), 0)


def _stored(tagged: TaggedFile) -> tuple[dict[str, Counter[ModuleCall]], list[NodeFigures]]:
    """What the calls that own initializers hold, each initializer counted once, and the bytes of those without a call.

    The codes of a quantized weight are its parameters, although modules of quantized checkpoints have them as buffers.
    """
    users = _users(tagged)
    entries = state_dict_of(tagged.model)
    by_path: dict[str, list[ModuleCall]] = {}
    for traced in tagged.calls:
        by_path.setdefault(traced.call.path, []).append(traced.call)
    parameters, buffers, sizes, bits, held = (Counter[ModuleCall]() for _ in range(5))
    for value, constant in stored_tensors(tagged.model):
        producer = value.producer()
        if producer is not None and (owner := owner_of(producer)) is not None:
            sizes[owner.call] += constant.nbytes
    counted: set[str] = set()
    unused = []
    for value in initializers(tagged.model):
        tensor, plan = value.const_value, parameter_plan(value)
        if tensor is None:
            continue
        calls = users.get(value, [])
        call = _counted_for(plan.keys if plan is not None else (), calls, by_path, tagged)
        if call is None:
            unused.append(NodeFigures(value.name or "", "Initializer", (), {columns.BYTES.name: tensor.nbytes}))
            continue
        sizes[call] += tensor.nbytes
        if plan is None:
            continue
        packed = packed_size(plan.steps)
        # Several parameters that are one initializer have equal shares of it; packed numbers are those of the first.
        groups = plan.groups() if packed is None else plan.groups()[:1]
        for names in groups:
            place = _counted_for(names, calls, by_path, tagged) or call
            bits[place] += 8 * tensor.nbytes // len(groups)
            if plan.recorded and packed is None:  # it may hold a part of the entry alone
                held[place] += tensor.size // len(groups)
            if counted.isdisjoint(names):
                counted.update(names)
                entry = entries.get(names[0])
                whole = prod(entry.shape) if entry is not None else tensor.size
                elements = whole if packed is None else packed
                kind = buffers if entry is not None and entry.buffer and packed is None else parameters
                kind[place] += elements
                if not plan.recorded or (packed is not None and plan.steps[-1].op_type == "Codes"):
                    held[place] += elements
    figures = (parameters, buffers, sizes, bits, held)
    counted_columns = (columns.PARAMETERS, columns.BUFFERS, columns.BYTES, columns.BITS, columns.HELD)
    return {column.name: counts for column, counts in zip(counted_columns, figures, strict=True)}, unused


def _users(tagged: TaggedFile) -> dict[ir.Value, list[ModuleCall]]:
    """The calls whose nodes use each initializer."""
    users: dict[ir.Value, list[ModuleCall]] = {}
    for node in tagged.nodes:
        owner = owner_of(node)
        for value in node.inputs:
            if owner is not None and value is not None and value.is_initializer():
                users.setdefault(value, []).append(owner.call)
    return users


def _counted_for(
    keys: Iterable[str], users: list[ModuleCall], by_path: Mapping[str, list[ModuleCall]], tagged: TaggedFile
) -> ModuleCall | None:
    """The call that an initializer is counted for: the first call of its module, or else its first user.

    For a tied parameter, the first name whose module uses it is taken.
    """
    around = {call for user in users for call in tagged.calls.stack(user)}
    fallback: ModuleCall | None = None
    for key in keys:
        path = key.rpartition(".")[0]
        while path and path not in by_path:
            path = path.rpartition(".")[0]
        if not path and tagged.found_calls is not None:  # a name that another exporter invented names no module
            continue
        calls = by_path.get(path, [])
        if (using := next((call for call in calls if call in around), None)) is not None:
            return using
        fallback = fallback or (calls[0] if calls else None)
    return users[0] if users else fallback


def _notes(tagged: TaggedFile, shapes: Shapes, unknown: Counter[str]) -> list[str]:
    notes, model, users = [], tagged.model, _users(tagged)
    if shapes.symbols:
        notes.append(f"dynamic axes: {', '.join(shapes.symbols)} (give sizes with --size NAME=N)")
    if shapes.computed:
        notes.append(f"sizes that depend on the data: {', '.join(shapes.computed)} (give them with --size as well)")
    if unknown:
        listed = ", ".join(f"{operator} {count}" if count > 1 else operator for operator, count in unknown.items())
        notes.append(f"not counted: {plural(unknown.total(), 'node')} without a rule or of unknown size ({listed})")
    if any(node.op_type in ("Loop", "Scan") for node in all_nodes(model)):
        notes.append("the body of a loop is counted once")
    if any(node.op_type == "If" for node in all_nodes(model)):
        notes.append("both branches of an If are counted")
    if any(len({call.path for call in calls}) > 1 for v, calls in users.items() if parameter_plan(v) is not None):
        notes.append("a parameter that modules share, or that a tool merged with an equal one, is counted once")
    unnamed = [
        value.const_value.nbytes
        for value in initializers(model)
        if parameter_plan(value) is None
        and value.const_value is not None
        and value.const_value.dtype.is_floating_point()
    ]
    if tagged.found_calls is not None and unnamed:
        notes.append(
            f"PARAMETERS are those that the exporter recorded; {plural(len(unnamed), 'other initializer')} of floats "
            f"({bytes_text(sum(unnamed))}), which may be transposed weights, only count as bytes"
        )
    return notes
