"""The tag grammar: which modules are levels, and the readable, unique name of every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.module_tree import Module, ModuleTree
from modelexport.errors import UsageError

Granularity = Literal["auto", "model", "all"]


class CallTags(ABC):
    """The tags of calls: the one place that makes them, out of the call tree and what each call adds to the tag above.

    The tag of a level extends that of the level above it; the tag of another call extends its caller's.
    """

    calls: CallTree

    @abstractmethod
    def class_of(self, call: ModuleCall) -> str:
        """The name of the class of the module that was called."""

    @abstractmethod
    def is_level_call(self, call: ModuleCall) -> bool:
        """Whether nodes that the call owns carry its own tag."""

    @property
    @abstractmethod
    def segments(self) -> Mapping[ModuleCall, str]:
        """What each call adds to the tag above it: ``BertLayer.0@1``.

        A whole tag, with its slash, where a file was changed by others and its tag does not extend the one above.
        """

    def tag(self, call: ModuleCall) -> str:
        """The call's own tag, whether the call is a level or not."""
        return self.tags[call]

    def level(self, call: ModuleCall) -> ModuleCall:
        """The deepest level on the call's stack: ``call`` itself when it is a level."""
        return self._level_of[call]

    def source_tag(self, call: ModuleCall) -> str:
        """The tag of the deepest level on the call's stack: what a node that the call owns carries."""
        return self.tags[self._level_of[call]]

    def namespace(self, call: ModuleCall) -> str:
        """The call's own tag without the leading slash, as Model Explorer expects it."""
        return self.tags[call].removeprefix("/")

    @cached_property
    def tags(self) -> Mapping[ModuleCall, str]:
        """The tag of every call."""
        tags: dict[ModuleCall, str] = {}
        for call, base in self.bases.items():
            segment = self.segments[call]
            tags[call] = segment if segment.startswith("/") else f"{'' if base is None else tags[base]}/{segment}"
        return tags

    def recorded(self) -> RecordedTags:
        """The tags as a file records them."""
        calls = [traced.call for traced in self.calls]
        facts = {call: CallFacts(self.class_of(call), self.is_level_call(call), self.segments[call]) for call in calls}
        return RecordedTags(self.calls, facts)

    @cached_property
    def bases(self) -> Mapping[ModuleCall, ModuleCall | None]:
        """The call whose tag each call's tag extends: the level above for a level, otherwise the caller."""
        return {
            traced.call: traced.parent
            if traced.parent is None or not self.is_level_call(traced.call)
            else self._level_of[traced.parent]
            for traced in self.calls
        }

    @cached_property
    def _level_of(self) -> Mapping[ModuleCall, ModuleCall]:
        levels: dict[ModuleCall, ModuleCall] = {}
        for traced in self.calls:
            is_level = traced.parent is None or self.is_level_call(traced.call)
            levels[traced.call] = traced.call if is_level or traced.parent is None else levels[traced.parent]
        return levels


class CallFacts(NamedTuple):
    """What is known of a call besides its place in the call tree."""

    class_name: str
    level: bool
    segment: str


@dataclass(frozen=True, eq=False)
class RecordedTags(CallTags):
    """The tags of calls as a file records them."""

    calls: CallTree
    facts: Mapping[ModuleCall, CallFacts]

    def class_of(self, call: ModuleCall) -> str:
        return self.facts[call].class_name

    def is_level_call(self, call: ModuleCall) -> bool:
        return self.facts[call].level

    @cached_property
    def segments(self) -> Mapping[ModuleCall, str]:
        return {call: facts.segment for call, facts in self.facts.items()}


@dataclass(frozen=True, eq=False)
class Tags(CallTags):
    """The tags of one model in one run.

    A tag is the tag of the level above, ``/`` and a segment: ``ClassName[.suffix][@n]``. The level above follows from
    the call stack (which calls were running), the suffix from the module's place in the tree. A call that is not a
    level has a tag as well, with a segment for every call between it and the level above::

        BertModel                       /BertModel
        encoder.layer.0.attention       /BertModel/BertEncoder/BertLayer.0/BertAttention
        encoder.layer.0.output.dense    /BertModel/BertEncoder/BertLayer.0/BertOutput/Linear
        shared@1                        /Model/Block@1

    Args:
        granularity: ``model`` takes the classes defined outside ``torch.nn`` as levels, ``all`` every class, and
            ``auto`` is ``model`` unless that leaves no level below the root.
        include: Names of classes that are levels as well.
        exclude: Names of classes that are not levels. The root is always a level.

    Raises:
        UsageError: ``include`` or ``exclude`` name a class that the model does not have, or both name the same class.
    """

    tree: ModuleTree
    calls: CallTree
    _: KW_ONLY
    granularity: Granularity = "auto"
    include: Collection[str] = ()
    exclude: Collection[str] = ()

    def __post_init__(self) -> None:
        names = {module.class_name for module in self.tree}
        if unknown := sorted({*self.include, *self.exclude} - names):
            raise UsageError(f"the model has no class {', '.join(unknown)}; its classes are {', '.join(sorted(names))}")
        if both := sorted(set(self.include) & set(self.exclude)):
            raise UsageError(f"{', '.join(both)} cannot be both included and excluded; name a class on one side only")

    @cached_property
    def levels(self) -> frozenset[str]:
        """The paths of the modules that get a segment in source tags: called, and of a class that makes levels."""
        return frozenset(path for path in self._called if self._makes_level(self.tree[path]))

    def is_level(self, path: str) -> bool:
        """Whether the module at ``path`` is a level. A module that was never called is not."""
        return path in self.levels

    def class_of(self, call: ModuleCall) -> str:
        return self.tree[call.path].class_name

    def is_level_call(self, call: ModuleCall) -> bool:
        return call.path in self.levels

    def module_tag(self, path: str) -> str:
        """The tag of a module: its first call's, or, if it was never called, as though its parent had called it."""
        return self._module_tags[path]

    @cached_property
    def _called(self) -> Counter[str]:
        return Counter(traced.call.path for traced in self.calls)

    @cached_property
    def _rule(self) -> LevelRule:
        called = (self.tree[path] for path in self._called if path)
        classes = ((module.class_name, module.is_torch_nn) for module in called)
        return level_rule(self.granularity, self.include, self.exclude, classes)

    def _makes_level(self, module: Module) -> bool:
        """Whether calls of the module are levels."""
        return module.parent is None or self._rule.makes_level(module.class_name, is_torch_nn=module.is_torch_nn)

    @cached_property
    def _static_base(self) -> Mapping[str, str]:
        """The path whose tag that of each module extends, if its parent module called it.

        A module that was never called although one below it was (a list, a Sequential that is indexed) is skipped, so
        that members that this run did not call get the tags that they would get if it had.
        """
        bypassed: set[str] = set()
        for path in self._called:
            above = self.tree[path].parent
            while above is not None and above not in bypassed:
                bypassed.add(above)
                above = self.tree[above].parent
        bypassed -= {"", *self._called}

        caller: dict[str, str] = {}
        level: dict[str, str] = {}
        base: dict[str, str] = {}
        for module in self.tree:
            if module.parent is None:
                continue
            parent = self.tree[module.parent]
            skipped = parent.path in bypassed
            caller[module.path] = caller[parent.path] if skipped else parent.path
            level[module.path] = level[parent.path] if skipped or not self._makes_level(parent) else parent.path
            base[module.path] = (level if self._makes_level(module) else caller)[module.path]
        return base

    @cached_property
    def _suffixes(self) -> Mapping[tuple[str, str], str]:
        placed = [(base.path, call.path) for call, base in self.bases.items() if base is not None]
        static = [(base, path) for path, base in self._static_base.items()]
        return tag_suffixes((base, self.tree[path].class_name, path) for base, path in (*static, *placed))

    @cached_property
    def segments(self) -> Mapping[ModuleCall, str]:
        return tag_segments(self.bases, self.class_of, self._suffixes)

    @cached_property
    def _module_tags(self) -> Mapping[str, str]:
        tags: dict[str, str] = {}
        for call, tag in self.tags.items():
            tags.setdefault(call.path, tag)
        for module in self.tree:
            if module.path not in tags:
                base = self._static_base[module.path]
                tags[module.path] = f"{tags[base]}/{_segment(module.class_name, self._suffixes[base, module.path])}"
        return tags


@dataclass(frozen=True)
class LevelRule:
    """Which classes make levels in a model."""

    takes_all: bool
    include: Collection[str] = ()
    exclude: Collection[str] = ()

    def makes_level(self, class_name: str, *, is_torch_nn: bool) -> bool:
        """Whether modules of a class are levels; the root always is."""
        wanted = self.takes_all or class_name in self.include or not is_torch_nn
        return wanted and class_name not in self.exclude


def level_rule(
    granularity: str, include: Collection[str], exclude: Collection[str], called: Iterable[tuple[str, bool]]
) -> LevelRule:
    """The rule of a model.

    Args:
        called: The class of each called module below the root, and whether it is defined under ``torch.nn``.
    """
    models = LevelRule(False, include, exclude)
    if granularity == "auto":
        return LevelRule(not any(models.makes_level(name, is_torch_nn=nn) for name, nn in called), include, exclude)
    return LevelRule(granularity == "all", include, exclude)


def tag_suffixes(placed: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str], str]:
    """(path of the base, path of the module) to the suffix that distinguishes modules of one class on one base.

    Args:
        placed: The path of the base, the class, and the path of each module.
    """
    siblings: dict[tuple[str, str], dict[str, None]] = {}
    for base, class_name, path in placed:
        siblings.setdefault((base, class_name), {})[path] = None
    return {
        (base, path): suffix
        for (base, _), paths in siblings.items()
        for path, suffix in zip(paths, shortest_tails(base, list(paths)), strict=True)
    }


def tag_segments(
    bases: Mapping[ModuleCall, ModuleCall | None],
    class_of: Callable[[ModuleCall], str],
    suffixes: Mapping[tuple[str, str], str],
) -> dict[ModuleCall, str]:
    """What each call adds to the tag of its base: ``ClassName[.suffix][@n]``.

    ``n`` counts the calls of a path in one call of the base; that of an address counts all calls of the path.
    """
    segments: dict[ModuleCall, str] = {}
    repeats: Counter[tuple[ModuleCall | None, str]] = Counter()
    for call, base in bases.items():
        number = repeats[base, call.path]
        repeats[base, call.path] += 1
        suffix = "" if base is None else suffixes[base.path, call.path]
        segments[call] = _segment(class_of(call), suffix) + (f"@{number}" if number else "")
    return segments


def _segment(class_name: str, suffix: str) -> str:
    return f"{class_name}.{suffix}" if suffix else class_name


def shortest_tails(base: str, paths: Sequence[str]) -> list[str]:
    """The shortest tail of each path below ``base``, with a number at its end, that none of the other paths ends in."""
    parts = [_parts_below(base, path) for path in paths]
    if len(set(parts)) < len(parts):  # one is below the base and the other outside it, with the same name
        parts = [_parts_below("", path) for path in paths]
    ends = Counter(segments[start:] for segments in parts for start in range(len(segments) + 1))
    tails = []
    for segments in parts:
        shortest = len(segments) - 1 if segments and segments[-1].isdecimal() else len(segments)
        start = next((start for start in range(shortest, -1, -1) if ends[segments[start:]] == 1), 0)
        tails.append(".".join(segments[start:]))
    return tails


def _parts_below(base: str, path: str) -> tuple[str, ...]:
    """The parts of the path below ``base``, or all of its parts if it is not below ``base``.

    A key of a ModuleDict may contain ``/`` or ``@``, which have a meaning in tags: they are percent-encoded.
    """
    below = path.removeprefix(f"{base}.") if base else path
    escaped = below.replace("%", "%25").replace("/", "%2F").replace("@", "%40")
    return tuple(escaped.split(".")) if escaped else ()


def class_in_tag(tag: str) -> str:
    """The class of the module with this tag: the last segment without its suffix and its number."""
    return tag.rpartition("/")[2].partition(".")[0].partition("@")[0]
