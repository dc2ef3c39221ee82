"""The interface of a substitute: what it gets, and the parts that it returns; and the substitute that does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Owner
from modelexport.errors import UsageError
from modelexport.format import documents
from modelexport.graph.nodes import may_be, sizes_of
from modelexport.regions.graph_cutter import Cut
from modelexport.tools.cut.call_interfaces import CallInterface
from modelexport.tools.cut.edited_calls import EditedCalls
from modelexport.tools.cut.grafted_modules import Graft


@dataclass(frozen=True)
class Site:
    """A call that is replaced: its current values, and its original nodes."""

    interface: CallInterface
    weights: Sequence[ir.Value]
    """The initializers that its nodes use, in the order of the nodes, and those of which other calls compute for it."""
    cut: Cut | None
    """The call as a model of its own, if the substitute needs it."""

    @property
    def call(self) -> ModuleCall:
        return self.interface.call


@dataclass
class Parts:
    """The parts that are inserted into the graph."""

    nodes: list[ir.Node]
    outputs: list[ir.Value]
    """The values that replace the site's outputs, in their order."""
    owners: Mapping[ir.Node, Owner] = field(default_factory=dict)
    """The owners of the nodes that the replaced call does not own itself, with those of nested graphs."""
    weights: Mapping[ir.Value, tuple[str, ...]] = field(default_factory=dict)
    """New initializers to their ``state_dict`` keys; empty for those that do not come from entries."""
    functions: Sequence[ir.Function] = ()
    opsets: Mapping[str, int] = field(default_factory=dict)
    entries: Mapping[str, documents.StateDictEntry] = field(default_factory=dict)
    graft: Graft | None = None
    """The exported module that they come from, if they do."""


@runtime_checkable
class Substitute(Protocol):
    """Builds the replacement of a call."""

    @property
    def keep_body(self) -> bool:
        """Whether it needs the call as a model of its own."""

    @property
    def name(self) -> str:
        """Its name in the metadata of nodes."""

    def build(self, site: Site, edited: EditedCalls, used: Iterable[ModuleCall]) -> Parts:
        """New nodes for a call; changes the calls inside it in ``edited``.

        Args:
            used: The calls that own other nodes.
        """


class Identity:
    """Makes the call return its inputs: for each output the first input of its type and shape."""

    name = "identity"
    keep_body = False

    def build(self, site: Site, edited: EditedCalls, used: Iterable[ModuleCall]) -> Parts:
        nodes = []
        for output in site.interface.outputs:
            fitting = [
                value
                for value in site.interface.inputs
                if value.dtype == output.dtype and may_be(value.shape, output.shape)
            ]
            if not fitting:
                raise UsageError(
                    f"'{site.call}' cannot be an identity: none of its inputs has the type and shape of its output "
                    f"'{output.name}'"
                )
            same = [value for value in fitting if sizes_of(value) == sizes_of(output)]
            nodes.append(ir.Node("", "Identity", [(same or fitting)[0]]))
        edited.remove_inside(site.call, used)
        return Parts(nodes, [node.outputs[0] for node in nodes])
