"""Which outputs of two files are compared: those that ONNX Runtime computes, or those of their nodes by the standard.

Where ONNX Runtime computes a file otherwise than its nodes do (:mod:`modelexport.traces.runtime_causes`), it is the
runtime that is wrong, and neither file is blamed for it. Outputs that depend on random numbers are computed node by
node in both files, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import onnx_ir as ir
from msgspec.structs import replace as changed

from modelexport.core.text import percent_text
from modelexport.errors import UsageError
from modelexport.runtime.sessions import arrays_in
from modelexport.tagged.file import TaggedFile
from modelexport.tagged.strip_and_inline import runnable
from modelexport.tools.compare.against_report import Loss, measure_loss, weight_of
from modelexport.tools.compare.node_by_node import NodeByNode, run_node_by_node
from modelexport.traces.outputs_of_two_files import RANDOM
from modelexport.traces.runtime_causes import cause_in_runtime

Outputs = Mapping[str, Any]


@dataclass(frozen=True)
class RunOutputs:
    """The outputs of two files in each run, and what they say of ONNX Runtime."""

    expected: Sequence[Outputs]
    """The outputs of the first file in each run."""
    actual: Sequence[Outputs]
    """The outputs of the second file in each run, under its own names."""
    cause: str = ""
    """The part of ONNX Runtime that makes outputs of the second file wrong, whose nodes compute what the first's do."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OutputComparison:
    """Two files that should compute the same, and what is compared of their outputs."""

    first: TaggedFile
    second: TaggedFile
    provider: str
    allowed: float

    def losses(self, expected: Sequence[Outputs], actual: Sequence[Outputs]) -> list[list[Loss]]:
        """The losses of the outputs of each run."""
        both = [*zip(expected, actual, strict=True)]
        if any(len(first) != len(second) for first, second in both):
            raise UsageError(
                f"{self.first.path} and {self.second.path} have different numbers of outputs: they are not of one model"
            )
        pairs = [zip(first.items(), second.values(), strict=True) for first, second in both]
        return [[measure_loss(name, array, other, self.allowed) for (name, array), other in run] for run in pairs]

    def worse_losses(self, expected: Sequence[Outputs], variants: Sequence[Sequence[Outputs]]) -> list[list[Loss]]:
        """The losses of the outputs of each run, in the worst variant in which the second file was run."""
        losses = [self.losses(expected, variant) for variant in variants]
        return [
            [max(of_ways, key=weight_of) for of_ways in zip(*run, strict=True)] for run in zip(*losses, strict=True)
        ]

    def notes_on_exactness(self, expected: Sequence[Outputs], variants: Sequence[Sequence[Outputs]]) -> list[str]:
        """A line on the worst loss as this processor computes, and with exact integers, if both were run."""
        if len(variants) < 2:
            return []
        here, exact = (max(map(weight_of, chain(*self.losses(expected, variant))), default=0) for variant in variants)
        return [f"off by {percent_text(here)} on this processor, by {percent_text(exact)} with exact integers"]

    def node_by_node(
        self, feeds: Outputs, fed: Outputs, pairs: Mapping[ir.Value, ir.Value]
    ) -> tuple[tuple[NodeByNode, NodeByNode], Mapping[ir.Value, Any]]:
        """Both files run node by node with the same random numbers, and the right arrays for values of the second.

        Args:
            feeds: The inputs of the first file.
            fed: Those of the second.
            pairs: Values of the second file to those of the first that they should be equal to.
        """
        one = run_node_by_node(self.first.model, feeds, {*pairs.values()})
        right = {second: one.arrays[first] for second, first in pairs.items() if first in one.arrays}
        return (one, run_node_by_node(self.second.model, fed, right, drawn=one.drawn)), right

    def outputs_to_compare(
        self,
        ran: RunOutputs,
        runs: Sequence[Outputs],
        fitting: Sequence[Outputs],
        worst: int,
        by_nodes: tuple[NodeByNode, NodeByNode],
    ) -> RunOutputs:
        """The outputs to compare, as ONNX Runtime computes them or, where it is wrong, as the nodes do.

        Args:
            ran: The outputs as users run both files.
            runs: The inputs of the first file in each run.
            fitting: Those of the second.
            worst: The run in which both files were run node by node, too.
        """
        files = self.first, self.second
        random = {
            place
            for tagged, run in zip(files, by_nodes, strict=True)
            for place, end in enumerate(tagged.model.graph.outputs)
            if end in run.random
        }

        def certain(outputs: Outputs) -> list[Any]:
            return [array for place, array in enumerate(arrays_in(outputs).values()) if place not in random]

        one, two = (certain(run.outputs) if run.outputs is not None else None for run in by_nodes)
        if one is None:
            return ran
        expected, notes = ran.expected, list[str]()
        as_run = certain(ran.expected[worst]), certain(ran.actual[worst])

        def cause_of(place: int, feeds: Outputs) -> str:
            wrong = [each for each, pair in enumerate(zip(one, as_run[place], strict=False)) if not self._same([pair])]

            def agrees(again: Outputs) -> bool:
                return bool(again) and self._same((one[each], certain(again)[each]) for each in wrong)

            with runnable(files[place].path, files[place].encoding) as file:
                return cause_in_runtime(file, feeds, agrees, self.provider)

        if not self._same(zip(one, as_run[0], strict=False)) and (cause := cause_of(0, runs[worst])):
            others = [
                by_nodes[0] if run == worst else run_node_by_node(self.first.model, runs[run], ())
                for run in range(len(runs))
            ]
            if all(run.outputs is not None for run in others):
                expected = [arrays_in(run.outputs or {}) for run in others]
                notes.append(
                    f"{self.first.path} itself is right, but {cause} makes its outputs wrong: compared with what its "
                    "nodes compute one by one"
                )
        judged = replace(ran, expected=expected, notes=notes)
        is_right = two is not None and self._same(zip(one, two, strict=False))
        if not is_right or self._same(zip(one, as_run[1], strict=False)):
            return judged
        cause = cause_of(1, fitting[worst])
        if not cause or not self._same(zip(*as_run, strict=False)):
            return replace(judged, cause=cause)
        both = f"in ONNX Runtime both files compute something else, the same: {cause} is to blame"
        return replace(ran, notes=[both])

    def _same(self, pairs: Iterable[tuple[Any, Any]]) -> bool:
        return all(measure_loss("", *both, self.allowed).difference.status != "differ" for both in pairs)

    def with_same_numbers(self, losses: Sequence[Loss], by_nodes: tuple[NodeByNode, NodeByNode]) -> list[Loss]:
        """The losses; of outputs that depend on random numbers, those of runs node by node with the same numbers."""
        one, two = by_nodes
        if not one.random and not two.random:
            return [*losses]
        ends = (self.first.model.graph.outputs, self.second.model.graph.outputs)
        judged = []
        for loss, first, second in zip(losses, *ends, strict=False):
            name = loss.difference.name
            if first not in one.random and second not in two.random:
                judged.append(loss)
            elif one.outputs is None or two.outputs is None or second in two.unlike:
                judged.append(Loss(difference=changed(loss.difference, status="not compared", reason=RANDOM)))
            else:
                judged.append(
                    measure_loss(name, one.outputs[first.name or ""], two.outputs[second.name or ""], self.allowed)
                )
        return judged
