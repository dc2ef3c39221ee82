"""Changes that make a file right on a device, each tried there before it is made."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from modelexport.devices.changes import KINDS, change_nodes, kinds_for, write_changed
from modelexport.devices.device_report import (
    DeviceReport,
    Fix,
    FixStep,
    PieceReport,
)
from modelexport.devices.judged_pieces import Runs, judge
from modelexport.devices.pieces import Piece, Pieces
from modelexport.devices.wrong_modules import check
from modelexport.graph.copies import copy_of
from modelexport.tagged.file import TaggedFile, read_tagged

_ROUNDS = 5
"""How often a changed file is looked at again."""


def find_fix(
    tagged: TaggedFile,
    report: DeviceReport,
    output: Path,
    feeds: Mapping[str, Any],
    runs: Runs,
    tell: Callable[[str], None] = lambda step: None,
) -> Fix:
    """Change what is wrong on a device, and write the file that is the least wrong there.

    Each change is tried on the device, on the smallest wrong piece. Those that make it right are made in the file, and
    the file is looked at again: behind what was wrong something else may be.
    """
    steps: list[FixStep] = []
    unchanged: list[str] = []
    with tempfile.TemporaryDirectory(prefix="modelexport-fix-") as folder:
        current, found = tagged, report
        for number in range(_ROUNDS):
            new, unchanged = _steps(current, found, Pieces(current, feeds), runs, tell)
            if not new:
                break
            steps += new
            path = Path(folder, f"{number}.onnx")
            write_changed(tagged.path, [(step.kind, step.nodes) for step in steps], path)
            current = read_tagged(path)
            found = check(current, feeds, runs, bound=report.bound, tell=tell)
            if found.agrees:
                unchanged = []
                break
    if steps:
        write_changed(tagged.path, [(step.kind, step.nodes) for step in steps], output)
    whole = found.whole
    path_written = str(output) if steps else ""
    return Fix(
        path=path_written,
        steps=steps,
        unchanged=unchanged,
        error=whole.error,
        nodes=whole.nodes,
        agrees=whole.status == "agree",
    )


def _steps(
    tagged: TaggedFile, report: DeviceReport, pieces: Pieces, runs: Runs, tell: Callable[[str], None]
) -> tuple[list[FixStep], list[str]]:
    """For each wrong piece the first change that makes it right, and the addresses of those without one."""
    steps, unchanged = [], []
    for culprit in report.culprits:
        call = tagged.find(culprit.address or ".")
        names = set(culprit.span) or {node.name or "" for node in tagged.nodes_of(call)}
        nodes = [node for node in tagged.model.graph if node.name in names and node.op_type != "Constant"]
        piece = pieces.of_nodes(str(call), nodes, [call])
        step = _first_step(culprit, piece, nodes, report.bound, runs, tell) if piece is not None else None
        if step is None:
            unchanged.append(culprit.address)
        else:
            steps.append(step)
    return steps, unchanged


def _first_step(
    culprit: PieceReport, piece: Piece, nodes: Sequence[ir.Node], bound: float, runs: Runs, tell: Callable[[str], None]
) -> FixStep | None:
    names, operators = [node.name or "" for node in nodes], [node.op_type for node in nodes]
    for kind in kinds_for(operators):
        model = copy_of(piece.model)
        if not change_nodes(model, kind, names):
            continue
        tell(f"{culprit.address or '.'}: {KINDS[kind]}")
        changed = dataclasses.replace(piece, model=model)
        result = runs.run(changed)
        if judge(changed, result, runs.device, bound)[0] in ("agree", "rounding"):
            return FixStep(
                address=culprit.address,
                kind=kind,
                what=KINDS[kind],
                nodes=names,
                operators=operators,
                before=culprit.error,
                after=result.error,
            )
    return None
