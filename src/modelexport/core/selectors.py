"""Selectors: the way to pick module calls in every command and in Python.

    encoder.layer.0             the address of a call; ``.`` is the root, ``shared@1`` a second call
    encoder.layer.[0-3]         a glob over addresses: ``*`` and ``?`` within a part, ``[0-11]`` a range of numbers
    *.down_proj, **.mlp.*       ``**`` across dots, and so does ``*.`` at the beginning
    /BertModel/BertPooler       a tag, or a glob over tags
    class:LayerNorm             every call of the modules of a class, or of the classes that a glob matches
    layer.0, BertPooler         the end of an address or tag, or a class, where only one call has it
    !encoder.layer.1            removes calls from what the others picked; alone, from all calls

Several selectors are a union. Picking a call also picks every call inside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from modelexport.core.calls import CallTree, ModuleCall
from modelexport.core.tags import class_in_tag
from modelexport.core.text import first_few, suggest
from modelexport.errors import NoSuchCallError, UsageError

_CLASS = "class:"
_GLOB = re.compile(r"[*?\[]")
_RANGE = re.compile(r"\[(\d{1,9})-(\d{1,9})\]")
_LONGEST_RANGE = 10_000
"""Numbers in the ranges of one selector."""
_MOST_WILDCARDS = 5
"""``**`` in one selector, and ``*`` beside brackets in one part of it: each more multiplies the time of a search."""


_NO_FILE = "the model"
"""What messages name in the place of a file."""


@dataclass(frozen=True)
class Selection:
    """The calls that selectors pick."""

    calls: tuple[ModuleCall, ...]
    """The calls that a selector matches, in the order in which they began, without those that ``!`` removes whole."""
    inside: frozenset[ModuleCall]
    """These and every call inside them, without those that ``!`` removes."""

    def __contains__(self, call: object) -> bool:
        return call in self.inside

    def __iter__(self) -> Iterator[ModuleCall]:
        return iter(self.calls)


Call = TypeVar("Call")


def select_calls(
    selectors: Iterable[str], calls: CallTree, tags: Mapping[ModuleCall, str], *, where: object = _NO_FILE
) -> Selection:
    """The calls that a union of selectors picks; without selectors, every call.

    Args:
        tags: The own tag of every call.
        where: The file or model that the calls belong to, for messages.
    """
    selectors = tuple(selectors)
    order = [traced.call for traced in calls]
    wanted: set[ModuleCall] = set()
    unwanted: set[ModuleCall] = set()
    for selector in selectors:
        if selector.startswith("!"):
            unwanted.update(_matches(selector[1:], order, tags, where))
        else:
            wanted.update(_matches(selector, order, tags, where))
    if all(selector.startswith("!") for selector in selectors):
        wanted.update(traced.call for traced in calls if traced.parent is None)
    inside: set[ModuleCall] = set()
    taken: set[ModuleCall] = set()
    for traced in calls:  # callers before callees
        if traced.call in unwanted or traced.parent in taken:
            taken.add(traced.call)
        elif traced.call in wanted or traced.parent in inside:
            inside.add(traced.call)
    if not inside:
        raise UsageError(f"'{' '.join(selectors)}' leaves no module of {where}: '!' removes everything that is picked")
    return Selection(tuple(call for call in order if call in wanted and call in inside), frozenset(inside))


def find_call(name: str, tags: Mapping[Call, str], *, where: object = _NO_FILE) -> Call:
    """The one call that an address or a tag names; the end of either, or a class, will do if only one call has it."""
    if not name:
        raise NoSuchCallError("a selector is empty (an unset variable?): name a module, or give . for the whole model")
    by_name = {str(call): call for call in tags} | {tag: call for call, tag in tags.items()}
    if name in by_name:
        return by_name[name]
    ends = (f".{name}", f"/{name.removeprefix('/')}")
    meant = [
        call
        for call, tag in tags.items()
        if str(call).endswith(ends[0]) or tag.endswith(ends[1]) or class_in_tag(tag) == name
    ]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise NoSuchCallError(f"'{name}' is ambiguous in {where}: it could be {first_few(meant)}; give one of these")
    known = [known for known in by_name if known.startswith("/") == name.startswith("/")]
    listed = f"; `modelexport tree {where}` lists them" if where != _NO_FILE else ""
    raise NoSuchCallError(f"{where} has no module call '{name}'{suggest(name, known)}{listed}")


def _matches(
    selector: str, order: Iterable[ModuleCall], tags: Mapping[ModuleCall, str], where: object
) -> list[ModuleCall]:
    """The calls that one selector matches, without the calls inside them."""
    if selector.startswith(_CLASS):
        wanted = selector.removeprefix(_CLASS)
        classes = {call: class_in_tag(tag) for call, tag in tags.items()}
        matching = [call for call in order if fnmatchcase(classes[call], wanted)]
        if not matching:
            raise UsageError(f"{where} has no class '{wanted}'{suggest(wanted, set(classes.values()))}")
        return matching
    if not _GLOB.search(selector) or any(selector in (str(call), tags[call]) for call in order):
        return [find_call(selector, tags, where=where)]
    if selector.startswith("/"):
        tagged = _glob(selector, "/")
        matching, known = [call for call in order if tagged.fullmatch(tags[call])], list(tags.values())
    else:
        # Without an `@` the selector matches modules and takes every call of each.
        indexed = "@" in selector
        address = _glob(selector, ".")
        names = {call: f"{call.path}@{call.index}" if indexed else call.path for call in order if call.path}
        matching, known = [call for call in names if address.fullmatch(names[call])], [str(call) for call in order]
    if not matching:
        raise UsageError(f"no module call of {where} matches '{selector}'{nearest_selectors(selector, known)}")
    return matching


def nearest_selectors(selector: str, known: Collection[str]) -> str:
    """:func:`.text.suggest`; for ``*.layer.9``, or ``layer.9`` if no name is like it, with ends of names."""
    end = selector.removeprefix("!").lstrip("*./")
    beginning = selector[: len(selector) - len(end)]
    separator = "/" if "/" in beginning else "."
    parts = end.count(separator) + 1
    ends = sorted({separator.join(name.split(separator)[-parts:]) for name in known} - {end})
    by_end = suggest(end, ends, beginning=beginning if "*" in beginning else f"*{separator}")
    return by_end if "*" in beginning and by_end else suggest(selector, known) or by_end


def _glob(pattern: str, separator: str) -> re.Pattern[str]:
    """A glob as a regular expression: ``*`` stays within the separators, ``**`` does not."""
    between = re.escape(separator)
    split = pattern.split(separator)
    # Several `**` in a row mean what one does.
    parts = [part for part, before in zip(split, [None, *split], strict=False) if part != "**" or before != part]
    if pattern.count("**") > _MOST_WILDCARDS or any(
        "[" in part and part.count("*") > _MOST_WILDCARDS for part in parts
    ):
        raise UsageError(f"'{pattern}' has too many asterisks: write fewer, or several selectors")
    ranges = [(int(first), int(last)) for first, last in _RANGE.findall(pattern)]
    if sum(max(last - first, 0) for first, last in ranges) > _LONGEST_RANGE:
        raise UsageError(f"'{pattern}' has ranges of more than {_LONGEST_RANGE:,} numbers: use *")
    texts: list[str] = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**" or (part == "*" and index == 0 and not last):
            texts.append(".+" if last else f"(?:[^{between}]+{between})*")
        else:
            texts.append(_part(part, between) + ("" if last else between))
    try:
        return re.compile("".join(texts))
    except re.error as error:
        raise UsageError(f"'{pattern}' is not a glob: {error.msg}") from error


def _part(part: str, between: str) -> str:
    """One part of a glob, between two separators."""
    pieces = part.split("*")
    if len(pieces) > 2 and "**" not in part and "[" not in part:
        # The first place where a piece fits does as well as any: what follows it takes any characters.
        begin, *middle, rest = (_part(piece, between) for piece in pieces)
        return begin + "".join(f"(?>[^{between}]*?{piece})" for piece in middle) + f"[^{between}]*{rest}"
    text, position = "", 0
    while position < len(part):
        if numbers := _RANGE.match(part, position):
            first, last = int(numbers[1]), int(numbers[2])
            if not first <= last < first + _LONGEST_RANGE:
                raise UsageError(f"'{numbers[0]}' is not a range of numbers: write the smaller first, as in [0-11]")
            text += f"(?:{'|'.join(map(str, range(first, last + 1)))})"
            position = numbers.end()
        elif (character := part[position]) == "[" and (end := part.find("]", position + 2)) > 0:
            inner = part[position + 1 : end]
            negated = inner.startswith("!")
            letters = inner.removeprefix("!").replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            text += f"[{'^' if negated else ''}{letters}]"
            position = end + 1
        elif part.startswith("**", position):
            text += ".*"
            position += 2
        else:
            text += {"*": f"[^{between}]*", "?": f"[^{between}]"}.get(character) or re.escape(character)
            position += 1
    return text
