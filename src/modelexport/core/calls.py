"""The values that travel through the pipeline: calls, what they get and return, trees of calls. No I/O, no torch.

All values are immutable. The writers turn them into text (addresses, tags, JSON) at the very end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

_T = TypeVar("_T")
LATER_CALL = re.compile(r"(?P<path>.*)@(?P<index>[0-9]{1,18})", re.DOTALL)
"""The address of a call that is not the first; no module may have such a path."""
_RULE_CHARACTERS = re.compile(r"[,;()=%\s]")


class ModuleCall(msgspec.Struct, frozen=True, order=True):
    """One execution of a module's ``forward``: the module's path and which of its calls it is (0 for the first).

    The path is the module's first key in ``model.named_modules()``; the root's is the empty string.
    """

    path: str
    index: int = 0

    @property
    def address(self) -> str:
        """``path`` for the first call, ``path@1`` for the second. The root's is the empty string."""
        return f"{self.path}@{self.index}" if self.index else self.path

    @property
    def annotation(self) -> str:
        """The path with a dot after each part, ``layers.1.``, and for a second call ``layers.1.@1.``.

        The annotations that begin with a module's annotation are those of its calls and of the calls inside them:
        ``layers.1.`` is not a prefix of ``layers.10.``. The root's is a single dot. Characters with a meaning in ONNX
        Runtime's rules (a key of a ModuleDict may contain them) are percent-encoded.
        """
        path = _RULE_CHARACTERS.sub(lambda match: quote(match[0], safe=""), self.path)
        return f"{path}.{f'@{self.index}.' if self.index else ''}"

    @classmethod
    def parse(cls, address: str) -> ModuleCall:
        """The call that an address names; ``.`` and the empty string name the root."""
        path, index = address, 0
        if (later := LATER_CALL.fullmatch(address)) is not None:
            path, index = later["path"], int(later["index"])
        return cls("" if path == "." else path, index)

    def __str__(self) -> str:
        return self.address or "."


ROOT = ModuleCall("")

Side = Literal["inputs", "outputs"]


class Port(NamedTuple):
    """One tensor at the boundary of a call: its position among the tensors that the module gets or returns."""

    call: ModuleCall
    side: Side
    position: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A value's name, element type (``float32``, ``int64``, ...) and shape; a dynamic size is a symbol's name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call as recorded in a run of the model."""

    call: ModuleCall
    parent: ModuleCall | None
    """The call that was running when this one began; ``None`` for the root's."""
    depth: int
    enter: int | None
    """The step at which it began; entering and leaving a call are one step each, counted from 0 over the run.
    ``None`` for a call inside a branch, which is captured but not run."""
    exit: int | None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True)
class CallTree:
    """Every call of one run, in the order in which they began: the root first, callers before callees."""

    calls: tuple[TracedCall, ...]

    @cached_property
    def by_call(self) -> Mapping[ModuleCall, TracedCall]:
        return {traced.call: traced for traced in self.calls}

    @cached_property
    def children(self) -> Mapping[ModuleCall, tuple[ModuleCall, ...]]:
        """Each call's direct callees, in order; a call without callees has an empty tuple."""
        children: dict[ModuleCall, list[ModuleCall]] = {traced.call: [] for traced in self.calls}
        for traced in self.calls:
            if traced.parent is not None:
                children[traced.parent].append(traced.call)
        return {call: tuple(callees) for call, callees in children.items()}

    def __getitem__(self, call: ModuleCall) -> TracedCall:
        return self.by_call[call]

    def __contains__(self, call: object) -> bool:
        return call in self.by_call

    def __iter__(self) -> Iterator[TracedCall]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def stack(self, call: ModuleCall) -> tuple[ModuleCall, ...]:
        """The call stack when ``call`` ran: the root first, ``call`` last."""
        stack = [call]
        while (parent := self.by_call[stack[-1]].parent) is not None:
            stack.append(parent)
        return tuple(reversed(stack))

    def inside(self, call: ModuleCall) -> set[ModuleCall]:
        """A call and all calls inside it."""
        calls, pending = set[ModuleCall](), [call]
        while pending:
            calls.add(pending[-1])
            pending.extend(self.children[pending.pop()])
        return calls


def common_stack(stacks: Iterable[Sequence[_T]]) -> tuple[_T, ...]:
    """The longest stack that all of them begin with: of calls, or of the names in a path."""
    levels = zip(*stacks, strict=False)
    return tuple(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
