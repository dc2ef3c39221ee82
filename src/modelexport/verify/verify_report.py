"""The results of a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from modelexport.core.calls import ModuleCall
from modelexport.core.result_display import CallReport, Rows, error_text
from modelexport.core.text import plural
from modelexport.traces.array_differences import Difference, Verdict

CallStatus = Literal["agree", "tie", "differ", "not compared", "no nodes"]


class OwnerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes PyTorch's run confirms the owners of."""

    confirmed: int = 0
    contradicted: int = 0
    not_confirmable: int = 0


class CallVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one call."""

    address: str
    tag: str
    status: CallStatus
    reason: str = ""
    """Why it differs or was not compared."""
    nodes: int = 0
    """The number of its own nodes."""
    end_to_end: Difference | None = None
    """The worst of the tensors that it returns, computed from the inputs of the file."""
    per_module: Difference | None = None
    """The worst of the tensors that it returns, computed from the right values before it."""
    first_node: str = ""
    """For a call that differs, the first node of the graph that may be the cause."""
    line: str = ""
    """The line of the model's code that made that node, ``net:12``; empty if it is not known."""
    position: int | None = None
    """Where in the graph that node is."""


class ParameterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a file's parameters with a model's ``state_dict``."""

    used: int
    """The number of entries that the captured graph uses."""
    transformed: int
    """The used entries that are in the file only as values computed from them."""
    unaccounted: list[str]
    """The used entries that cannot be found in the file."""
    differing: list[str]
    """Initializers whose bytes differ from those computed from the entries."""
    untraced: list[str] = []
    """Entries that another tool folded, packed, merged or quantized, as the file says: not compared themselves."""

    @property
    def agrees(self) -> bool:
        """Whether every used entry is in the file, with the model's bytes, but for those that a tool folded."""
        return not self.unaccounted and not self.differing


class FalseClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A false statement in a document or in the file's metadata."""

    document: str
    """``hierarchy``, ``dag``, ``operations``, or ``metadata`` of the file itself."""
    where: str
    """The address of a call, the name of a node or an initializer, or a field."""
    claimed: str
    found: str


class OtherInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs on inputs that were made to find more errors than the given ones."""

    what: str
    """``padded masks``, ``whole vocabulary``, ``other numbers``, ``other sizes``, ``one row``, or several of them."""
    status: Verdict
    reason: str = ""
    outputs: list[Difference] = []


_SHOWN_FIRST: Sequence[CallStatus] = ("differ", "not compared", "tie")
"""The statuses of calls whose rows a notebook shows before all others."""


class VerifyReport(CallReport[CallVerdict], msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a file with the model it was exported from."""

    outputs: list[Difference]
    """The outputs of the file as ONNX Runtime computes them."""
    calls: list[CallVerdict]
    """Every call of the file, in the order in which they began."""
    provider: str
    parameters: ParameterReport | None
    """``None`` if there is no model to compare them with."""
    owners: OwnerCounts = OwnerCounts()
    claims: list[FalseClaim] = []
    """False claims of the metadata, which are faults of the file, and of documents, which are notes."""
    selected: bool = False
    """Whether only some calls were compared, so that nothing is said of the others."""
    others: list[OtherInputs] = []
    perturbed: bool = False
    """Whether the calls were compared with changed weights on both sides, to distinguish equal ones."""
    cause: str = ""
    """The part of the runtime that makes the outputs wrong, if the file itself is right."""
    notes: list[str] = []
    """The parts that were left out, and why."""

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        first = f"; first in {self.diverging.address or '.'}" if self.diverging is not None else ""
        outputs = f"{plural(len(self.outputs), 'output')} within {self.largest:.1e}"
        return f"<VerifyReport: {self.verdict}; {outputs}; calls: {counts}{first}>"

    def _table(self) -> Rows:
        yield "call", "tag", "status", "end to end", "per module", "reason"
        for verdict in sorted(self.calls, key=lambda call: (*_SHOWN_FIRST, call.status).index(call.status)):
            errors = (
                None if difference is None else difference.relative
                for difference in (verdict.end_to_end, verdict.per_module)
            )
            yield verdict.address or ".", verdict.tag, verdict.status, *map(error_text, errors), verdict.reason

    @property
    def verdict(self) -> Verdict:
        """``differ`` if anything does, ``not compared`` if nothing was, else ``agree``."""
        statuses = {o.status for o in self.outputs} | {c.status for c in self.calls} | {o.status for o in self.others}
        false = any(claim.document == "metadata" for claim in self.claims)
        if "differ" in statuses or false or (self.parameters is not None and not self.parameters.agrees):
            return "differ"
        if not ({c.status for c in self.calls} if self.selected else statuses) & {"agree", "tie"}:
            return "not compared"
        return "agree"

    @property
    def document(self) -> Any:
        return {"diverging": self.diverging} | super().document

    @property
    def errors(self) -> dict[ModuleCall, float]:
        """How far off what each call computes is, as a share of its size: from the right values before it, or where
        PyTorch's are not known there, in a run of the whole.
        """
        worst = {call.address: call.per_module or (call.end_to_end if call.nodes else None) for call in self.calls}
        return {ModuleCall.parse(a): d.relative for a, d in worst.items() if d is not None and d.relative is not None}

    @property
    def diverging(self) -> CallVerdict | None:
        """The call with the first node of the graph that may be wrong, or else the first that differs."""
        wrong = [call for call in self.calls if call.status == "differ"]
        placed = [call for call in wrong if call.position is not None]
        return min(placed, key=lambda call: call.position or 0, default=wrong[0] if wrong else None)

    @property
    def counts(self) -> dict[str, int]:
        """The number of calls of each status."""
        return dict(Counter(call.status for call in self.calls))

    @property
    def largest(self) -> float:
        """The largest absolute difference of any output: 0 of one that agrees in float64, infinite if one could not be
        compared.
        """
        unknown = ((0.0 if o.status == "agree" else np.inf) if o.absolute is None else o.absolute for o in self.outputs)
        return max(unknown, default=0.0)
