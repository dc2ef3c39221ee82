"""Whether a piece is right on a device, and if not, whether its type is to blame."""

from __future__ import annotations

from typing import Protocol

from modelexport.errors import UsageError
from modelexport.runtime.devices import Device
from modelexport.runtime.part_process import PartResult
from modelexport.tools.devices.device_report import PieceStatus
from modelexport.tools.devices.pieces import Piece

TIMES_ROUNDING = 2.0
"""How many times what rounding costs on the CPU a device may be off that rounds at other places."""


class PieceRunner(Protocol):
    """What runs pieces on a device."""

    device: Device
    measured: int
    runs_any_span: bool
    """Whether it can run any span of nodes."""

    def run(self, piece: Piece, *, log: bool = False) -> PartResult:
        """Run a piece."""


def judge(piece: Piece, result: PartResult, device: Device, bound: float) -> tuple[PieceStatus, float | None]:
    """The status of a piece, and what its type costs on the CPU if it is beyond the bound.

    An error that ONNX Runtime has on the CPU as well, as in a quantized piece, is not blamed on the device: the
    piece agrees; but integers that saturate are wrong on any device. One that only computing in float16 explains is
    called rounding.
    """
    if result.status != "ran":
        return result.status, None
    some = len(piece.outputs) < len(piece.model.graph.outputs)  # others are sequences, or cannot be computed exactly
    if not piece.outputs or (some and result.error <= bound):
        return "not compared", None
    if result.error <= bound:
        return "agree", None
    try:
        on_cpu = piece.errors_on_cpu()
    except UsageError:  # the CPU has no kernel
        on_cpu = 0.0
    rounding = max(on_cpu, piece.cost_of_half() if device.computes == "float16" else 0.0)
    if result.error <= TIMES_ROUNDING * on_cpu:
        return "agree", rounding
    return ("rounding" if result.error <= TIMES_ROUNDING * rounding else "off"), rounding
