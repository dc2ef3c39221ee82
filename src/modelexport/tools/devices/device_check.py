"""Which module of a file is wrong on a device: the whole first, then calls, then regions of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.text import shortened
from modelexport.errors import UsageError
from modelexport.graph.node_owners import owner_of
from modelexport.runtime.devices import CPU
from modelexport.runtime.runner_process import RunnerResult, inputs_with_dynamic_axes
from modelexport.runtime.saturating_products import saturation_notes
from modelexport.tools.devices.device_regions import ReferenceRegion, RegionCutter
from modelexport.tools.devices.device_report import (
    DeviceReport,
    Fallback,
    RegionReport,
    RegionStatus,
    TriedChange,
    count_nodes,
)
from modelexport.tools.devices.judged_regions import NoResultError, RegionRunner, judge
from modelexport.tools.devices.tried_changes import tried_changes
from modelexport.tools.devices.wrong_regions import smallest_region
from modelexport.traces.tolerances import ON_A_DEVICE

_REASONS = 3
"""Lines of a provider's log that are shown for an operator."""


def check(
    regions: RegionCutter,
    runs: RegionRunner,
    *,
    modules: Sequence[ModuleCall] = (),
    inputs: str = "given",
    bound: float = ON_A_DEVICE,
    tell: Callable[[str], None] = lambda step: None,
) -> DeviceReport:
    """Find what is wrong with a file on a device: the whole file is run first, then calls, then regions
    (:mod:`.device_regions`).
    """
    tagged, checker = regions.tagged, _DeviceCheck(regions, runs, bound, tell)
    whole = checker.whole()
    culprits = checker.wrong_in(next(iter(tagged.calls)).call) if whole.is_faulty else []
    for call in modules:
        if (region := checker.call(call)) is not None and region.is_faulty and not whole.is_faulty:
            culprits += checker.wrong_in(call)
    return DeviceReport(
        file=str(tagged.path),
        device=runs.device,
        inputs=inputs,
        bound=bound,
        regions=list(checker.looked_at.values()),
        culprits=culprits or ([whole] if whole.is_faulty else []),
        placed=checker.placed(),
        crossings=checker.crossings(),
        fallbacks=list(checker.fallbacks()),
        measured=runs.measured,
        notes=list(checker.notes()),
    )


class _DeviceCheck:
    def __init__(self, regions: RegionCutter, runs: RegionRunner, bound: float, tell: Callable[[str], None]) -> None:
        self._tagged, self._regions, self._runs, self._bound, self._tell = regions.tagged, regions, runs, bound, tell
        self.looked_at: dict[str, RegionReport] = {}
        self._reports: dict[tuple[ir.Node, ...], RegionReport] = {}
        self._root = next(iter(self._tagged.calls)).call
        self._result = RunnerResult(status="failed")
        """The result of the whole file."""

    def whole(self) -> RegionReport:
        self._tell("the whole")
        region = self._regions.whole()
        self._result = self._runs.run(region)
        return self._note(region, self._result, self._root)

    def call(self, call: ModuleCall) -> RegionReport | None:
        """A call alone; ``None`` if it has no nodes or cannot be cut out."""
        if str(call) in self.looked_at:
            return self.looked_at[str(call)]
        try:
            region = self._regions.of_call(call)
        except UsageError as error:  # in a function, or of a value without a type
            self._leave_out(call, error)
            return None
        if region is None:
            return None
        self._tell(str(call))
        try:
            result = self._runs.run(region)
        except NoResultError as error:
            self._leave_out(call, error)
            return None
        return self._note(region, result, call)

    def _leave_out(self, call: ModuleCall, error: UsageError) -> None:
        self.looked_at[str(call)] = self._report(call, "not compared", reason=str(error))

    def wrong_in(self, call: ModuleCall, *, alone: bool = True) -> list[RegionReport]:
        """The smallest wrong regions of a call.

        Args:
            alone: Whether the call itself was run, and is wrong.
        """
        culprits: list[RegionReport] = []
        for child in self._tagged.calls.children[call]:
            region = self.call(child)
            if region is None or region.status == "not compared":
                culprits += self.wrong_in(child, alone=False)
            elif region.is_faulty:
                culprits += self.wrong_in(child)
        if alone and not self._runs.runs_any_region:
            return culprits or [self.looked_at[str(call)]]
        if alone and not culprits:  # what is wrong is across its parts, or between them
            culprits.append(self._smallest(self._main_nodes(call), call))
        elif alone:
            between = [node for node in self._main_nodes(call) if is_owned(node, call)]
            if between and self._alone(between, call).is_faulty:  # beside a part
                culprits.append(self._smallest(between, call))
        return culprits

    def _main_nodes(self, call: ModuleCall) -> list[ir.Node]:
        """The nodes of a call in the main graph that compute something."""
        main = self._tagged.model.graph
        return [n for n in self._tagged.nodes_of(call) if n.graph is main and n.op_type != "Constant"]

    def _smallest(self, nodes: Sequence[ir.Node], call: ModuleCall) -> RegionReport:
        """The smallest wrong region of some nodes."""
        smallest = smallest_region(nodes, lambda some: self._alone(some, call).is_faulty)
        if len(nodes) == 1 or not (report := self._alone(smallest, call)).is_faulty:
            return self.looked_at.get(str(call)) or self._report(call, "off")
        self.looked_at[f"{call} {report.node_names}"] = report
        return report

    def _alone(self, nodes: Sequence[ir.Node], call: ModuleCall) -> RegionReport:
        """Some nodes of a call alone; each region is run once."""
        if (key := tuple(nodes)) not in self._reports:
            self._tell(name := f"{call}: {len(nodes)} nodes")
            names = {"node_names": [node.name or "" for node in nodes], "operators": [node.op_type for node in nodes]}
            region = self._regions.of_nodes(name, nodes, [call])
            judged = region and self._judged(region, self._runs.run(region), call, **names)
            self._reports[key] = judged or self._report(call, "not compared", **names)
        return self._reports[key]

    def _note(self, region: ReferenceRegion, result: RunnerResult, call: ModuleCall) -> RegionReport:
        report = self.looked_at[str(call)] = self._judged(region, result, call)
        return report

    def _judged(self, region: ReferenceRegion, result: RunnerResult, call: ModuleCall, **more: Any) -> RegionReport:
        status, rounding = judge(region, result, self._runs.device, self._bound)
        if status in ("failed", "crashed", "hung") and self._result.status == "ran":
            status = "not compared"  # as a part of the whole it runs
        error = result.error if result.error < float("inf") and status != "not compared" else None
        reason = result.message
        if status == "not compared" and result.status == "ran":
            reason = "an output is a sequence or empty, or its right numbers are not finite or cannot be computed"
        if status == "off" and error is None:
            reason = "an output has another shape, or is infinite or not a number"
        more |= {"nodes": count_nodes(result), "seconds": result.seconds, "reason": reason}
        return self._report(call, status, error=error, rounding=rounding, **more)

    def _report(self, call: ModuleCall, status: RegionStatus, **more: Any) -> RegionReport:
        return RegionReport(address=call.address, tag=self._tagged.tags[call], status=status, **more)

    # --- where it runs ---

    def _providers(self) -> dict[str, str]:
        """The provider of each node of the file that the runtime has kept."""
        names = {node.name for node in self._tagged.nodes}
        nodes = self._result.nodes.items()
        return {name: provider for provider, graphs in nodes for graph in graphs for name in graph if name in names}

    def placed(self) -> dict[str, dict[str, int]]:
        providers, counts_of = self._providers(), dict[str, Counter[str]]()
        for node in self._tagged.nodes:
            owner = owner_of(node)
            if owner is not None and node.name in providers:
                counts_of.setdefault(owner.call.address, Counter())[providers[node.name]] += 1
        return {address: dict(counts) for address, counts in counts_of.items()}

    def crossings(self) -> int:
        """How many values of a run go from one provider to another."""
        providers, crossing = self._providers(), set()
        for node in self._tagged.nodes:
            for value in node.inputs:
                maker = value.producer() if value is not None else None
                pair = [providers.get(end.name or "") for end in (maker, node) if end is not None]
                if len(pair) == 2 and None not in pair and pair[0] != pair[1]:
                    crossing.add((value, pair[1]))
        return len(crossing)

    def fallbacks(self) -> Iterator[Fallback]:
        """The operators that the device does not run, with what its log says about them."""
        provider = self._runs.device.provider
        left = {name for name, runs in self._providers().items() if runs != provider}
        nodes = [node for node in self._tagged.nodes if node.name in left]
        if provider == CPU or not nodes:
            return
        log = self._runs.run(self._regions.whole(), log=True).log.splitlines()
        by_operator: dict[str, list[ir.Node]] = {}
        for node in nodes:
            by_operator.setdefault(node.op_type, []).append(node)
        for operator, same in by_operator.items():
            names = [node.name or "" for node in same]
            calls = [str(owner.call) for node in same if (owner := owner_of(node))]
            yield Fallback(
                operator,
                names,
                calls=list(dict.fromkeys(calls)),
                example=f"{names[0]}: {_shapes(same[0].inputs)} -> {_shapes(same[0].outputs)}",
                reasons=list(_reasons(log, operator, names)),
                tried=self._changes_tried(same[0]),
            )

    def _changes_tried(self, node: ir.Node) -> list[TriedChange]:
        owner = owner_of(node)
        if not self._runs.runs_any_region or owner is None or node.graph is not self._tagged.model.graph:
            return []
        self._tell(f"what puts {node.op_type} on {self._runs.device.name}")
        region = self._regions.of_nodes(f"{owner.call}: {node.op_type}", [node], owner.calls)
        return [] if region is None else list(tried_changes(region, node, self._runs, self._bound))

    def notes(self) -> Iterator[str]:
        device, whole = self._runs.device, self._regions.whole()
        if bound := [
            f"{name} {list(whole.inputs[name].shape)}" for name in inputs_with_dynamic_axes(whole.model, whole.inputs)
        ]:
            yield f"dynamic axes had the sizes of the inputs, as devices that compile need: {', '.join(bound)}"
        if device.simulated:
            yield f"{device.name} is a simulator here: its times tell nothing about the device"
        if self._result.nodes and device.provider != CPU and device.provider not in self._result.nodes:
            yield f"no node runs on {device.name}: the CPU ran the whole"
        yield from saturation_notes(self._tagged.nodes, self._tagged.path)


def is_owned(node: ir.Node, call: ModuleCall) -> bool:
    """Whether a call itself owns a node."""
    owner = owner_of(node)
    return owner is not None and call in owner.calls


def _shapes(values: Iterable[ir.Value | None]) -> str:
    """The types and shapes of values."""
    known = (value for value in values if value is not None)
    return ", ".join(f"{value.dtype or '?'}{value.shape if value.shape is not None else ''}" for value in known)


def _reasons(log: Iterable[str], operator: str, names: Sequence[str]) -> Iterator[str]:
    """The lines of a provider's log that name an operator's nodes as not supported."""
    lines = dict.fromkeys(
        shortened(line.split("] ", 1)[-1].strip(), 200)
        for line in log
        if re.search("support|fail", line, re.I) and any(name in line for name in [*names, operator])
        if "PASSED" not in line
    )
    yield from list(lines)[:_REASONS]
