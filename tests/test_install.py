"""Somebody who installs the package from its sdist or its wheel gets all that works on files, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import modelexport
from test_results import Blocks

SCRIPT = Path(__file__).parents[1] / "scripts" / "install"


@pytest.mark.slow  # thirty commands, each a process
def test_what_sdist_and_wheel_install_works_on_files_and_names_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="`make test` installs it")
    file = tmp_path / "blocks.onnx"
    modelexport.export(Blocks(), {"x": torch.ones(2, 4)}, file, reference=True, check=False)
    done = subprocess.run(
        [sys.executable, SCRIPT, file, "--linked"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("MB of files") == 2
    assert "17 commands work on files" in done.stdout
