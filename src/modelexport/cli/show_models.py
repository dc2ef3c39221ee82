"""The text of ``modelexport hierarchy``, ``inputs`` and ``internals``: a model that is not exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modelexport.core.calls import CallTree, ModuleCall, TensorSpec, TracedCall
from modelexport.core.module_tree import ModuleTree
from modelexport.core.tags import Tags
from modelexport.core.text import align, indent, plural

if TYPE_CHECKING:
    from modelexport.capture.internals.internals_report import Internals
    from modelexport.core.uncalled_modules import Comparison
    from modelexport.pytorch.hierarchy_overview import HierarchyOverview

HierarchyMode = Literal["static", "traced", "compare", "trace"]


def format_hierarchy(mode: HierarchyMode, shown: HierarchyOverview) -> str:
    """The hierarchy of a model as aligned text.

    Args:
        mode: ``static`` is the tree of modules, ``traced`` the tree of calls, ``trace`` a line for each entry and
            exit of a call, ``compare`` the modules with their status in the run; all but the first need a run.
        shown: With tags, ``traced`` and ``trace`` show only levels, by the segments of their tags, with addresses.
    """
    if mode == "static":
        return _format_modules(shown.tree, shown.static_tags)
    assert shown.calls is not None
    assert shown.comparison is not None
    if mode == "compare":
        return _format_comparison(shown.tree, shown.comparison, shown.static_tags, shown.tags)
    return (_format_calls if mode == "traced" else _format_steps)(shown.tree, shown.calls, shown.tags)


def _format_modules(tree: ModuleTree, tags: Tags | None) -> str:
    rows: list[tuple[object, ...]] = [("MODULE", "CLASS", "PARAMETERS", *(["TAG"] if tags else []), "")]
    for module in tree:
        also = f"also {', '.join(module.aliases)}" if module.aliases else ""
        tag = [tags.module_tag(module.path)] if tags is not None else []
        rows.append((indent(module.depth, module.name or "."), module.class_name, module.parameters or "", *tag, also))
    root = tree.root
    trainable = "all trainable" if root.trainable == root.parameters else f"{root.trainable:,} trainable"
    summary = f"{plural(len(tree) - 1, 'module')} below the root, {root.parameters:,} parameters, {trainable}"
    return f"{align(rows, right={2})}\n\n{summary}"


def _format_comparison(tree: ModuleTree, comparison: Comparison, static: Tags | None, traced: Tags | None) -> str:
    rows: list[tuple[object, ...]] = [("MODULE", "CLASS", "CALLS", "")]
    moved = []
    for module in comparison.modules:
        place = tree[module.path]
        why = "" if module.calls else module.status.value
        rows.append((indent(place.depth, place.name or "."), module.class_name, module.calls, why))
        if module.calls and static is not None and traced is not None:
            by_holder, by_caller = static.module_tag(module.path), traced.module_tag(module.path)
            if by_holder != by_caller:
                moved.append(f"  {module.path}: {by_holder} by its place in the tree, {by_caller} by its caller")
    called, never = len(comparison.called), comparison.never_called
    summary = f"{plural(called + len(never), 'module')}, the root included: {called} called, {len(never)} never called"
    listed = "".join(f"\n  {module.path}: {module.reason}" for module in never)
    differing = "\n".join(["", "", "tags that depend on the caller:", *moved]) if moved else ""
    return f"{align(rows, right={2})}\n\n{summary}{listed}{differing}"


@dataclass(frozen=True)
class _ShownCall:
    traced: TracedCall
    depth: int
    label: str
    what: str
    """The address after a segment, or the class after an address."""


def _format_calls(tree: ModuleTree, calls: CallTree, tags: Tags | None) -> str:
    shown = _shown_calls(tree, calls, tags)
    numbers: dict[ModuleCall, list[int]] = {call.traced.call: [] for call in shown}
    for number, call, _ in _steps(shown):
        numbers[call.traced.call].append(number)
    rows = [("CALL", "ADDRESS" if tags else "CLASS", "STEPS", "INPUTS -> OUTPUTS")]
    for call in shown:
        traced = call.traced
        steps = "not run" if traced.enter is None else "-".join(map(str, numbers[traced.call]))
        shapes = f"{_shapes(traced.inputs)} -> {_shapes(traced.outputs)}"
        rows.append((indent(call.depth, call.label), call.what, steps, shapes))
    return f"{align(rows, right={2})}\n\n{_calls_summary(shown)}"


def _format_steps(tree: ModuleTree, calls: CallTree, tags: Tags | None) -> str:
    shown = _shown_calls(tree, calls, tags)
    rows: list[tuple[object, ...]] = [("STEP", "", "CALL", "ADDRESS" if tags else "CLASS", "TENSORS")]
    for number, call, event in _steps(shown):
        tensors = call.traced.inputs if event == "enter" else call.traced.outputs
        rows.append((number, event, indent(call.depth - 1, call.label), call.what, _shapes(tensors, names=True)))
    return f"{align(rows)}\n\n{_calls_summary(shown)}"


def _shown_calls(tree: ModuleTree, calls: CallTree, tags: Tags | None) -> list[_ShownCall]:
    """All calls, labeled by their address below their caller, or only the levels, labeled by their segment."""
    shown = []
    for traced in calls:
        call, parent = traced.call, traced.parent
        if tags is None:
            label = str(call).removeprefix(f"{parent.path}." if parent is not None and parent.path else "")
            shown.append(_ShownCall(traced, traced.depth, label, tree[call.path].class_name))
        elif tags.is_level(call.path):
            segments = tags.namespace(call).split("/")
            shown.append(_ShownCall(traced, len(segments) - 1, segments[-1], str(call)))
    return shown


def _steps(shown: Sequence[_ShownCall]) -> list[tuple[int, _ShownCall, Literal["enter", "exit"]]]:
    """The entry and exit of each of the calls below the root, in order, numbered from 1."""
    events: list[tuple[int, _ShownCall, Literal["enter", "exit"]]] = []
    for call in shown:
        if call.depth and call.traced.enter is not None and call.traced.exit is not None:
            events += [(call.traced.enter, call, "enter"), (call.traced.exit, call, "exit")]
    events.sort(key=lambda event: event[0])
    return [(number, call, event) for number, (_, call, event) in enumerate(events, start=1)]


def _calls_summary(shown: Sequence[_ShownCall]) -> str:
    below = [call for call in shown if call.depth]
    modules = len({call.traced.call.path for call in below})
    deepest = max(call.depth for call in shown) + 1
    steps = plural(len(_steps(shown)), "step")
    return f"{plural(modules, 'module')} below the root, {plural(len(below), 'call')}, {steps}, {deepest} deep"


def _shapes(tensors: Iterable[TensorSpec], *, names: bool = False) -> str:
    listed = [
        f"{tensor.name + ' ' if names else ''}{tensor.dtype}[{','.join(map(str, tensor.shape))}]" for tensor in tensors
    ]
    return ", ".join(listed) or "()"


def format_inputs(described: Mapping[str, Mapping[str, object]]) -> str:
    """Example inputs, one on each line: name, element type and shape, smallest and largest element."""
    rows = [("INPUT", "TYPE", "LEAST", "LARGEST")]
    for name, facts in described.items():
        sizes = ", ".join(map(str, facts["shape"])) if isinstance(facts["shape"], list) else ""
        rows.append((name, f"{facts['dtype']}[{sizes}]", f"{facts['least']}", f"{facts['largest']}"))
    return align(rows, right={2, 3})


def format_internals(internals: Internals) -> str:
    """The map from module to scope name, the quality of names, and the stages of each exporter."""
    parts = []
    if internals.module_map:
        rows = [("MODULE", "SCOPE")]
        for entry in internals.module_map:
            above, _, last = entry.path.rpartition(".")
            depth = above.count(".") + 2 if above else int(bool(entry.path))
            rows.append((indent(depth, last or "."), entry.scope or "not in the map"))
        parts.append(align(rows))
        quality = (("module map", internals.map_quality), ("captured nodes", internals.scope_quality))
        head = ("SCOPE NAMES OF", "PLAIN", "CLASS", "HIERARCHY", "NONE", "DIFFERENT")
        counts = (
            (name, counted.plain, counted.class_scopes, counted.full_hierarchies, counted.none, counted.different)
            for name, counted in quality
        )
        parts.append(align([head, *counts]))
    stages = [(front_end.name, stage) for front_end in internals.front_ends for stage in front_end.stages]
    table = (
        (name, stage.name, stage.graph, stage.nodes, stage.located, stage.calls, stage.bytes) for name, stage in stages
    )
    parts.append(align([("EXPORTER", "STAGE", "GRAPH", "NODES", "LOCATED", "CALLS", "BYTES"), *table]))
    records = (
        (name, stage.name, key, facts.nodes, facts.bytes)
        for name, stage in stages
        for key, facts in stage.keys.items()
        if facts.bytes is not None
    )
    parts.append(align([("EXPORTER", "STAGE", "RECORD", "NODES", "BYTES"), *records], right={3, 4}))
    parts += [f"{way.name} failed: {way.error}" for way in internals.front_ends if way.error]
    called = f"{internals.modules_called:,} of {plural(internals.modules, 'module')}"
    parts.append(f"one run makes {plural(internals.calls, 'call')} of {called}, the root included")
    return "\n\n".join(parts)
