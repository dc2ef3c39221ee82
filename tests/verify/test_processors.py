"""Verdicts do not depend on the processor: both sides are computed in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exports import Exporter

PROCESSORS = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
]
"""What makes PyTorch compute as another processor does."""
MODELS = ("blocks", "unet", "bert", "t5")

SCRIPT = """
import json, sys
import models, modelexport, torch
verdicts = {}
for name, (path, weights) in json.loads(sys.argv[1]).items():
    case = models.case(name)
    model = case.build()
    model.load_state_dict(torch.load(weights))  # random numbers differ between processors, too
    report = modelexport.verify(model, case.inputs(), path)
    verdicts[name] = [report.verdict, report.counts, report.owners.confirmed, len(report.claims)]
print(json.dumps(verdicts))
"""


def verdicts(paths: dict[str, tuple[str, str]], **processor: str) -> object:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **processor}
    command, here = [sys.executable, "-c", SCRIPT, json.dumps(paths)], Path(__file__).parent
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=here)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda one: "=".join(*one.items()))
def test_a_file_gets_the_same_verdicts_on_another_processor(
    processor: dict[str, str], exported: Exporter, tmp_path: Path
) -> None:
    paths = {name: (str(exported(name).path), str(tmp_path / name)) for name in MODELS}
    for name, (_, weights) in paths.items():
        torch.save(exported(name).case.build().state_dict(), weights)
    assert verdicts(paths, **processor) == verdicts(paths)
