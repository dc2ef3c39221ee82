"""Text for a terminal: ``format_*`` returns it, ``print_*`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modelexport.cli.show_verification import format_verification
from modelexport.cli.terminal import styled
from modelexport.core.calls import CallTree, ModuleCall, TensorSpec, TracedCall
from modelexport.core.module_tree import ModuleTree
from modelexport.core.tags import Tags
from modelexport.core.text import align, first_few, indent, plural
from modelexport.tagged.tree import format_coverage

if TYPE_CHECKING:
    from modelexport.core.uncalled_modules import Comparison
    from modelexport.exporting.checks import FileCheck
    from modelexport.exporting.fusion import Fusion
    from modelexport.exporting.options import Options
    from modelexport.exporting.result import ExportResult
    from modelexport.surgery.extraction import Extracted
    from modelexport.tagged.file import NodeRow
    from modelexport.weights.storage import WeightsSummary

HierarchyMode = Literal["static", "traced", "compare", "trace"]


def format_hierarchy(
    mode: HierarchyMode,
    tree: ModuleTree,
    calls: CallTree | None = None,
    *,
    tags: Tags | None = None,
    static_tags: Tags | None = None,
    comparison: Comparison | None = None,
) -> str:
    """The hierarchy of a model as aligned text.

    Args:
        mode: ``static`` is the tree of modules, ``traced`` the tree of calls, ``trace`` a line for each entry and
            exit of a call, ``compare`` the modules with their status in the run.
        calls: Needed for ``traced`` and ``trace``.
        static_tags: With it, ``static`` shows the tag of each module, and ``compare`` the tags that differ in the run.
        tags: With it, ``traced`` and ``trace`` show only levels, by the segments of their tags, with addresses.
        comparison: Needed for ``compare``.

    Raises:
        ValueError: An argument that the mode needs is missing.
    """
    match mode:
        case "static":
            return _format_modules(tree, static_tags)
        case "compare" if comparison is not None:
            return _format_comparison(tree, comparison, static_tags, tags)
        case "traced" if calls is not None:
            return _format_calls(tree, calls, tags)
        case "trace" if calls is not None:
            return _format_steps(tree, calls, tags)
    raise ValueError(f"mode {mode} needs {'a comparison' if mode == 'compare' else 'calls'}")


def _format_modules(tree: ModuleTree, tags: Tags | None) -> str:
    rows: list[tuple[str, ...]] = [("MODULE", "CLASS", "PARAMETERS", *(["TAG"] if tags else []), "")]
    for module in tree:
        also = f"also {', '.join(module.aliases)}" if module.aliases else ""
        count = f"{module.parameters:,}" if module.parameters else ""
        tag = [tags.module_tag(module.path)] if tags is not None else []
        rows.append((indent(module.depth, module.name or "."), module.class_name, count, *tag, also))
    root = tree.root
    trainable = "all trainable" if root.trainable == root.parameters else f"{root.trainable:,} trainable"
    summary = f"{plural(len(tree) - 1, 'module')} below the root, {root.parameters:,} parameters, {trainable}"
    return f"{align(rows, right={2})}\n\n{summary}"


def _format_comparison(tree: ModuleTree, comparison: Comparison, static: Tags | None, traced: Tags | None) -> str:
    rows = [("MODULE", "CLASS", "CALLS", "")]
    moved = []
    for module in comparison.modules:
        place = tree[module.path]
        why = "" if module.calls else module.status.value
        rows.append((indent(place.depth, place.name or "."), module.class_name, str(module.calls), why))
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
    rows = [("STEP", "", "CALL", "ADDRESS" if tags else "CLASS", "TENSORS")]
    for number, call, event in _steps(shown):
        tensors = call.traced.inputs if event == "enter" else call.traced.outputs
        rows.append((str(number), event, indent(call.depth - 1, call.label), call.what, _shapes(tensors, names=True)))
    return f"{align(rows, right={0})}\n\n{_calls_summary(shown)}"


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


def format_nodes(nodes: Sequence[NodeRow]) -> str:
    """Nodes, one on each line: operator, name, the call that owns it, evidence, tag, other owners."""
    table = [("OPERATOR", "NAME", "CALL", "EVIDENCE", "TAG", "ALSO OWNED BY")]
    table += [
        (n.op_type, n.name, n.call or ".", n.evidence, n.source_module, ", ".join(c or "." for c in n.also))
        for n in nodes
    ]
    return f"{align(table)}\n\n{plural(len(nodes), 'node')}"


def format_inputs(described: Mapping[str, Mapping[str, object]]) -> str:
    """Example inputs, one on each line: name, element type and shape, smallest and largest element."""
    rows = [("INPUT", "TYPE", "LEAST", "LARGEST")]
    for name, one in described.items():
        sizes = ", ".join(map(str, one["shape"])) if isinstance(one["shape"], list) else ""
        rows.append((name, f"{one['dtype']}[{sizes}]", f"{one['least']}", f"{one['largest']}"))
    return align(rows, right={2, 3})


def format_extracted(extracted: Sequence[Extracted]) -> str:
    """Extracted calls: a line for each, then its inputs and outputs."""
    lines = []
    for one in extracted:
        borrowed = f", {one.borrowed} of them from other calls" if one.borrowed else ""
        lines.append(
            f"{one.call} -> {one.path} ({plural(one.nodes, 'node')}{borrowed}; {one.bytes:,} bytes of weights)"
        )
        for side, values in (("in ", one.inputs), ("out", one.outputs)):
            lines += [f"  {side} {v.name} {v.dtype}[{', '.join(map(str, v.shape))}]" for v in values]
    return "\n".join(lines)


def format_export(result: ExportResult) -> str:
    """The result of an export: what was written, what was proven, and what to do next."""
    calls = sum(row.nodes > 0 for row in result.tree)
    lines = [styled(f"wrote {result.path}: {plural(result.tree[0].nodes, 'node')} of {plural(calls, 'call')}", "bold")]
    lines += [f"  {format_coverage(result.coverage)}"]
    beside = [file.name for file in result.files if file != result.path]
    lines += [f"  beside it: {', '.join(beside)}"] if beside else []
    lines += [f"  {line}" for line in format_weights(result.weights)]
    if result.fusion is not None:
        lines += format_fusion(result.fusion)
    if constants := result.hierarchy.settings.constants:
        lines.append(f"kept as in the example: {', '.join(f'{name} = {value}' for name, value in constants.items())}")
    if result.check is not None:
        lines.append(styled(_format_check(result.check), "red" if result.check.status == "failed" else "green"))
    if result.verified is not None:
        lines.append(styled(format_verification(result.verified), "green" if result.verified.agrees else "red"))
    slowest = sorted(result.seconds.items(), key=lambda stage: -stage[1])[:3]
    most = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in slowest)
    lines.append(styled(f"{sum(result.seconds.values()):.1f} s: {most}", "dim"))
    return "\n".join([*lines, "next: " + _next_steps(result)])


def _next_steps(result: ExportResult) -> str:
    steps = [f"modelexport tree {result.path}"]
    if result.verified is None and result.check is not None and result.check.status == "passed":
        steps.append("export with --verify to compare every module call")
    return "; ".join([*steps, f"modelexport report {result.path} -o {result.path.with_suffix('.html')}"])


def format_fusion(fusion: Fusion) -> list[str]:
    """What was fused where: a line for all, one for each reason why an attention was not, one for lost boundaries."""
    where = ", ".join(f"{one.op_type} in {one.calls:,} of {one.of:,} {one.module_class}" for one in fusion.operators)
    lines = [f"fused for {fusion.target}: {fusion.before:,} nodes became {fusion.after:,}; {where or 'nothing found'}"]
    reasons: dict[str, list[str]] = {}
    for address, reason in fusion.unfused.items():
        reasons.setdefault(reason, []).append(address)
    lines += [f"no GroupQueryAttention in {_some(addresses)}: {reason}" for reason, addresses in reasons.items()]
    if fusion.lost:
        lines.append(
            f"not in the graph any more: what {_some(fusion.lost)} {'returns' if len(fusion.lost) == 1 else 'return'}"
        )
    return lines


def _some(addresses: Sequence[str]) -> str:
    return first_few((address or "." for address in addresses), 3)


def _format_check(check: FileCheck) -> str:
    where = f" ({check.step})" if check.step else ""
    if check.status == "passed":
        return f"check: passed; outputs within {check.largest or 0.0:.1e} of PyTorch's"
    return f"check: {check.status}{where}: {check.reason}"


def format_weights(weights: WeightsSummary) -> list[str]:
    """The places of weights outside the model file, a line for each."""
    lines = []
    if weights.linked:
        how = ", ".join(f"{file} ({how})" for file, how in weights.linked.items())
        lines.append(f"weights: {weights.linked_bytes / 1e9:,.3f} GB linked, in {how}")
    if "hard link" in weights.linked.values():
        lines.append(
            "  a hard link is the same file under a second name: ONNX Runtime accepts it, onnx.checker refuses it, and "
            "changing one in place changes the other"
        )
    if weights.copied_bytes:
        lines.append(f"weights: {weights.copied_bytes / 1e9:,.3f} GB in the data file")
    if weights.absent_bytes:
        lines.append(f"weights: {weights.absent_bytes / 1e9:,.3f} GB left out")
    if weights.made:
        some = [f"{name} ({operations})" for name, operations in list(weights.made.items())[:3]]
        more = f", and {len(weights.made) - 3} more, which the report lists" if len(weights.made) > 3 else ""
        lines.append(f"computed during loading, changed from the checkpoint: {', '.join(some)}{more}")
    return lines


def print_warnings(result: ExportResult, options: Options) -> None:
    """Write to standard error what a person has to know about the file."""
    from modelexport.exporting.report import told_of

    lines = [*result.notes, *(f"{one.kind}: {one.where}; {told_of(one.kind)}" for one in result.unrepeatable)]
    lines += [
        f"axis {axis.axis} of {axis.input} is not dynamic, it is {axis.size}: "
        f"{axis.call or 'the model itself'} fixes it ({axis.reason})"
        for axis in result.fixed
    ]
    if result.attempts:
        reasons = "; ".join(f"{one.frontend} failed: {one.reason.splitlines()[0]}" for one in result.attempts)
        lines.append(f"exported with {result.hierarchy.settings.frontend}; {reasons}")
    if options.tags.tags_as == "attributes":
        lines.append(
            "onnx.checker and ONNX Runtime refuse tags as attributes; "
            f"`modelexport strip {result.path} -o OUT.onnx` makes a file that they accept"
        )
    if result.check is not None and result.check.status == "passed" and result.check.reason:
        lines.append(f"check: {result.check.reason}")
    for line in lines:
        print(f"modelexport: warning: {line}", file=sys.stderr)
