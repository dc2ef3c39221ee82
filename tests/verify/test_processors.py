"""Verdicts do not depend on the processor: both sides are computed in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
import models, modelexport
verdicts = {}
for name, path in json.loads(sys.argv[1]).items():
    case = models.case(name)
    report = modelexport.verify(case.build(), case.inputs(), path)
    verdicts[name] = [report.verdict, report.counts, report.owners.confirmed, len(report.claims)]
print(json.dumps(verdicts))
"""


def verdicts(paths: dict[str, str], **processor: str) -> object:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **processor}
    command, here = [sys.executable, "-c", SCRIPT, json.dumps(paths)], Path(__file__).parent
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=here)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda one: "=".join(*one.items()))
def test_a_file_gets_the_same_verdicts_on_another_processor(processor: dict[str, str], exported: Exporter) -> None:
    paths = {name: str(exported(name).path) for name in MODELS}
    assert verdicts(paths, **processor) == verdicts(paths)
