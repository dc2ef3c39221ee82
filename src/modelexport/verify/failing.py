"""Finds the call because of which a file does not run on other inputs, for example because it keeps a size.

The file is cut where it is known to have tensors of the PyTorch run, as on the given inputs. Each segment gets the
tensors of the run on the other inputs; the first segment that fails, or gives another result, has the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from modelexport.core.calls import ModuleCall, Side
from modelexport.errors import UsageError
from modelexport.graph.owners import owner_of
from modelexport.runtime import sessions
from modelexport.runtime.evidence import Evidence, SeenTensor
from modelexport.verify.differences import compare_arrays
from modelexport.verify.matching import WHOLE_UNITS
from modelexport.verify.proof import Proof
from modelexport.verify.segments import GIVEN, nodes_before, segmented


@dataclass(frozen=True)
class Failure:
    """The node that fails or gives another result, its call, and how."""

    call: ModuleCall
    node: str
    position: int
    reason: str


def find_failure(proof: Proof, given: Mapping[str, Any], run: Evidence) -> Failure | None:
    """The first failure on other inputs; ``None`` if every segment computes what it should.

    Args:
        proof: What is known of the file on the inputs of the verification.
        given: The other inputs.
        run: The PyTorch run on them.
    """
    known = _same_tensors(proof, run)
    names = [name for name in proof.nodes if name in known]

    def compute(wanted: Sequence[str]) -> tuple[dict[str, Any], str]:
        cut = segmented(proof.tagged.model, known, wanted, proof.run.dtypes)
        session = sessions.open_session(cut, folder=proof.tagged.path.parent, provider=proof.provider)
        feeds = {
            name: known[name.removesuffix(GIVEN)] if name.endswith(GIVEN) else given[name]
            for name in sessions.input_names(session)
        }
        try:
            return sessions.run_session(session, feeds), ""
        except UsageError as error:
            return {}, str(error)

    arrays, error = compute(names)
    if error:
        count = _first(len(names), lambda count: bool(compute(names[:count])[1]))
        return _failure(proof, known, names[count - 1], compute(names[count - 1 : count])[1])
    compared = {name: compare_arrays(name, known[name], arrays[name], units=WHOLE_UNITS) for name in names}
    wrong = next((name for name in names if compared[name].status == "differ"), None)
    if wrong is None:
        return None
    # What is right elsewhere is not the cause: sizes are computed once for many calls.
    right = {n for name in names if name != wrong and compared[name].status == "agree"
             for n in nodes_before([proof.nodes[name]], known)}  # fmt: skip
    return _failure(proof, known, wrong, f"{wrong}: {compared[wrong].reason}", right)


def _same_tensors(proof: Proof, run: Evidence) -> dict[str, Any]:
    """The values of the file that are tensors of PyTorch, to what they are in another run."""

    def place(tensor: SeenTensor) -> tuple[ModuleCall, Side, str]:
        return tensor.call, tensor.side, tensor.name

    there = {place(tensor): tensor for tensor in run.tensors}
    found: dict[str, Any] = {}
    for tensor in proof.evidence.tensors:
        other = there.get(place(tensor))
        for name, content in proof.hints.items():
            if content == tensor.content and other is not None and proof.run.shapes[name] == tensor.shape:
                found.setdefault(name, run.array(other.content).reshape(other.shape))
    return found


def _first(count: int, fails: Callable[[int], bool]) -> int:
    """The smallest number that fails; ``count`` does."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high


def _failure(
    proof: Proof, known: Mapping[str, Any], name: str, reason: str, right: Collection[ir.Node] = ()
) -> Failure | None:
    nodes = [node for node in nodes_before([proof.nodes[name]], known) if node not in right] or [proof.nodes[name]]
    nodes.sort(key=lambda node: _position(proof, node))
    told = re.search(r"Name:'([^']*)'", reason)  # as ONNX Runtime names the node that fails
    nodes.sort(key=lambda node: told is None or node.name != told[1])
    for node in nodes:
        if (owner := owner_of(node)) is not None:
            return Failure(owner.call, node.name or "", _position(proof, node), reason)
    return None


def _position(proof: Proof, node: ir.Node) -> int:
    return proof.positions.get(node.name or "", 0)
