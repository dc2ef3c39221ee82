"""What a verification found, as data."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from modelexport.verify.differences import Difference


class CallVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one call."""

    address: str
    tag: str
    status: str
    """``agree``, ``differ``, ``not comparable``, or ``no nodes``."""
    reason: str = ""
    nodes: int = 0
    """Its own nodes."""
    end_to_end: Difference | None = None
    """The worst of the values that it returns, in one run of the whole file."""
    per_module: Difference | None = None
    """The worst of the values that its own nodes compute, from the right values."""


class ParameterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a file's parameters with a model's ``state_dict``."""

    used: int
    """Entries that the captured graph uses."""
    transformed: int
    """Those of them that are in the file only as something that is computed from them."""
    unaccounted: list[str]
    """Those of them that cannot be found in the file."""
    differing: list[str]
    """Initializers whose bytes are not what the entries give."""

    @property
    def agrees(self) -> bool:
        """Whether every used entry is in the file, with the model's bytes."""
        return not self.unaccounted and not self.differing


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a file with the model it was exported from."""

    outputs: list[Difference]
    calls: list[CallVerdict]
    """Every call of the file, in the order in which they began."""
    provider: str
    tolerances: dict[str, tuple[float, float]]
    parameters: ParameterReport | None
    """``None`` where there is no model to compare them with."""

    @property
    def agrees(self) -> bool:
        """Whether every output and every call that can be compared agrees, and every parameter is the model's."""
        outputs = all(output.status == "agree" for output in self.outputs)
        calls = not any(call.status == "differ" for call in self.calls)
        return outputs and calls and (self.parameters is None or self.parameters.agrees)

    @property
    def diverging(self) -> CallVerdict | None:
        """The first call whose own nodes are wrong, or else the first that does not return what it should."""
        wrong = [call for call in self.calls if call.status == "differ"]
        return next((call for call in wrong if call.per_module is not None), wrong[0] if wrong else None)

    @property
    def counts(self) -> dict[str, int]:
        """How many calls there are of each status."""
        return dict(Counter(call.status for call in self.calls))

    @property
    def largest(self) -> float:
        """The largest absolute difference of any output; infinite when one could not be compared."""
        return max((np.inf if o.absolute is None else o.absolute for o in self.outputs), default=0.0)
