"""The text of ``modelexport compare``: the files side by side, then the modules that differ.

Calls with the same differences and with addresses that differ only in numbers share a line: ``encoder.layer.0…11``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from modelexport.core.calls import ModuleCall
from modelexport.core.owners import Evidence
from modelexport.core.tags import class_in_tag
from modelexport.core.text import align, as_code, as_markdown, bytes_text, plural, shortened
from modelexport.traces.tolerances import CALLED_THE_SAME

if TYPE_CHECKING:
    from modelexport.tools.compare.change_checks import Aspect, ChangeReport
    from modelexport.tools.compare.comparison_report import CallChange, FileComparison, FileFacts, Held, OnlyInOne

T = TypeVar("T")
MOST = 30
"""The largest number of lines of one kind, so that the text fits a screen or two."""
_LINES = ("size", "opset", "encoding", "version", "calls", "nodes", "evidence", "parameters", "constants")
_NUMBER = "\0"


def format_comparison(comparison: FileComparison) -> str:
    """The comparison as text: facts, the calls in only one file, the calls that differ, and a summary line."""
    first, second = comparison.first, comparison.second
    parts = [_files(first, second, comparison.selected), _operators(first.operators, second.operators)]
    for facts, only in ((first, comparison.only_in_first), (second, comparison.only_in_second)):
        parts.append(_section(f"only in {facts.path}", [*_only(only)]))
    parts.append(_section("calls that differ", _changes(comparison.changed)))
    retagged = [change for change in comparison.changed if change.source_module or change.tag]
    if retagged:
        before, after = retagged[0].source_module or retagged[0].tag or ("", "")
        where = retagged[0].address or "."
        parts.append(f"tags differ in {plural(len(retagged), 'call')}, first in {where}: {before} -> {after}")
    entries = _grouped(comparison.entries, lambda entry: entry.key, lambda entry: str(entry.entry))
    rows = [(_span([e.key for e in group]), _arrow(*group[0].entry)) for group in entries]
    parts += [_section("state_dict entries that differ", rows), "\n".join(comparison.notes), _summary(comparison)]
    return "\n\n".join(part for part in parts if part)


def _files(first: FileFacts, second: FileFacts, selected: bool) -> str:
    """The facts of both files, one on each line; settings and packages only if they differ.

    If calls are selected, only the facts of these.
    """
    rows = [("", first.path, second.path), *_fact_rows(first, second, selected)]
    for kind in ("settings", "environment") if not selected else ():
        left, right = (_values(getattr(facts, kind)) for facts in (first, second))
        if not left or not right:
            continue
        rows += [
            (name, left.get(name, "-"), right.get(name, "-"))
            for name in {**left, **right}
            if left.get(name) != right.get(name)
        ]
    return align(rows)


def _fact_rows(first: FileFacts, second: FileFacts, selected: bool) -> list[tuple[str, str, str]]:
    rows = list(zip(_LINES, _fact_cells(first), _fact_cells(second), strict=True))
    return rows[_LINES.index("calls") :] if selected else rows


def _fact_cells(facts: FileFacts) -> Sequence[str]:
    coverage = facts.coverage
    opsets = ", ".join(f"{domain} {version}" if domain else str(version) for domain, version in facts.opsets.items())
    return (
        bytes_text(facts.bytes),
        opsets,
        facts.encoding,
        facts.version,
        f"{facts.calls:,}",
        f"{facts.nodes:,}",
        ", ".join(f"{getattr(coverage, kind):,} {kind}" for kind in Evidence),
        _held(facts.parameters),
        _held(facts.constants),
    )


def _values(facts: object) -> dict[str, str]:
    if facts is None:
        return {}
    plain = msgspec.to_builtins(facts)
    return {str(name): _value(value) for name, value in plain.items()}


def _value(value: Any) -> str:
    """A setting: of a list its entries, and of an object in it the first field, which says what it is."""
    if not isinstance(value, list):
        return str(value)
    return ", ".join(str(next(iter(entry.values()))) if isinstance(entry, dict) else str(entry) for entry in value)


def _held(held: Mapping[str, Held]) -> str:
    listed = (f"{group.initializers:,} {dtype} {bytes_text(group.bytes)}" for dtype, group in held.items())
    return ", ".join(listed) or "none"


def _operators(first: Mapping[str, int], second: Mapping[str, int]) -> str:
    pairs = [(name, first.get(name, 0), second.get(name, 0)) for name in sorted({*first, *second})]
    rows = [(name, f"{a:,}", f"{b:,}", f"{b - a:+,}") for name, a, b in pairs if a != b]
    if not rows:
        return ""
    shown = sorted(rows, key=lambda row: -abs(int(row[3].replace(",", ""))))[:MOST]
    left = f"\n{plural(len(rows) - MOST, 'operator')} with smaller differences not shown" if len(rows) > MOST else ""
    return align([("OPERATOR", "FIRST", "SECOND", ""), *shown], right={1, 2, 3}) + left


def _section(title: str, rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    left = [f"  and {len(rows) - MOST:,} more lines; --json lists all"] if len(rows) > MOST else []
    return "\n".join([f"{title}:", *(f"  {line}" for line in align(rows[:MOST]).splitlines()), *left])


def _change(change: CallChange) -> str:
    """The differences of one call except its tags; names of its own parameters without its address."""
    parts = []
    if change.class_name:
        parts.append(f"class {_arrow(*change.class_name)}")
    counts = [f"{b - a:+} {operator}" for operator, (a, b) in change.operators.items()]
    if counts:
        parts.append(shortened(", ".join(counts), 100))
    parts += [f"other attributes: {count} {operator}" for operator, count in change.attributes.items()]
    parts += [f"other constants: {count} {operator}" for operator, count in change.constants.items()]
    path = ModuleCall.parse(change.address).path
    for key, held in change.parameters.items():
        short = key.removeprefix(f"{path}.") if path else key
        parts.append(f"{short if short != key else _pattern(key)[0].replace(_NUMBER, '*')} {_arrow(*held)}")
    return "; ".join(parts)


def _arrow(before: str | None, after: str | None) -> str:
    return f"{before or 'none'} -> {after or 'none'}"


def _only(only: Sequence[OnlyInOne]) -> Iterator[tuple[str, str, str]]:
    """The names, the class and the sizes of calls that only one file has, those that differ in numbers together."""
    for group in _grouped(only, lambda call: call.address, lambda call: class_in_tag(call.tag)):
        calls, nodes = sum(call.calls for call in group), sum(call.nodes for call in group)
        sizes = f"{plural(calls, 'call')} with those inside, {plural(nodes, 'node')}"
        yield _span([call.address for call in group]), class_in_tag(group[0].tag), sizes


def _changes(changed: Sequence[CallChange]) -> list[tuple[str, str]]:
    """The names of calls and what differs in them, those of the same differences together."""
    changes = [(change.address, text) for change in changed if (text := _change(change))]
    groups = _grouped(changes, lambda pair: pair[0], lambda pair: pair[1])
    return [(_span([address for address, _ in group]), group[0][1]) for group in groups]


def _grouped(items: Iterable[T], name: Callable[[T], str], what: Callable[[T], str]) -> list[list[T]]:
    """Group items of the same text whose names differ only in numbers, at the place of the first of them."""
    groups: dict[tuple[str, str], list[T]] = {}
    for item in items:
        groups.setdefault((_pattern(name(item))[0], what(item)), []).append(item)
    return list(groups.values())


def _pattern(name: str) -> tuple[str, list[int]]:
    """An address with its numbers replaced, and the numbers: ``layer.*.out@*`` and 3, 1 for ``layer.3.out@1``.

    The numbers are replaced by a character that no name has; only a reader sees an asterisk.
    """
    call = ModuleCall.parse(name)
    parts = call.path.split(".")
    numbers = [int(part) for part in parts if part.isdecimal()]
    text = ".".join(_NUMBER if part.isdecimal() else part for part in parts)
    return (f"{text}@{_NUMBER}", [*numbers, call.index]) if call.index else (text, numbers)


def _span(names: Sequence[str]) -> str:
    """One name for several that differ only in numbers: ``encoder.layer.0…11.output (12)``."""
    pattern, _ = _pattern(names[0])
    columns = list(zip(*(_pattern(name)[1] for name in names), strict=True))
    pieces = pattern.split(_NUMBER)
    text = pieces[0] + "".join(_ranges(column) + piece for column, piece in zip(columns, pieces[1:], strict=True))
    return (text or ".") + (f" ({len(names)})" if len(names) > 1 else "")


def _ranges(numbers: Iterable[int]) -> str:
    """``0…2,5`` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}…{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _summary(comparison: FileComparison) -> str:
    both = comparison.same + len(comparison.changed)
    values = comparison.values
    values_text = "elements of parameters: not compared (use --values)"
    if values is not None:
        alike = values.equal + len(values.different)
        parameters = sum(held.initializers for held in comparison.first.parameters.values())
        listed = f": {shortened(', '.join(values.different), 100)}" if values.different else ""
        values_text = (
            f"{alike:,} of {plural(parameters, 'parameter')} are stored in the same way in both files; "
            f"{len(values.different):,} of these have other elements{listed}"
        )
    calls = plural(both, "selected call" if comparison.selected else "call")
    same = f"{comparison.same:,} of {calls} in both files are the same"
    return f"{same} in class, tags, and their own nodes' operators, attributes, constants and parameters\n{values_text}"


def format_changes(report: ChangeReport) -> str:
    """:func:`format_comparison`, then a line for each requested aspect."""
    lines = [f"{aspect}: {_verdict(report, aspect, 'the same')}" for aspect in report.asked]
    worse = [f"  {change.column} {change.first} -> {change.second}" for change in report.costs or () if change.worse]
    wrong = [
        f"  {output.name}: {output.status} ({output.reason})"
        for output in report.outputs or ()
        if output.status != "agree"
    ]
    text = "\n".join([*lines, *worse, *wrong])
    return "\n\n".join(part for part in (format_comparison(report.comparison), text) if part)


def _verdict(report: ChangeReport, aspect: Aspect, alike: str) -> str:
    """What is found of an aspect; of outputs also with which inputs, and the largest error if it exceeds rounding."""
    if aspect in report.failed:
        return "differs"
    if aspect != "outputs":
        return alike
    worst = max(report.outputs or (), key=lambda output: output.relative or 0.0, default=None)
    if worst is not None and (worst.relative or 0.0) > CALLED_THE_SAME:
        alike = f"within {worst.relative:.1e}, {worst.allowed:.0e} allowed"
    return f"{alike} (inputs: {', '.join(report.tried)})"


def format_markdown(report: ChangeReport) -> str:
    """A Markdown summary, for instance for a pull request."""
    comparison = report.comparison
    name = tuple(as_markdown(file.path.rpartition("/")[2]) for file in (comparison.first, comparison.second))
    verdict = "differs" if report.failed else "nothing fails"
    if not report.asked:
        verdict = "modules differ" if comparison.differs else "no module differs"
    lines = [f"### {name[0]} and {name[1]}: {verdict}", ""]
    if report.asked:
        lines += ["| checked | result |", "|---|---|"]
        verdicts = {
            aspect: _verdict(report, aspect, "same").replace("differs", "**differs**") for aspect in report.asked
        }
        lines += [f"| {aspect} | {verdict} |" for aspect, verdict in verdicts.items()]
        lines.append("")
    lines += [f"| | {name[0]} | {name[1]} |", "|---|---|---|"]
    rows_of_facts = _fact_rows(comparison.first, comparison.second, comparison.selected)
    lines += [f"| {what} | {as_markdown(cell)} | {as_markdown(other)} |" for what, cell, other in rows_of_facts]
    for change in report.costs or ():
        if change.first != change.second:
            lines.append(f"| {change.column} | {change.first} | {change.second}{' (more)' if change.worse else ''} |")
    rows = [f"- {as_code(names)}: {as_markdown(text)}" for names, text in _changes(comparison.changed)]
    for path, only in ((name[0], comparison.only_in_first), (name[1], comparison.only_in_second)):
        rows += [f"- only in {path}: {as_code(names)}" for names, _, _ in _only(only)]
    rows += [
        f"- output {as_code(o.name)}: {o.status} ({as_markdown(o.reason)})"
        for o in report.outputs or ()
        if o.status != "agree"
    ]
    rows += [
        f"- weights of {as_code(name)} differ" for name in (comparison.values.different if comparison.values else [])
    ]
    more = [f"- and {len(rows) - MOST} more"] if len(rows) > MOST else []
    return "\n".join([*lines, "", *rows[:MOST], *more]).rstrip()
