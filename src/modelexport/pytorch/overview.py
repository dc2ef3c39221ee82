"""The hierarchy of a model without an export: what ``modelexport hierarchy`` shows, and its JSON document."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from modelexport.core.calls import CallTree, TensorSpec
from modelexport.core.hierarchies import Comparison, compare_hierarchies
from modelexport.core.modules import ModuleTree
from modelexport.core.tags import Granularity, Tags
from modelexport.pytorch.static import containers, module_tree
from modelexport.pytorch.traced import trace_calls
from modelexport.pytorch.values import run_arguments


@dataclass(frozen=True)
class HierarchyOverview:
    """The static tree, and with inputs the calls of a run, their tags and what became of each module."""

    tree: ModuleTree
    calls: CallTree | None = None
    tags: Tags | None = None
    comparison: Comparison | None = None

    def document(self) -> dict[str, Any]:
        """As JSON values: ``modules``, and with a run ``calls``; a module has ``reason`` why it was not called."""
        status = {module.path: module for module in self.comparison.modules} if self.comparison else {}
        modules = [
            {
                "path": module.path,
                "class": module.class_name,
                "qualified_class": module.qualified_class,
                "depth": module.depth,
                "leaf": module.is_leaf,
                "aliases": module.aliases,
                "parameters": module.parameters,
                "trainable": module.trainable,
                "shapes": module.shapes,
            }
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
            for traced in self.calls
        ]
        return {"modules": modules, "calls": calls}


def hierarchy_overview(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any] | None,
    granularity: Granularity = "all",
    include: Collection[str] = (),
    exclude: Collection[str] = (),
) -> HierarchyOverview:
    """Look at a model; with inputs, run it once and look at its calls.

    Raises:
        InputsError: The model raised when it ran.
        UsageError: ``include`` or ``exclude`` name a class that the model does not have.
    """
    tree = module_tree(model)
    if inputs is None:
        return HierarchyOverview(tree)
    args, kwargs = run_arguments(inputs)
    calls = trace_calls(model, args, kwargs)
    tags = Tags(tree, calls, granularity=granularity, include=include, exclude=exclude)
    return HierarchyOverview(tree, calls, tags, compare_hierarchies(tree, calls, containers(model)))


def _specs(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "dtype": spec.dtype, "shape": spec.shape} for spec in specs]
