"""Nodes between two values that PyTorch computed in one call: they ran while it did, for calls do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.verify.matching import FileRun

Calls = frozenset[ModuleCall]


class Between:
    """For every node that computes no value of PyTorch's the calls that it has to be in, or in a call inside them.

    What takes a value of a call, and leads to a value of it, ran between the two. Of values that several calls may
    have computed, the innermost call around these counts. Integers are passed over: a size is that of many values.
    """

    def __init__(self, model: ir.Model, calls: CallTree, run: FileRun, computed: Mapping[ir.Node, Calls]) -> None:
        self._calls, self._computed = calls, computed
        self._numbers = {name for name, own in run.prints.items() if own.kind == "f"}
        self._around: dict[Calls, ModuleCall | None] = {}
        self._before: dict[ir.Node, Calls] = {}
        self._after: dict[ir.Node, Calls] = {}
        for node in model.graph:
            producers = (v.producer() for v in node.inputs if v is not None and v.name in self._numbers)
            self._before[node] = self._nearest((one for one in producers if one is not None), self._before)
        for node in reversed(model.graph):
            users = (user for v in node.outputs if v.name in self._numbers for user, _ in v.uses())
            self._after[node] = self._nearest(users, self._after)

    def excludes(self, call: ModuleCall, node: ir.Node) -> Iterator[ModuleCall]:
        """The calls that a node is in, and a call is not."""
        if node in self._computed or call not in self._calls:
            return
        stack = self._calls.stack(call)
        for one in self._before[node]:
            for other in self._after[node]:
                around = self._innermost(frozenset((one, other)))
                if around is not None and around not in stack:
                    yield around

    def _nearest(self, nodes: Iterable[ir.Node], known: Mapping[ir.Node, Calls]) -> Calls:
        found: set[ModuleCall] = set()
        for node in nodes:
            if node in self._computed:
                around = self._innermost(self._computed[node])
                found.update([around] if around is not None else [])
            else:
                found |= known.get(node, frozenset())
        return frozenset(found)

    def _innermost(self, several: Calls) -> ModuleCall | None:
        """The innermost call that some calls are, or ran in."""
        if several not in self._around:
            common: list[ModuleCall] | None = None
            for call in several:
                if call not in self._calls:
                    common = []
                    break
                stack = self._calls.stack(call)
                common = [one for one in stack if common is None or one in common]
            self._around[several] = (
                max(common, key=lambda one: len(self._calls.stack(one)), default=None) if common else None
            )
        return self._around[several]
