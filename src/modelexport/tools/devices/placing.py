"""``place``: rules that assign modules to devices, as ONNX Runtime session options, with a check in a session."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from modelexport.core.calls import ModuleCall
from modelexport.core.text import short_repr
from modelexport.errors import UsageError
from modelexport.files.path_or_model import Source
from modelexport.format import keys
from modelexport.graph.node_owners import owner_of
from modelexport.graph.properties import text_of
from modelexport.runtime.devices import CPU, Device, find_device, plugged_in, short_name
from modelexport.runtime.sessions import open_file, session_options
from modelexport.tagged.file import TaggedFile, as_tagged

State = Literal["placed", "elsewhere", "torn", "no provider"]
"""All nodes of a call are on the rule's device; all elsewhere; in several places; or no provider serves the device."""

_SETTINGS = "session.layer_assignment_settings"
_RECORD = "session.record_ep_graph_assignment_info"
_DEVICES: Mapping[str, Sequence[str]] = {"gpu": ("cuda", "dml"), "npu": ("qnn", "vitisai")}
"""ONNX Runtime's names of kinds of devices, and the devices that it uses for them independent of their hardware."""


@dataclass(frozen=True)
class PlacementRule:
    """A device, or a provider by name, and the modules that are assigned to it."""

    device: str
    selectors: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> PlacementRule:
        """``gpu: model.layers.[0-11] model.norm``: a device, a colon and a space, selectors."""
        device, _, modules = text.partition(": ")
        if not (device.strip() and modules.split()) or set(device) & set("(),;"):
            raise UsageError(f"'{text}' is not a rule: write 'DEVICE: SELECTOR ...', as in 'gpu: model.layers.[0-11]'")
        return cls(device.strip(), tuple(modules.split()))


class PlacedCall(msgspec.Struct, frozen=True):
    """A call that a rule names, and the providers of its nodes."""

    call: str
    tag: str
    device: str
    state: State | None
    """``None`` if no session was opened."""
    providers: dict[str, int]
    """Provider to the number of its nodes, without nodes that a rule for an inner module assigns elsewhere."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Session options that assign modules to devices, and the result in a session."""

    __repr__ = short_repr

    path: str
    settings: str
    """The value of ``session.layer_assignment_settings``."""
    nodes: dict[str, int]
    """The number of nodes that the rules assign to each device."""
    unplaced: int
    """The number of nodes without a rule, which ONNX Runtime assigns freely."""
    providers: list[str]
    """The providers of the session that was opened; empty if none was."""
    calls: list[PlacedCall]

    @property
    def faults(self) -> list[PlacedCall]:
        """The calls that are split or elsewhere."""
        return [call for call in self.calls if call.state in ("torn", "elsewhere")]

    def session_options(self) -> dict[str, object]:
        """The content of ``-o SESSION.json``: entries of the session's configuration, and providers."""
        return {"providers": self.providers, "config_entries": {_SETTINGS: self.settings, _RECORD: "1"}}


def place(
    source: Source | TaggedFile,
    rules: Iterable[str | PlacementRule],
    *,
    check: bool = True,
    providers: Sequence[str] = (),
    libraries: Mapping[str, Path] | None = None,
) -> Placement:
    """Make ONNX Runtime session options from rules, open a session with them, and read where modules were assigned.

    A node follows the rule for the innermost module that it is in; of several such rules the last one applies.

    Args:
        rules: ``'gpu: model.layers.[0-11]'``: a device or the name of a provider, a colon and a space, selectors.
        check: Open a session; otherwise the options are only written.
        providers: The devices of the session, in order; CPU is always the last.
        libraries: Names of plug-in providers to their libraries.

    Raises:
        UsageError: A selector matches nothing, the file has no annotations, or ONNX Runtime does not have a provider
            or cannot load the model.
    """
    tagged = as_tagged(source)
    for node in tagged.nodes:
        owner = owner_of(node)
        if owner is None or text_of(node, keys.LAYER_ANNOTATION) != owner.call.annotation:
            raise UsageError(
                f"{tagged.path} has nodes without the annotations that ONNX Runtime needs, such as '{node.name}': "
                "export it again, or write new ones with `modelexport retag`"
            )
    assignments = _assignments(tagged, [PlacementRule.parse(rule) if isinstance(rule, str) else rule for rule in rules])
    devices = {
        node.name or "": assignments[owner.call].device
        if (owner := owner_of(node)) and owner.call in assignments
        else None
        for node in tagged.nodes
    }
    nodes = Counter(device for device in devices.values() if device is not None)
    settings = "; ".join(f"{device}({', '.join(names)})" for device, names in _patterns(tagged, devices).items())
    assigned: dict[str, str] = {}
    opened: list[str] = []
    if check:
        plugged = {name: plugged_in(name, library) for name, library in (libraries or {}).items()}
        named = [plugged[name] if name in plugged else find_device(name) for name in providers]
        session = [*(device for device in named if device.provider != CPU), find_device(CPU)]
        opened = [device.provider for device in session]
        assigned = assigned_providers(tagged.path, settings, session)
    by_call: dict[_Assignment, list[str]] = {}
    for node in tagged.nodes:
        if (owner := owner_of(node)) is not None and owner.call in assignments:
            by_call.setdefault(assignments[owner.call], []).append(node.name or "")
    return Placement(
        path=str(tagged.path),
        settings=settings,
        nodes=dict(nodes),
        unplaced=sum(device is None for device in devices.values()),
        providers=opened,
        calls=[_read_back(tagged, place, names, assigned, opened) for place, names in by_call.items()],
    )


def assigned_providers(path: Path, settings: str, devices: Sequence[Device]) -> dict[str, str]:
    """Open a session and return the provider of each node: node name to provider.

    The runtime's optimizations are off, so that the nodes are those of the file. Nodes that the runtime drops while it
    loads the model are left out.

    Args:
        settings: The value of ``session.layer_assignment_settings``.
    """
    options = session_options("none", *devices)
    options.add_session_config_entry(_RECORD, "1")
    if settings:
        options.add_session_config_entry(_SETTINGS, settings)
    parts = open_file(path, options).get_provider_graph_assignment_info()
    return {node.name: part.ep_name for part in parts for node in part.get_nodes()}


class _Assignment(NamedTuple):
    """The device of a call, with the rule and the call that the rule names."""

    depth: int
    rule: int
    call: ModuleCall
    device: str


def _assignments(tagged: TaggedFile, rules: Sequence[PlacementRule]) -> dict[ModuleCall, _Assignment]:
    """The device of each call: by the rule for the innermost enclosing call, of several by the last."""
    assignments: dict[ModuleCall, _Assignment] = {}
    for index, rule in enumerate(rules):
        selection = tagged.select(*rule.selectors)
        named = set(selection.calls)
        of_rule: dict[ModuleCall, _Assignment] = {}
        for traced in tagged.calls:  # callers before callees
            if traced.call not in selection:
                continue
            if traced.call in named or traced.parent is None or traced.parent not in of_rule:
                of_rule[traced.call] = _Assignment(traced.depth, index, traced.call, rule.device)
            else:
                of_rule[traced.call] = of_rule[traced.parent]
        assignments.update((call, max(place, assignments.get(call, place))) for call, place in of_rule.items())
    return assignments


def _patterns(tagged: TaggedFile, devices: Mapping[str, str | None]) -> dict[str, list[str]]:
    """For each device the smallest set of annotation prefixes that match all of its nodes and no others.

    In ONNX Runtime the first matching rule wins, and prefixes win over whole annotations: these never overlap.
    """
    annotations: dict[str, str | None] = {}
    beginning: dict[str, set[str | None]] = defaultdict(set)
    """Prefixes, such as ``layers.``, to the devices of all annotations that begin with them."""
    for node in tagged.nodes:
        annotation = text_of(node, keys.LAYER_ANNOTATION) or ""
        annotations[annotation] = devices[node.name or ""]
        for prefix in _prefixes(annotation):
            beginning[prefix].add(annotations[annotation])
    patterns: dict[str, dict[str, None]] = {}
    for annotation, device in annotations.items():
        if device is not None:
            alone = (prefix for prefix in _prefixes(annotation) if len(beginning[prefix]) == 1)
            patterns.setdefault(device, {})[next(alone, f"={annotation}")] = None
    return {device: list(named) for device, named in patterns.items()}


def _prefixes(annotation: str) -> Iterator[str]:
    """Those that end after a part of a path, the shortest first; that of the root, a dot, has none."""
    parts = annotation.split(".")
    return (".".join(parts[:count]) + "." for count in range(1, len(parts)) if parts[count - 1])


def _read_back(
    tagged: TaggedFile,
    assignment: _Assignment,
    names: Sequence[str],
    assigned: Mapping[str, str],
    opened: Sequence[str],
) -> PlacedCall:
    used = Counter(assigned[name] for name in names if name in assigned)
    state: State | None = None
    if opened:
        serving = _serving(assignment.device, opened)
        if not serving:
            state = "no provider"
        elif set(used) <= set(serving):
            state = "placed"
        else:
            state = "torn" if len(used) > 1 else "elsewhere"
    return PlacedCall(str(assignment.call), tagged.tags[assignment.call], assignment.device, state, dict(used))


def _serving(device: str, opened: Sequence[str]) -> list[str]:
    """The providers of a session that serve a device, judged by their names."""
    if device in opened:
        return [device]
    word = device.partition(":")[0].lower()
    if word == "accelerator":
        return [name for name in opened if name != CPU][:1]
    return [name for name in opened if short_name(name) in _DEVICES.get(word, (word,))][:1]
