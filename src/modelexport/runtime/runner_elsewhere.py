"""What runs behind a command, sent there after :mod:`.runner`, whose functions it calls by their names.

Each job is a line of JSON with the contents of its files; each answer is one with those that the job saved.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from modelexport.runtime.runner import load, run_model


def serve_elsewhere() -> None:
    """As ``serve``, where no folder is shared: a job has the contents of its files, and an answer those it saved."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    for line in sys.stdin.buffer:
        job = json.loads(line)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, content in job["files"].items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(base64.b64decode(content))
            try:
                result = facts() if "facts" in job else run_model(folder, job["model"], job["device"])
                result["status"] = "ran"
                saved = [value["save"] for value in job.get("model", {}).get("outputs", []) if "save" in value]
                result["saved"] = {file: base64.b64encode((folder / file).read_bytes()).decode() for file in saved}
            except Exception as error:
                result = {"status": "failed", "message": " ".join(str(error).split())[:600] or type(error).__name__}
            load.cache_clear()  # a session keeps its file open
        print(json.dumps(result), file=answers, flush=True)


def facts() -> dict[str, Any]:
    """The versions, the platform and the providers of the machine that runs this."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text(errors="replace") if cpu.is_file() else ""
    return {
        "onnxruntime": ort.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "providers": ort.get_available_providers(),
        "vnni": "vnni" in flags,
    }
