"""Changes that make a file right on a device, each tried there before it is made."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from modelexport.core.calls import ModuleCall
from modelexport.core.text import plural
from modelexport.files.atomic_writing import scratch
from modelexport.files.recipe_files import Recipe, Rule
from modelexport.format.keys import RECIPE_SUFFIX
from modelexport.graph.copies import copy_of
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.devices.device_check import check, is_owned
from modelexport.tools.devices.device_regions import RegionCutter, error_between
from modelexport.tools.devices.device_report import DeviceReport, FoundChange, FoundChanges, RegionReport
from modelexport.tools.devices.judged_regions import RegionRunner, judge
from modelexport.tools.quantize.changes_for_devices import CHANGES, change_nodes
from modelexport.tools.quantize.quantize import quantize

_ROUNDS = 5
"""How often a changed file is looked at again."""
_MORE_PRECISE = ("int16", "float", "processor")
"""Changes for what is not wrong, but not precise enough."""
_UNITS = 24
"""About how many modules are compared to find those that need more precision."""


def find_changes(
    regions: RegionCutter,
    report: DeviceReport,
    output: Path,
    runs: RegionRunner,
    tell: Callable[[str], None] = lambda step: None,
) -> FoundChanges:
    """Change what is wrong on a device, and write the file that is the least wrong there, with its recipe.

    Each change is tried on the device, on the smallest wrong region. Those that make it right are made in the file, and
    the file is looked at again: behind what was wrong something else may be. If nothing is wrong and the types of the
    device cost more than the bound, the modules that lose most get a more precise type.
    """
    with scratch(output.parent) as folder:
        search = _Search(regions, runs, report.bound, folder, tell)
        unchanged = search.change_wrong(report)
        if not search.report.agrees:
            search.change_imprecise()
        if search.steps:
            recipe = Recipe(search.rules, (f"made for {runs.device}",))
            quantize(regions.tagged.path, output, recipe=recipe, check_runtime=False)
        whole = search.report.whole
        return FoundChanges(
            path=str(output) if search.steps else "",
            recipe=str(output.with_suffix(RECIPE_SUFFIX)) if search.steps else "",
            steps=search.steps,
            unchanged=[] if search.report.agrees else unchanged,
            status=whole.status,
            error=whole.error,
            rounding=whole.rounding,
            moved=error_between(regions.whole().outputs, search.regions.whole().outputs),
            nodes=whole.nodes,
        )


class _Search:
    """Changes that were found so far."""

    def __init__(
        self,
        regions: RegionCutter,
        runs: RegionRunner,
        bound: float,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._unchanged, self._runs, self._bound = regions, runs, bound
        self._folder, self._tell, self._files = folder, tell, 0
        self.steps: list[FoundChange] = []
        self.regions = regions
        """Those of the file with the changes of the steps."""

    @property
    def file(self) -> TaggedFile:
        """The file with the changes of the steps."""
        return self.regions.tagged

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The steps as a recipe has them."""
        return tuple(map(_rule, self.steps))

    def change_wrong(self, report: DeviceReport) -> list[str]:
        """Change wrong regions, round by round; returns the addresses of those that no change makes right."""
        self.report, unchanged = report, list[str]()
        for _ in range(_ROUNDS):
            steps = list(map(self._first_step, self.report.culprits))
            pairs = zip(self.report.culprits, steps, strict=True)
            unchanged = [culprit.address for culprit, step in pairs if step is None]
            if not any(steps):
                break
            self.steps += [step for step in steps if step is not None]
            self._look_again()
        return unchanged

    def change_imprecise(self) -> None:
        """Give the fewest modules a more precise type, those first whose error is the largest."""
        opened, level = self._level()
        units = sorted(self._units(opened, level), key=lambda unit: -unit[0])
        for change in _MORE_PRECISE:
            steps = [
                FoundChange(address=call.address, change=change, nodes=names if call in opened else [], before=error)
                for error, call, names in units
                if change_nodes(copy_of(self.file.model), change, names)
            ]
            if steps and self._agrees(steps):
                count = bisect_left(range(1, len(steps)), True, key=lambda count: self._agrees(steps[:count])) + 1
                self.steps += steps[:count]
                self._look_again()
                return

    def _look_again(self) -> None:
        """Make the file with the changes of the steps, and find what is wrong with it."""
        self.regions = self._changed(self.rules)
        self.report = check(self.regions, self._runs, bound=self._bound, tell=self._tell)

    def _agrees(self, steps: Sequence[FoundChange]) -> bool:
        """Whether the file is within the bound with more steps."""
        self._tell(f"{plural(len(steps), 'module')}: {CHANGES[steps[0].change].words}")
        region = self._changed((*self.rules, *map(_rule, steps))).whole()
        return self._runs.run(region).error <= self._bound

    def _level(self) -> tuple[list[ModuleCall], list[ModuleCall]]:
        """The calls that were opened, and the calls inside them: of about the same depth, and enough to be compared."""
        children = self.file.calls.children
        opened, level = list[ModuleCall](), [next(iter(self.file.calls)).call]
        while any(children[call] for call in level) and len(level) + len(opened) < _UNITS:
            opened += [call for call in level if children[call]]
            level = [inner for call in level for inner in (children[call] or [call])]
        return opened, level

    def _units(
        self, opened: Sequence[ModuleCall], level: Sequence[ModuleCall]
    ) -> Iterator[tuple[float, ModuleCall, list[str]]]:
        """Errors of calls that each run alone on the device, with their nodes; of opened ones, only what they own."""
        for call in (*opened, *level):
            nodes = [node for node in self.file.nodes_of(call) if node.graph is self.file.model.graph]
            nodes = [node for node in nodes if call not in opened or is_owned(node, call)]
            if (region := self.regions.of_nodes(str(call), nodes, [call])) is not None:
                self._tell(str(call))
                yield self._runs.run(region).error, call, [node.name or "" for node in nodes]

    def _changed(self, rules: Sequence[Rule]) -> RegionCutter:
        self._files += 1
        path = self._folder / f"{self._files}.onnx"
        quantize(self._unchanged.tagged.path, path, recipe=Recipe(tuple(rules)), check_runtime=False)
        return RegionCutter(read_tagged(path), self._unchanged.inputs)

    def _first_step(self, culprit: RegionReport) -> FoundChange | None:
        """The first change that makes a wrong region right."""
        call = self.file.find(culprit.address or ".")
        names = set(culprit.node_names) or {node.name or "" for node in self.file.nodes_of(call)}
        nodes = [node for node in self.file.model.graph if node.name in names and node.op_type != "Constant"]
        region = self.regions.of_nodes(str(call), nodes, [call])
        if region is None:
            return None
        chosen, operators = [node.name or "" for node in nodes], [node.op_type for node in nodes]
        for change in CHANGES:
            model = copy_of(region.model)
            if not change_nodes(model, change, chosen):
                continue
            self._tell(f"{culprit.address or '.'}: {CHANGES[change].words}")
            if (changed := region.with_model(model)) is None:
                continue
            result = self._runs.run(changed)
            if judge(changed, result, self._runs.device, self._bound)[0] in ("agree", "rounding"):
                step = FoundChange(address=culprit.address, change=change, nodes=chosen, operators=operators)
                return msgspec.structs.replace(step, before=culprit.error, after=result.error)
        return None


def _rule(step: FoundChange) -> Rule:
    return Rule(step.address or ".", step.change, tuple(step.nodes))
