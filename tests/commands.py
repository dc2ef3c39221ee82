"""Commands run in this process, as ``modelexport`` runs them: what they import is imported once for all tests."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from modelexport.cli.app import main


def run(*arguments: object, cwd: Path | None = None) -> CompletedProcess[str]:
    """Run ``modelexport`` with some arguments; never raises for its exit status."""
    line = ["modelexport", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    thresholds = gc.get_threshold()
    with (
        contextlib.chdir(cwd or "."),
        mock.patch.object(sys, "argv", line),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
    ):
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            gc.set_threshold(*thresholds)
    return CompletedProcess(line, status, out.getvalue(), err.getvalue())
