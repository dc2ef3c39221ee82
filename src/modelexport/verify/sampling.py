"""Compares some calls of a file that is too large to run whole, each cut out and run alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from modelexport.core.calls import ModuleCall
from modelexport.errors import FileFormatError
from modelexport.graph.nodes import initializers
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence
from modelexport.tagged.file import TaggedFile
from modelexport.verify.differences import compare_arrays, worst
from modelexport.verify.segments import GIVEN, segmented
from modelexport.verify.verdicts import CallVerdict


def claimed_values(tagged: TaggedFile, evidence: Evidence) -> dict[str, str]:
    """The values of the main graph that the sidecar maps to tensors of a run: name to content.

    Raises:
        FileFormatError: There is no sidecar.
    """
    if tagged.hierarchy is None:
        sidecar = tagged.path.with_suffix(".hierarchy.json")
        raise FileFormatError(f"{sidecar} is missing: it has the values of {tagged.path} that modules get and return")
    made = {value.name for node in tagged.model.graph for value in node.outputs}
    seen = {(t.call.address, str(t.side), t.name): t for t in evidence.tensors}
    found = {}
    for call in tagged.hierarchy.calls:
        for side, tensors in (("inputs", call.inputs), ("outputs", call.outputs)):
            for tensor in tensors:
                its = seen.get((call.address, side, tensor.name))
                if its and tensor.value in made and (its.dtype, len(its.shape)) == (tensor.dtype, len(tensor.shape)):
                    found[tensor.value or ""] = (its.content, its.shape)
    return {name: content for name, (content, _) in found.items()}


def verify_alone(
    tagged: TaggedFile,
    feeds: Mapping[str, Any],
    evidence: Evidence,
    calls: Collection[ModuleCall],
    *,
    provider: str = sessions.CPU,
) -> tuple[list[CallVerdict], set[str]]:
    """Compare the results of some calls' nodes, computed from PyTorch's values.

    Args:
        calls: The calls themselves; calls inside them only if they are listed too.

    Returns:
        The verdicts, and the names of the initializers that were needed.

    Raises:
        FileFormatError: There is no sidecar, without which a whole run would be needed.
        UsageError: ONNX Runtime cannot load a cut-out call, or does not have the provider.
    """
    hints = claimed_values(tagged, evidence)
    shapes = {tensor.content: tensor.shape for tensor in reversed(evidence.tensors)}
    returned = {(t.call, t.content) for t in evidence.tensors if t.side == "outputs"}
    made = {value.name or "": node for node in tagged.model.graph for value in node.outputs}
    verdicts, weights = [], set[str]()
    for traced in tagged.calls:
        call = traced.call
        if call not in calls:
            continue
        nodes = sum(owner.call == call for node in tagged.nodes if (owner := owner_of(node)) is not None)
        wanted = [
            name
            for name in hints
            if (call, hints[name]) in returned or ((owner := owner_of(made[name])) and owner.call == call)
        ]
        found = []
        if wanted:
            cut = segmented(tagged.model, hints, wanted)
            weights.update(value.name or "" for value in initializers(cut))
            session = sessions.open_session(cut, folder=tagged.path.parent, provider=provider)
            inputs = {}
            for name in sessions.input_names(session):
                content = hints.get(name.removesuffix(GIVEN), "")
                is_given = name.endswith(GIVEN)
                inputs[name] = evidence.array(content).reshape(shapes[content]) if is_given else feeds[name]
            for name, array in sessions.run_session(session, inputs).items():
                right = evidence.array(hints[name]).reshape(shapes[hints[name]])
                found.append(compare_arrays(name, right, array))
        own = worst(found)
        verdicts.append(
            CallVerdict(
                address=call.address,
                tag=tagged.tags[call],
                status=own.status if own else "not compared" if nodes else "no nodes",
                reason=own.reason if own else "no tensor that it returns is a known value of the file" if nodes else "",
                nodes=nodes,
                per_module=own,
            )
        )
    return verdicts, weights
