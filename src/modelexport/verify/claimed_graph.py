"""Checks what a file itself says, apart from its tags: its outputs, their sizes, its entries, and which calls ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.graph.nodes import nested_graphs
from modelexport.graph.owners import owner_of
from modelexport.runtime.evidence import Evidence
from modelexport.tagged.file import TaggedFile
from modelexport.verify.claimed_modules import false_claim
from modelexport.verify.claimed_sizes import Shapes, false_sizes
from modelexport.verify.verdicts import FalseClaim
from modelexport.weights.transforms import parameter_plan, state_dict_of


def false_claims_of_outputs(tagged: TaggedFile, evidence: Evidence, shapes: Shapes) -> Iterator[FalseClaim]:
    """The outputs that have the name of another one, and inputs and outputs of other sizes than they declare.

    Args:
        shapes: The shapes that the values of the file had in a run, those of its inputs included.
    """
    root = tagged.calls.calls[0].call
    right = [t.name for t in evidence.tensors if t.call == root and t.side == "outputs" and 0 not in t.shape]
    values = list(tagged.model.graph.outputs)
    for value, name in zip(values, right, strict=False):
        if len(values) == len(right) and value.name in right:
            yield from false_claim("metadata", value.name or "", value.name, name)
    yield from false_sizes((*tagged.model.graph.inputs, *values), shapes, {})


def false_claims_of_calls(tagged: TaggedFile, evidence: Evidence) -> Iterator[FalseClaim]:
    """The calls that the file lists beside the right ones of their caller, and those that it leaves out.

    An exported module may call others than the same module in Python, so that only a caller is judged that agrees in
    all calls but those that one side has. A graph with branches may list calls that did not run, and PyTorch may make
    calls in them that the capture does not show.
    """
    bodies = any(nested_graphs(node) for node in tagged.model.graph)
    there, here = _children(evidence.parents), _children({t.call: t.parent for t in tagged.calls})
    with_nodes = {
        around
        for node in tagged.nodes
        if (owner := owner_of(node)) is not None
        for call in owner.calls
        for around in tagged.calls.stack(call)
    }
    for parent, right in there.items():
        said = here.get(parent, set())
        if not said & right:
            continue
        missing, extra = right - said, said - right
        if missing and not extra and not bodies:
            yield from false_claim("metadata", parent.address, sorted(map(str, said)), sorted(map(str, right)))
        elif extra and not missing and not extra & with_nodes:
            yield from false_claim("metadata", min(extra).address, "called", "not called")


def _children(parents: Mapping[ModuleCall, ModuleCall | None]) -> dict[ModuleCall, set[ModuleCall]]:
    found: dict[ModuleCall, set[ModuleCall]] = defaultdict(set)
    for call, parent in parents.items():
        if parent is not None:
            found[parent].add(call)
    return found


def false_claims_of_entries(model: ir.Model, keys: Collection[str]) -> Iterator[FalseClaim]:
    """The entries that the list in the file leaves out, or calls unused although an initializer is computed from them.

    Args:
        keys: The keys of the model's entries; empty if it is not available.
    """
    listed = state_dict_of(model)
    yield from false_claim("metadata", "state_dict", sorted(key for key in keys if key not in listed), [])
    plans = (parameter_plan(value) for value in model.graph.initializers.values())
    used = {key for plan in plans if plan is not None for key in plan.keys}
    wrong = sorted(key for key in used if key not in listed or not listed[key].used)
    yield from false_claim("metadata", "state_dict", wrong, [])
