"""Comparison of the module tree with one run: which modules were called, and why the others were not."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from modelexport.core.calls import CallTree
from modelexport.core.module_tree import ModuleTree


class Status(enum.StrEnum):
    """Whether a module was called in a run, and if not, why."""

    CALLED = "called"
    CONTAINER = "container"
    """It has no ``forward`` of its own: it only holds modules and cannot be called."""
    BYPASSED = "bypassed"
    """Its ``forward`` did not run, but a module below it was called, for instance a Sequential that is indexed."""
    NOT_CALLED = "not called"
    """Neither its ``forward`` nor anything below it ran."""


@dataclass(frozen=True, slots=True)
class ComparedModule:
    """One module of the module tree and how often the run called it."""

    path: str
    class_name: str
    calls: int
    status: Status

    @property
    def reason(self) -> str:
        """A sentence for a person."""
        reasons = {
            Status.CALLED: "called once" if self.calls == 1 else f"called {self.calls} times",
            Status.CONTAINER: "a container: it has no forward of its own",
            Status.BYPASSED: "never called itself, but modules below it were",
            Status.NOT_CALLED: "has a forward that this run did not reach",
        }
        return reasons[self.status]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every module of the module tree, in its order."""

    modules: tuple[ComparedModule, ...]

    @property
    def called(self) -> tuple[ComparedModule, ...]:
        """The modules of the tree that the run called."""
        return tuple(module for module in self.modules if module.calls)

    @property
    def never_called(self) -> tuple[ComparedModule, ...]:
        """The modules of the tree that the run did not call."""
        return tuple(module for module in self.modules if not module.calls)


def compare_hierarchies(tree: ModuleTree, calls: CallTree, containers: Collection[str] = ()) -> Comparison:
    """Compare every module of the tree with the calls of the run.

    Args:
        containers: The paths of the modules without a ``forward`` of their own, which the tree does not record; from
            ``containers`` of ``pytorch/calls/module_tree_of_model.py``.
    """
    counts = Counter(traced.call.path for traced in calls)
    above_called: set[str] = set()
    for path in counts:
        parent = tree[path].parent
        while parent is not None and parent not in above_called:
            above_called.add(parent)
            parent = tree[parent].parent

    def status(path: str) -> Status:
        if counts[path]:
            return Status.CALLED
        if path in containers:
            return Status.CONTAINER
        return Status.BYPASSED if path in above_called else Status.NOT_CALLED

    return Comparison(
        tuple(
            ComparedModule(module.path, module.class_name, counts[module.path], status(module.path)) for module in tree
        )
    )
