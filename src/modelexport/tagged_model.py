"""``load``, :class:`TaggedModel` and :class:`ModuleView`: the Python interface to a tagged file and its calls."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.text import plural
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source
from modelexport.graph.node_owners import owned_operators, owner_of
from modelexport.graph.parameter_plans import parameter_plan
from modelexport.regions import Sharing
from modelexport.runtime.sessions import Session, open_session
from modelexport.tagged.file import TaggedFile, as_tagged, read_tagged
from modelexport.tagged.tree_display import format_tree, tree_rows, untagged_operators

if TYPE_CHECKING:
    from modelexport.tools.cut.extraction import Extracted
    from modelexport.tools.cut.splitting import Split


@dataclass(frozen=True, eq=False)
class TaggedModel(TaggedFile, Mapping[str, "ModuleView"]):
    """An ONNX model whose nodes carry the module calls they came from.

    A mapping of addresses to calls, callers before callees; ``tagged["BertLayer.0"]`` takes tags as well. ``print`` and
    notebooks show it as a tree.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __getitem__(self, name: str) -> ModuleView:
        """The call with this address or tag (see :meth:`TaggedFile.find`)."""
        return ModuleView(self, self.find(name))

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self.find(name) is not None
        except UsageError:
            return False

    def __iter__(self) -> Iterator[str]:
        return (str(traced.call) for traced in self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __str__(self) -> str:
        nodes = list(owned_operators(self.model))
        return format_tree(
            tree_rows(nodes, self.calls, self.tags.__getitem__), self.coverage, untagged_operators(nodes)
        )

    def __repr__(self) -> str:
        return f"<TaggedModel {self.path}: {len(self.calls)} calls, {len(self.nodes)} nodes>"

    def _repr_html_(self) -> str:
        return self["."]._repr_html_()

    def session(self, **options: Any) -> Session:
        """The file in ONNX Runtime: see :func:`modelexport.runtime.sessions.open_session`."""
        return open_session(self.path, **options)

    def extract(self, name: str, output: str | Path) -> Extracted:
        """Write one module call as a model of its own: see :func:`modelexport.tools.cut.extraction.extract`."""
        from modelexport.tools.cut.extraction import extract

        return extract(self, name, output)


def load(path: Source) -> TaggedModel:
    """Read a tagged ONNX file. Weights are read from the file when they are first used.

    Raises:
        FileFormatError: The file is missing, is not an ONNX file, is damaged, or has an unknown format version.
    """
    tagged = read_tagged(path)
    return TaggedModel(**{field.name: getattr(tagged, field.name) for field in fields(TaggedFile)})


@dataclass(frozen=True, eq=False)
class ModuleView:
    """A call of a module: its nodes, its boundary, its parameters, the calls inside it."""

    tagged: TaggedModel
    call: ModuleCall

    @property
    def address(self) -> str:
        """``path``, or ``path@1`` for a second call; ``.`` for the root."""
        return str(self.call)

    @property
    def tag(self) -> str:
        """The readable name: ``/BertModel/BertEncoder/BertLayer.0``."""
        return self.tagged.tags[self.call]

    @property
    def class_name(self) -> str:
        """The name of the module's class."""
        return self.tagged.class_of(self.call)

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes of the call and of the calls inside it."""
        return tuple(self.tagged.nodes_of(self.call))

    @property
    def own_nodes(self) -> tuple[ir.Node, ...]:
        """The nodes that the call itself owns."""
        return tuple(node for node in self.nodes if (owner := owner_of(node)) and self.call in owner.calls)

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """The values that enter its nodes, without initializers."""
        return tuple(self.tagged.boundaries[self.call].inputs)

    @property
    def outputs(self) -> tuple[ir.Value, ...]:
        """The values that leave its nodes."""
        return tuple(self.tagged.boundaries[self.call].outputs)

    @property
    def parameters(self) -> Mapping[str, ir.Value]:
        """``state_dict`` keys to those initializers of its nodes that hold or are computed from these entries."""
        values: dict[str, ir.Value | None] = {}
        for node in self.nodes:
            for value in node.inputs:
                plan = parameter_plan(value) if value is not None and value.is_initializer() else None
                values.update(dict.fromkeys(plan.keys if plan is not None else (), value))
        return {key: value for key, value in values.items() if value is not None}

    @property
    def children(self) -> tuple[ModuleView, ...]:
        """The calls that ran directly inside it."""
        return tuple(ModuleView(self.tagged, call) for call in self.tagged.calls.children[self.call])

    @property
    def calls(self) -> tuple[ModuleView, ...]:
        """All calls of the same module, this one included."""
        same = (traced.call for traced in self.tagged.calls if traced.call.path == self.call.path)
        return tuple(ModuleView(self.tagged, call) for call in same)

    def extract(self, output: str | Path) -> Extracted:
        """Write it as a model of its own: see :func:`modelexport.tools.cut.extraction.extract`."""
        return self.tagged.extract(self.address, output)

    def __str__(self) -> str:
        return f"{self.class_name} {self.address}: {plural(len(self.nodes), 'node')}"

    def __repr__(self) -> str:
        return f"<ModuleView {self}>"

    def _repr_html_(self) -> str:
        return _details(self)


def _details(view: ModuleView) -> str:
    """HTML for the call and the calls inside it, collapsible; collapsed below the first level."""
    own_operators = _operators(view.own_nodes)
    label = f"<b>{html.escape(view.tag.rpartition('/')[2])}</b> <code>{html.escape(view.address)}</code> "
    line = f"{label}{plural(len(view.nodes), 'node')}{f': {html.escape(own_operators)}' if own_operators else ''}"
    inside = "".join(_details(child) for child in view.children if child.nodes)
    if not inside:
        return f"<div style='margin-left:1em'>{line}</div>"
    opened = " open" if not view.call.path else ""
    return f"<details style='margin-left:1em'{opened}><summary>{line}</summary>{inside}</details>"


def _operators(nodes: Iterable[ir.Node]) -> str:
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return ", ".join(f"{operator} {count}" if count > 1 else operator for operator, count in sorted(counts.items()))


def split(
    source: Source | TaggedFile,
    folder: str | Path,
    *,
    stages: int | None = None,
    max_bytes: int | None = None,
    at: Sequence[str] = (),
    by: Literal["bytes", "flops", "time"] = "bytes",
    sizes: Mapping[str, int] | None = None,
    weights: Sharing = "auto",
) -> Split:
    """Write a model as a folder of stages that run in turn: see :func:`modelexport.tools.cut.splitting.split`.

    Args:
        sizes: For ``flops`` and ``time``: sizes of dynamic axes; those left out are as for ``cost`` and ``profile``.

    Raises:
        UsageError, FileFormatError, OutputError: As there; no dynamic axis has a name in ``sizes``.
    """
    from modelexport.tools.cut import splitting

    tagged = as_tagged(source)
    measure = None if by == "bytes" else splitting.figures_of(_figures(tagged, by, sizes or {}))
    return splitting.split(
        tagged, folder, stages=stages, max_bytes=max_bytes, at=at, by=by, measure=measure, weights=weights
    )


def _figures(tagged: TaggedFile, by: str, sizes: Mapping[str, int]) -> dict[str, float]:
    """The operations of each node, or its time, by its name."""
    if by == "time":
        from modelexport.tables.profiles import profile

        nodes, column = profile(tagged, sizes=sizes, runs=5, level="none").table.nodes, "seconds"
    else:
        from modelexport.tables.costs import cost

        nodes, column = cost(tagged, sizes).nodes, "flops"
    return {node.name: float(node.figures.get(column) or 0) for node in nodes}
