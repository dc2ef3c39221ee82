"""What a person reads in a terminal: ``format_*`` returns it, ``print_*`` writes it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec

from modelexport.core import CallTree, ModuleCall, ModuleTree, TensorSpec, TracedCall
from modelexport.tags import Tags

if TYPE_CHECKING:
    from modelexport.adopt import Adopted
    from modelexport.against import AgainstReport, CallLoss, Loss
    from modelexport.comparison import Difference
    from modelexport.extract import Extracted
    from modelexport.hierarchy.compare import Comparison
    from modelexport.linking import WeightsSummary
    from modelexport.read import NodeRow
    from modelexport.result import ExportResult
    from modelexport.retag import RetagReport
    from modelexport.schema import Coverage
    from modelexport.tree import TreeRow
    from modelexport.verdicts import CallVerdict, VerifyReport

HierarchyMode = Literal["static", "traced", "compare", "trace"]


def format_hierarchy(
    mode: HierarchyMode,
    tree: ModuleTree,
    calls: CallTree | None = None,
    *,
    tags: Tags | None = None,
    comparison: Comparison | None = None,
) -> str:
    """The hierarchy of a model as aligned text.

    Args:
        mode: ``static`` is the tree of modules, ``traced`` the tree of calls, ``trace`` every entering and leaving of a
            call as a line of its own, ``compare`` the modules with what became of them in the run.
        calls: Needed for ``traced`` and ``trace``.
        tags: With it, ``traced`` and ``trace`` show the levels only, under the segments of their tags, with addresses.
        comparison: Needed for ``compare``.

    Raises:
        ValueError: What the mode needs is missing.
    """
    match mode:
        case "static":
            return _format_modules(tree)
        case "compare" if comparison is not None:
            return _format_comparison(tree, comparison)
        case "traced" if calls is not None:
            return _format_calls(tree, calls, tags)
        case "trace" if calls is not None:
            return _format_steps(tree, calls, tags)
    raise ValueError(f"mode {mode} needs {'a comparison' if mode == 'compare' else 'calls'}")


def print_hierarchy(
    mode: HierarchyMode,
    tree: ModuleTree,
    calls: CallTree | None = None,
    *,
    tags: Tags | None = None,
    comparison: Comparison | None = None,
    file: TextIO | None = None,
) -> None:
    """Write :func:`format_hierarchy` to ``file``, standard output by default."""
    print(format_hierarchy(mode, tree, calls, tags=tags, comparison=comparison), file=file or sys.stdout)


def _format_modules(tree: ModuleTree) -> str:
    rows = [("MODULE", "CLASS", "PARAMETERS", "")]
    for module in tree:
        also = f"also {', '.join(module.aliases)}" if module.aliases else ""
        count = f"{module.parameters:,}" if module.parameters else ""
        rows.append((_indent(module.depth, module.name or "."), module.class_name, count, also))
    root = tree.root
    trainable = "all trainable" if root.trainable == root.parameters else f"{root.trainable:,} trainable"
    summary = f"{_plural(len(tree) - 1, 'module')} below the root, {root.parameters:,} parameters, {trainable}"
    return f"{_align(rows, right={2})}\n\n{summary}"


def _format_comparison(tree: ModuleTree, comparison: Comparison) -> str:
    rows = [("MODULE", "CLASS", "CALLS", "")]
    for module in comparison.modules:
        place = tree[module.path]
        why = "" if module.calls else module.status.value
        rows.append((_indent(place.depth, place.name or "."), module.class_name, str(module.calls), why))
    called, never = len(comparison.called), comparison.never_called
    summary = f"{_plural(called + len(never), 'module')}, the root included: {called} called, {len(never)} never called"
    listed = "".join(f"\n  {module.path}: {module.reason}" for module in never)
    return f"{_align(rows, right={2})}\n\n{summary}{listed}"


@dataclass(frozen=True)
class _ShownCall:
    traced: TracedCall
    depth: int
    label: str
    what: str
    """The address next to a segment, the class next to an address."""


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
        rows.append((_indent(call.depth, call.label), call.what, steps, shapes))
    return f"{_align(rows, right={2})}\n\n{_calls_summary(shown)}"


def _format_steps(tree: ModuleTree, calls: CallTree, tags: Tags | None) -> str:
    shown = _shown_calls(tree, calls, tags)
    rows = [("STEP", "", "CALL", "ADDRESS" if tags else "CLASS", "TENSORS")]
    for number, call, event in _steps(shown):
        tensors = call.traced.inputs if event == "enter" else call.traced.outputs
        rows.append((str(number), event, _indent(call.depth - 1, call.label), call.what, _shapes(tensors, names=True)))
    return f"{_align(rows, right={0})}\n\n{_calls_summary(shown)}"


def _shown_calls(tree: ModuleTree, calls: CallTree, tags: Tags | None) -> list[_ShownCall]:
    """All calls, labelled by their address below their caller, or the levels only, labelled by their segment."""
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
    """Entering and leaving each of the calls below the root, in order, numbered from 1."""
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
    steps = _plural(len(_steps(shown)), "step")
    return f"{_plural(modules, 'module')} below the root, {_plural(len(below), 'call')}, {steps}, {deepest} deep"


def _shapes(tensors: Iterable[TensorSpec], *, names: bool = False) -> str:
    listed = [
        f"{tensor.name + ' ' if names else ''}{tensor.dtype}[{','.join(map(str, tensor.shape))}]" for tensor in tensors
    ]
    return ", ".join(listed) or "()"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _indent(depth: int, text: str) -> str:
    return "  " * depth + text


def _align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """The rows with their columns under one another; the columns in ``right`` are set flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def format_tree(rows: Sequence[TreeRow], coverage: Coverage, untagged: Mapping[str, int] | None = None) -> str:
    """The calls that have nodes, with how many, and what their own are; last, the nodes that belong to no call."""
    table = [("MODULE", "CALL", "NODES", "OWN OPERATORS")]
    for row in rows:
        if row.nodes:
            segment = row.tag.rpartition("/")[2]
            table.append((_indent(row.depth, segment), row.address or ".", f"{row.nodes:,}", _operators(row.own)))
    if untagged:
        table.append(("(no module known)", "", f"{sum(untagged.values()):,}", _operators(untagged)))
    empty = sum(not row.nodes for row in rows)
    without = f"; {_plural(empty, 'call')} without nodes not shown" if empty else ""
    return f"{_align(table, right={2})}\n\n{format_coverage(coverage)}{without}"


def print_tree(rows: Sequence[TreeRow], coverage: Coverage, untagged: Mapping[str, int] | None = None) -> None:
    """Write :func:`format_tree` to standard output."""
    print(format_tree(rows, coverage, untagged))


def _operators(counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{operator} {count}" if count > 1 else operator for operator, count in counts.items())
    return _shortened(listed, 60)


def format_coverage(coverage: Coverage) -> str:
    """How many nodes are known by which evidence, apart."""
    counts = (f"{getattr(coverage, name):,} {name}" for name in coverage.__struct_fields__)
    return f"nodes: {', '.join(counts)}"


def format_nodes(nodes: Sequence[NodeRow]) -> str:
    """Nodes, one a line: operator, name, the call that owns it and other owners, evidence."""
    table = [("OPERATOR", "NAME", "CALL", "EVIDENCE", "ALSO OWNED BY")]
    table += [(n.op_type, n.name, n.call or ".", n.evidence, ", ".join(c or "." for c in n.also)) for n in nodes]
    return f"{_align(table)}\n\n{_plural(len(nodes), 'node')}"


def print_nodes(nodes: Sequence[NodeRow]) -> None:
    """Write :func:`format_nodes` to standard output."""
    print(format_nodes(nodes))


def format_extracted(extracted: Sequence[Extracted]) -> str:
    """Extracted calls: a line for each, then its inputs and outputs."""
    lines = []
    for one in extracted:
        borrowed = f", {one.borrowed} of them from other calls" if one.borrowed else ""
        lines.append(
            f"{one.call} -> {one.path} ({_plural(one.nodes, 'node')}{borrowed}; {one.bytes:,} bytes of weights)"
        )
        for side, values in (("in ", one.inputs), ("out", one.outputs)):
            lines += [f"  {side} {v.name} {v.dtype}[{', '.join(map(str, v.shape))}]" for v in values]
    return "\n".join(lines)


def print_extracted(extracted: Sequence[Extracted]) -> None:
    """Write :func:`format_extracted` to standard output."""
    print(format_extracted(extracted))


def format_adopted(adopted: Adopted) -> str:
    """What a file was found to be: tree, coverage, sources, and what could not be told."""
    sources = ", ".join(f"{source} {count:,}" for source, count in adopted.sources.items())
    lines = [format_tree(adopted.tree, adopted.coverage, adopted.operators), f"sources: {sources or 'none'}"]
    if adopted.repeated:
        some = ", ".join(path or "." for path in adopted.repeated[:5])
        more = f" and {len(adopted.repeated) - 5} more" if len(adopted.repeated) > 5 else ""
        lines.append(f"perhaps several calls that look like one: {some}{more}")
    return "\n".join([*lines, f"wrote {', '.join(adopted.files)}"])


def print_adopted(adopted: Adopted) -> None:
    """Write :func:`format_adopted` to standard output."""
    print(format_adopted(adopted))


def format_export(result: ExportResult) -> str:
    """What an export made: tree, coverage, files, verification, time by stage."""
    lines = [format_tree(result.tree, result.coverage)]
    if result.verified is not None:
        lines.append(format_verification(result.verified))
    lines.append(f"wrote {', '.join(str(file) for file in result.files)}")
    lines += format_weights(result.weights)
    lines.append(", ".join(f"{stage} {spent:.1f} s" for stage, spent in result.seconds.items()))
    return "\n".join(lines)


def format_weights(weights: WeightsSummary) -> list[str]:
    """Where the weights are that are not in the model itself: a line for each place."""
    lines = []
    if weights.linked:
        how = ", ".join(f"{file} ({how})" for file, how in weights.linked.items())
        lines.append(f"weights: {weights.linked_bytes / 1e9:,.3f} GB linked, in {how}")
    if "hard link" in weights.linked.values():
        lines.append(
            "  a hard link is the same file under a second name: ONNX Runtime takes it, onnx.checker refuses it, and "
            "what changes the one in place changes the other"
        )
    if weights.copied_bytes:
        lines.append(f"weights: {weights.copied_bytes / 1e9:,.3f} GB in the data file")
    if weights.absent_bytes:
        lines.append(f"weights: {weights.absent_bytes / 1e9:,.3f} GB left out")
    if weights.made:
        some = [f"{name} ({operations})" for name, operations in list(weights.made.items())[:3]]
        more = f", and {len(weights.made) - 3} more, which the report lists" if len(weights.made) > 3 else ""
        lines.append(f"made while loading, not as in the checkpoint: {', '.join(some)}{more}")
    return lines


def format_verification(report: VerifyReport) -> str:
    """One line for each output that does not agree, or one line for all."""
    if report.agrees:
        outputs = _plural(len(report.outputs), "output")
        verb = "agrees" if len(report.outputs) == 1 else "agree"
        return f"verified: {outputs} {verb} with PyTorch, largest difference {report.largest:.1e}"
    wrong = [output for output in report.outputs if output.status != "agree"]
    return "\n".join(
        f"{output.name}: {output.status} ({output.reason}"
        + (f", largest difference {output.absolute:.1e})" if output.absolute is not None else ")")
        for output in wrong
    )


def format_verify(report: VerifyReport) -> str:
    """The first diverging module, the calls that differ or cannot be compared, and a line that sums them up."""
    lines = []
    if report.diverging is not None:
        first = report.diverging
        lines += [f"first diverging: {first.address or '.'}  {first.tag}", f"  {first.reason}"]
    lines += [f"{o.name}: {o.status} ({o.reason})" for o in report.outputs if o.status != "agree"]
    rows = [("MODULE", "CALL", "STATUS", "CHAINED", "ISOLATED", "")]
    rows += [
        (*_verdict_cells(call), _largest(call.chained), _largest(call.isolated), _shortened(call.reason, 100))
        for call in report.calls
        if call.status in ("differ", "not comparable")
    ]
    if len(rows) > 1:
        lines += ["", _align(rows, right={3, 4}), ""]
    statuses = Counter(call.status for call in report.calls)
    chained = max((call.chained.absolute or 0.0 for call in report.calls if call.chained), default=0.0)
    isolated = max((call.isolated.absolute or 0.0 for call in report.calls if call.isolated), default=0.0)
    summary = [
        f"{statuses['agree']:,} of {_plural(len(report.calls) - statuses['no nodes'], 'call')} with nodes agree",
        f"largest difference {chained:.1e} chained, {isolated:.1e} isolated",
    ]
    if report.parameters is not None:
        wrong = [*report.parameters.unaccounted, *report.parameters.differing]
        told = f"not in the file or not the model's: {', '.join(wrong)}" if wrong else "all the model's"
        summary.append(f"{_plural(report.parameters.used, 'parameter')} {told}")
    return "\n".join([*lines, "; ".join(summary)])


def verify_document(report: VerifyReport) -> dict[str, Any]:
    """What ``modelexport verify --json`` prints."""
    return {"agrees": report.agrees, "diverging": report.diverging, **msgspec.structs.asdict(report)}


def format_retag(report: RetagReport, most: int = 20) -> str:
    """What is known of a retagged file, and what is not."""
    common = f"{report.common:,} of {_plural(report.values, 'value')} come from the tagged file"
    lines = [f"{format_coverage(report.coverage)}; {common}"]
    for title, nodes in (("hold operations of several", report.fused), ("are between several", report.unclear)):
        if nodes:
            lines += ["", f"{_plural(len(nodes), 'node')} that {title} calls:"]
            rows = [(f"  {n.op_type}", n.name, ", ".join(_shortest(n.calls))) for n in nodes[:most]]
            lines += [_align(rows), *_left_out(nodes, most)]
    if report.initializers:
        count = _plural(len(report.initializers), "initializer")
        lines += ["", f"{count} that may come from any of these parameters:"]
        lines += [f"  {one.name}: {', '.join(one.parameter)}" for one in report.initializers[:most]]
        lines += _left_out(report.initializers, most)
    lines.append("")
    if report.unrecorded:
        count = _plural(report.unrecorded, "initializer")
        lines.append(f"{count} changed in a way that is not recorded: update-weights refuses them")
    if report.lost:
        lines.append(f"folded away for good: {_shortened(', '.join(report.lost), 200)}")
    if report.gone:
        lines.append(
            f"{_plural(len(report.gone), 'call')} without nodes now: {_shortened(', '.join(report.gone), 200)}"
        )
    if report.inlined:
        lines.append("local functions were replaced by their bodies")
    return "\n".join([*lines, f"wrote {', '.join(report.files)}"])


def _shortest(calls: Sequence[str], most: int = 4) -> list[str]:
    return [*calls[:most], *([f"and {len(calls) - most} more"] if len(calls) > most else [])]


def _left_out(listed: Sequence[object], most: int) -> list[str]:
    return [f"  and {len(listed) - most} more; --json lists all"] if len(listed) > most else []


def format_losses(report: AgainstReport, most: int = 20) -> str:
    """The calls that lose most, the worst on top, and a line that sums them up."""
    rows = [("MODULE", "CALL", "STATUS", "ISOLATED", "NORM", "CHAINED", "NORM", "COSINE")]
    ranked = report.ranked
    for call in ranked[:most]:
        made, through = call.isolated, call.chained
        rows.append(
            (
                *_verdict_cells(call),
                *_loss_cells(made),
                *_loss_cells(through),
                "" if through is None or through.cosine is None else f"{through.cosine:.6f}",
            )
        )
    left = f"{_plural(len(ranked) - most, 'call')} that lose less not shown" if len(ranked) > most else ""
    statuses = Counter(call.status for call in report.calls)
    summary = (
        f"{statuses['agree']:,} of {_plural(len(report.calls) - statuses['no nodes'], 'call')} with nodes agree, "
        f"{statuses['not comparable']:,} cannot be compared; inputs: {report.inputs}"
    )
    outputs = [
        f"{one.difference.name}: {one.difference.status}, {' of norm '.join(_loss_cells(one))}"
        for one in report.outputs
    ]
    return "\n".join([_align(rows, right={3, 4, 5, 6, 7}), *([left] if left else []), "", *outputs, summary])


def against_document(report: AgainstReport) -> dict[str, Any]:
    """What ``modelexport verify --against --json`` prints."""
    ranked = [call.address for call in report.ranked]
    return {"agrees": report.agrees, "ranked": ranked, **msgspec.structs.asdict(report)}


def _verdict_cells(call: CallVerdict | CallLoss) -> tuple[str, str, str]:
    depth = call.tag.count("/") - 1
    return _indent(depth, call.tag.rpartition("/")[2]), call.address or ".", call.status


def _largest(difference: Difference | None) -> str:
    return "" if difference is None or difference.absolute is None else f"{difference.absolute:.1e}"


def _loss_cells(loss: Loss | None) -> tuple[str, str]:
    if loss is None:
        return "", ""
    return _largest(loss.difference), "" if loss.norm is None else f"{loss.norm:.1e}"


def print_export(result: ExportResult) -> None:
    """Write :func:`format_export` to standard output."""
    print(format_export(result))


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rpartition(',')[0]}, ..."
