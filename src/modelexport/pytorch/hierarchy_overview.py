"""The hierarchy of a model without an export, for ``modelexport hierarchy`` and its JSON document."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from modelexport.core.calls import CallTree, ModuleCall, TensorSpec, TracedCall
from modelexport.core.module_tree import ModuleTree
from modelexport.core.tags import Granularity, Tags
from modelexport.core.text import short_repr
from modelexport.core.uncalled_modules import Comparison, compare_hierarchies
from modelexport.pytorch.calls.call_times import time_calls
from modelexport.pytorch.calls.module_tree_of_model import containers, module_tree
from modelexport.pytorch.calls.traced_tree import trace_calls
from modelexport.pytorch.loading import load_model
from modelexport.pytorch.nested_tensors import run_arguments


@dataclass(frozen=True)
class HierarchyOverview:
    """The module tree and, with inputs, the calls of a run, their tags and the status of each module."""

    __repr__ = short_repr

    tree: ModuleTree
    calls: CallTree | None = None
    tags: Tags | None = None
    """The tags of the calls of the run."""
    comparison: Comparison | None = None
    static_tags: Tags | None = None
    """The tags as though every module were called once, by its parent module."""
    seconds: Mapping[ModuleCall, int] | None = None
    """Nanoseconds of each call itself, without the calls inside it."""

    def tags_of(self, path: str) -> tuple[str, str | None]:
        """The tag of a module by its place in the tree and, if there was a run, by its caller."""
        static = self.static_tags.module_tag(path) if self.static_tags is not None else ""
        return static, None if self.tags is None else self.tags.module_tag(path)

    @property
    def trace(self) -> list[tuple[int, ModuleCall, Literal["enter", "exit"]]]:
        """The entry and exit of each call of the run, in order."""
        events: list[tuple[int, ModuleCall, Literal["enter", "exit"]]] = []
        for traced in self.calls or ():
            if traced.enter is not None and traced.exit is not None:
                events += [(traced.enter, traced.call, "enter"), (traced.exit, traced.call, "exit")]
        return sorted(events)

    def document(self) -> dict[str, Any]:
        """As JSON values: ``modules``, and with a run ``calls``; a module that was not called has a ``reason``."""
        status = {module.path: module for module in self.comparison.modules} if self.comparison else {}
        modules = [
            {
                "path": module.path,
                "tag": self.tags_of(module.path)[0],
                "class": module.class_name,
                "qualified_class": module.qualified_class,
                "depth": module.depth,
                "leaf": module.is_leaf,
                "aliases": module.aliases,
                "parameters": module.parameters,
                "trainable": module.trainable,
                "shapes": module.shapes,
            }
            | ({"traced_tag": self.tags_of(module.path)[1]} if self.tags is not None else {})
            | ({"calls": status[module.path].calls, "reason": status[module.path].reason} if status else {})
            for module in self.tree
        ]
        if self.calls is None or self.tags is None:
            return {"modules": modules}
        calls = [
            {
                "address": traced.call.address,
                "tag": self.tags.tag(traced.call),
                "level": self.tags.is_level(traced.call.path),
                "parent": None if traced.parent is None else traced.parent.address,
                "depth": traced.depth,
                "enter": traced.enter,
                "exit": traced.exit,
                "inputs": _specs(traced.inputs),
                "outputs": _specs(traced.outputs),
            }
            | ({"seconds": self.seconds[traced.call] / 1e9} if self.seconds and traced.call in self.seconds else {})
            for traced in self.calls
        ]
        trace = [{"step": step, "event": event, "address": call.address} for step, call, event in self.trace]
        return {"modules": modules, "calls": calls, "trace": trace}


def static_calls(tree: ModuleTree, apart: Collection[str]) -> CallTree:
    """The calls of a run in which every module is called once, by its parent module.

    Args:
        apart: Paths of the modules that are never called: their children are called by their parents.
    """
    calls: dict[str, TracedCall] = {}
    for module in tree:
        caller = module.parent
        while caller is not None and caller in apart and caller:
            caller = tree[caller].parent
        if caller is None:
            calls[module.path] = TracedCall(ModuleCall(module.path), None, 0, None, None)
        elif module.path not in apart:
            parent = calls[caller]
            calls[module.path] = TracedCall(ModuleCall(module.path), parent.call, parent.depth + 1, None, None)
    return CallTree(tuple(calls.values()))


def hierarchy(
    model: nn.Module | str | Path,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    granularity: Granularity = "auto",
    include: Collection[str] = (),
    exclude: Collection[str] = (),
    timed: bool = False,
) -> HierarchyOverview:
    """The module tree of a model and, with inputs, the calls of a run, with their tags. Nothing is exported.

    Args:
        model: The module, or its name as on the command line: a directory, ``package.module:factory``.
        inputs: Arguments of ``forward``, such as :func:`modelexport.example_inputs` makes. Without them the model is
            not run.
        granularity, include, exclude: Which modules get a segment in tags, as in an export.
        timed: Run it a few times more, and take the time of each call.

    Raises:
        InputsError: The model raised when it ran.
        ModelLoadError: ``model`` does not name a model.
        UsageError: ``include`` or ``exclude`` name a class that the model does not have.
    """
    if not isinstance(model, nn.Module):
        model = load_model(str(model)).model
    tree = module_tree(model)
    apart = containers(model)
    static = Tags(tree, static_calls(tree, apart), granularity=granularity, include=include, exclude=exclude)
    if inputs is None:
        return HierarchyOverview(tree, static_tags=static)
    args, kwargs = run_arguments(inputs)
    calls = trace_calls(model, args, kwargs)
    tags = Tags(tree, calls, granularity=granularity, include=include, exclude=exclude)
    seconds = time_calls(model, inputs, runs=3, warmup=1) if timed else None
    return HierarchyOverview(tree, calls, tags, compare_hierarchies(tree, calls, apart), static, seconds)


def _specs(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "dtype": spec.dtype, "shape": spec.shape} for spec in specs]
