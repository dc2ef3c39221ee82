"""Finds the optimizer of ONNX Runtime that makes the outputs of a correct file wrong."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime

from modelexport.errors import UsageError
from modelexport.runtime.sessions import open_session, run_session

_APPLIED = re.compile(r"GraphTransformer (\w+) modified: 1")
_RULE = re.compile(r"(?:Rule|RewriteRule) (\w+)")


def blamed_optimizer(
    path: Path, feeds: Mapping[str, Any], agrees: Callable[[Mapping[str, Any]], bool], provider: str
) -> str:
    """The name of the optimizer without which a file's outputs agree; empty if the file itself is wrong."""
    plain = open_session(path, provider=provider)
    if not agrees(run_session(plain, feeds)):
        return ""
    names = _applied(path, provider)
    for name in names:
        if agrees(_without(path, feeds, provider, [name])):
            return name
    return ", ".join(names) if names and agrees(_without(path, feeds, provider, names)) else "not known by name"


def _without(path: Path, feeds: Mapping[str, Any], provider: str, names: list[str]) -> Mapping[str, Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=[provider], disabled_optimizers=names)
    try:
        return run_session(session, feeds)
    except UsageError:
        return {}


def _applied(path: Path, provider: str) -> list[str]:
    """The optimizers that change a file when it is loaded, which only the runtime's log tells."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 0
    with tempfile.TemporaryFile() as log:
        with _captured(log.fileno()):
            onnxruntime.InferenceSession(str(path), options, providers=[provider])
        log.seek(0)
        text = log.read().decode(errors="replace")
    return list(dict.fromkeys([*_RULE.findall(text), *_APPLIED.findall(text)]))


@contextmanager
def _captured(target: int) -> Iterator[None]:
    """Capture the runtime's log, which it writes to the process's standard error, not through Python."""
    before = os.dup(2)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
