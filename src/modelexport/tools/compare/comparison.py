"""``compare``: two tagged files side by side, module call by module call. Neither is run, and torch is not needed.

Calls are paired by address, which is the same for every front end, opset and optimization level. Of each pair the own
nodes are compared: their operators, attributes, constants and parameters. Their connections and results are not
compared: that is ``compare --numbers``.
"""

from __future__ import annotations

import filecmp
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.errors import FileFormatError, UsageError
from modelexport.files.linked_weights import data_files, weights_faults
from modelexport.files.path_or_model import Source
from modelexport.format import documents, keys
from modelexport.format.dtypes import dtype_name
from modelexport.format.parameter_plan import ParameterPlan
from modelexport.graph.attribute_texts import format_attributes, tensor_text, typed_text
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import initializers, stored_tensors
from modelexport.graph.parameter_plans import parameter_plans, state_dict_of
from modelexport.graph.properties import text_of
from modelexport.runtime.saturating_products import saturation_notes
from modelexport.tagged.file import TaggedFile, as_tagged
from modelexport.tools.compare.comparison_report import (
    CallChange,
    EntryChange,
    FileComparison,
    FileFacts,
    Held,
    OnlyInOne,
    Values,
)

T = TypeVar("T")
U = TypeVar("U")


def compare(
    first: Source | TaggedFile, second: Source | TaggedFile, *, values: bool = False, modules: Sequence[str] = ()
) -> FileComparison:
    """Compare two tagged files of any encoding.

    Args:
        modules: Selectors of the calls to compare, each for the file that has such calls; by default all.
        values: Compare the elements of parameters as well, which reads all weights. Otherwise no weights are read.

    Raises:
        FileFormatError: A file is missing or damaged, or, with ``values``, its weights are missing.
    """
    files = [as_tagged(file) for file in (first, second)]
    held = [parameter_plans(file.model) for file in files]
    for file, plans, others in zip(files, held, reversed(held), strict=True):
        _pair_by_name(file, plans, others)
    chosen = _chosen(files, modules)
    left, right = (_Side(file, plans, chosen if modules else None) for file, plans in zip(files, held, strict=True))
    notes: list[str] = []
    facts = left.facts(notes), right.facts(notes)
    notes += notes_of_equal_bytes(*(file.path for file in files))
    both = [call for call in left.calls if call in right.calls and call in chosen]
    changed = [change for call in both if (change := _changed(call, left, right))]
    return FileComparison(
        first=facts[0],
        second=facts[1],
        only_in_first=[only for only in left.missing_in(right) if ModuleCall.parse(only.address) in chosen],
        only_in_second=[only for only in right.missing_in(left) if ModuleCall.parse(only.address) in chosen],
        changed=changed,
        same=len(both) - len(changed),
        entries=[EntryChange(key, pair) for key, pair in _differing(left.entries, right.entries, None).items()],
        values=_values(left, right) if values else None,
        notes=notes,
        selected=bool(modules),
    )


def notes_of_equal_bytes(first: Path, second: Path) -> list[str]:
    """A note if two files are the same, byte by byte, which says whether they have weights in other files."""
    if not (first.is_file() and second.is_file() and filecmp.cmp(first, second, shallow=False)):
        return []
    return ["the files are the same bytes" + ", apart from the weights beside them" * bool(data_files(first))]


def _pair_by_name(
    file: TaggedFile, plans: dict[ir.Value, ParameterPlan], others: dict[ir.Value, ParameterPlan]
) -> None:
    """Give an initializer that another tool put in place, and that has no plan, that of its namesake, if it fits."""
    by_name = {other.name: (plan, _held_type(other)) for other, plan in others.items()}
    for value in initializers(file.model):
        plan, typed = by_name.get(value.name, (None, ""))
        if value not in plans and plan is not None and value.const_value is not None and _held_type(value) == typed:
            plans[value] = plan


def _chosen(files: Sequence[TaggedFile], modules: Sequence[str]) -> frozenset[ModuleCall]:
    """The calls that selectors pick in either of two files."""
    chosen: frozenset[ModuleCall] = frozenset()
    refused: list[UsageError] = []
    for file in files:
        try:
            chosen |= file.select(*modules).inside
        except UsageError as error:
            refused.append(error)
    if len(refused) == len(files):
        raise refused[0]
    return chosen


class _Own:
    """The comparable facts about one call's own nodes, without those of the calls inside it."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.attributes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.constants: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.parameters: dict[str, tuple[int, str]] = {}
        self.source_module: str | None = None

    def held_as(self) -> dict[str, str]:
        """Keys of the ``state_dict`` to how the largest initializer of each is stored."""
        return {key: text for key, (_, text) in self.parameters.items()}


class _Side:
    """One of the files, or some calls of it."""

    def __init__(
        self, tagged: TaggedFile, held: Mapping[ir.Value, ParameterPlan], chosen: frozenset[ModuleCall] | None
    ) -> None:
        self.tagged, self.chosen = tagged, chosen
        self.nodes = [
            n for n in tagged.nodes if chosen is None or ((o := owner_of(n)) is not None and o.call in chosen)
        ]
        used = {value for node in self.nodes for value in node.inputs}
        self.stored = [pair for pair in stored_tensors(tagged.model) if chosen is None or pair[0] in used]
        self.held = {value: held[value] for value, _ in self.stored if value in held}
        try:
            entries = state_dict_of(tagged.model)
            paths, modules = {traced.call.path for traced in tagged.calls}, {call.path for call in chosen or ()}
            self.entries = {
                key: typed_text(entry.dtype, entry.shape)
                for key, entry in entries.items()
                if chosen is None or _module_of(key, paths) in modules
            }
        except FileFormatError as error:
            raise FileFormatError(f"{tagged.path}: {error}") from error
        self.calls = {traced.call: _Own() for traced in tagged.calls}
        how_held = {
            value: (tensor.size, _how_held(value, self.held[value]))
            for value, tensor in self.stored
            if value in self.held
        }
        constants = {value: _constant(tensor) for value, tensor in self.stored if value not in self.held}
        for node in self.nodes:
            owner = owner_of(node)
            if owner is None or owner.call not in self.calls:
                continue
            facts, operator = self.calls[owner.call], _operator(node)
            facts.operators[operator] += 1
            facts.attributes[operator][format_attributes(node, tagged.model.opset_imports.get(node.domain, 1))] += 1
            taken = (f"{i}: {constants[value]}" for i, value in enumerate(node.inputs) if value in constants)
            facts.constants[operator]["; ".join(taken)] += 1
            facts.source_module = tagged.call_tags.source_tag(owner.call)
            for value in node.inputs:
                if value in self.held:
                    for key in self.held[value].keys:  # the numbers, rather than their scales and zero points
                        facts.parameters[key] = max(how_held[value], facts.parameters.get(key, (0, "")))

    def facts(self, notes: list[str]) -> FileFacts:
        tagged, model = self.tagged, self.tagged.model
        sidecar = tagged.hierarchy
        parameters: dict[str, Held] = {}
        constants: dict[str, Held] = {}
        files = {tagged.path}
        for value, tensor in self.stored:
            if isinstance(tensor, ir.ExternalTensor):
                files.add(Path(tensor.path))
            held, dtype = parameters if value in self.held else constants, dtype_name(tensor.dtype)
            before = held.get(dtype, Held(0, 0))
            held[dtype] = Held(before.initializers + 1, before.bytes + tensor.nbytes)
        notes += [*weights_faults(model), *saturation_notes(tagged.nodes, tagged.path)]
        return FileFacts(
            path=str(tagged.path),
            bytes=sum(file.stat().st_size for file in files if file.is_file()),
            version=(tagged.found_calls is None and text_of(model, keys.VERSION_KEY)) or "",
            encoding=tagged.encoding if tagged.found_calls is None else "none",
            opsets=dict(model.opset_imports),
            settings=sidecar.settings if sidecar else None,
            environment=dict(sidecar.environment) if sidecar else {},
            calls=len(tagged.calls if self.chosen is None else self.chosen & self.calls.keys()),
            nodes=len(self.nodes),
            coverage=documents.Coverage.of(None if o is None else o.evidence for o in map(owner_of, self.nodes)),
            operators=dict(sorted(Counter(map(_operator, self.nodes)).items())),
            parameters=dict(sorted(parameters.items())),
            constants=dict(sorted(constants.items())),
            entries=len(self.entries),
        )

    def missing_in(self, other: _Side) -> list[OnlyInOne]:
        """The calls that the other file does not have, without those inside another such call."""
        calls: Counter[ModuleCall] = Counter()
        nodes: Counter[ModuleCall] = Counter()
        tops = []
        for traced in reversed(self.tagged.calls.calls):
            call, parent = traced.call, traced.parent
            if call in other.calls:
                continue
            calls[call] += 1
            nodes[call] += self.calls[call].operators.total()
            if parent is None or parent in other.calls:
                tops.append(call)
            else:
                calls[parent] += calls[call]
                nodes[parent] += nodes[call]
        return [OnlyInOne(call.address, self.tagged.tags[call], calls[call], nodes[call]) for call in reversed(tops)]


def _module_of(key: str, paths: Collection[str]) -> str:
    """The innermost module with calls that has an entry."""
    path = key.rpartition(".")[0]
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path


def _changed(call: ModuleCall, first: _Side, second: _Side) -> CallChange | None:
    ours, theirs = first.calls[call], second.calls[call]
    sources = (ours.source_module, theirs.source_module)
    alike = [operator for operator, count in sorted(ours.operators.items()) if count == theirs.operators[operator]]
    change = CallChange(
        address=call.address,
        class_name=_unless_equal(first.tagged.class_of(call), second.tagged.class_of(call)),
        tag=_unless_equal(first.tagged.tags[call], second.tagged.tags[call]),
        source_module=None if sources[0] is None or sources[1] is None else _unless_equal(sources[0], sources[1]),
        operators=dict(sorted(_differing(ours.operators, theirs.operators, 0).items())),
        attributes=_counts(alike, ours.attributes, theirs.attributes),
        constants=_counts(alike, ours.constants, theirs.constants),
        parameters=_differing(ours.held_as(), theirs.held_as(), None),
    )
    return change if change != CallChange(address=call.address) else None


def _counts(
    operators: Iterable[str], first: Mapping[str, Counter[str]], second: Mapping[str, Counter[str]]
) -> dict[str, int]:
    """Operators to the number of nodes of which the other call has none with the same text."""
    counts = {operator: (first[operator] - second[operator]).total() for operator in operators}
    return {operator: count for operator, count in counts.items() if count}


def _unless_equal(first: str, second: str) -> tuple[str, str] | None:
    return None if first == second else (first, second)


def _differing(first: Mapping[str, T], second: Mapping[str, T], missing: U) -> dict[str, tuple[T | U, T | U]]:
    """What differs in two mappings, in the order of the first."""
    pairs = {key: (first.get(key, missing), second.get(key, missing)) for key in {**first, **second}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _values(first: _Side, second: _Side) -> Values:
    """Compare initializers of the same entries that are stored in the same way, one pair in memory at a time."""
    theirs = {(*plan.keys, _how_held(value, plan)): value for value, plan in second.held.items()}
    left, equal, different, unpaired = dict(theirs), 0, [], []
    for value, plan in first.held.items():
        left.pop(place := (*plan.keys, _how_held(value, plan)), None)
        match = theirs.get(place)
        if match is None:
            unpaired.append(value.name or "")
        elif _bytes(first.tagged.path, value) == _bytes(second.tagged.path, match):
            equal += 1
        else:
            different.append(value.name or "")
    return Values(equal, different, list(dict.fromkeys([*unpaired, *(value.name or "" for value in left.values())])))


def _bytes(path: Path, value: ir.Value) -> bytes:
    assert value.const_value is not None  # otherwise it would not be an initializer
    try:
        return value.const_value.tobytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise FileFormatError(f"{path}: the weights of {value.name} cannot be read: {why}") from error


def _operator(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _constant(tensor: ir.TensorProtocol) -> str:
    """A constant as text; without its elements where they are in a file that cannot be read."""
    try:
        return tensor_text(tensor)
    except (FileFormatError, OSError, ValueError):
        return typed_text(dtype_name(tensor.dtype), tensor.shape)


def _how_held(value: ir.Value, plan: ParameterPlan) -> str:
    steps = ", ".join(
        "a step that is not recorded" if step.op_type == keys.UNRECORDED else step.op_type
        for step in plan.steps
        if step.op_type != "Constant"  # an input of a later step, which computes nothing with the entry
    )
    return _held_type(value) + (f" by {steps}" if steps else "")


def _held_type(value: ir.Value) -> str:
    tensor = value.const_value
    assert tensor is not None  # otherwise it would not be an initializer
    return typed_text(dtype_name(tensor.dtype), tensor.shape)
