"""Keeps what exporters and optimisers print, log and warn of, which is about themselves, out of the user's sight."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

_LOGGERS = ("torch.onnx", "torch.export", "torch.fx", "transformers", "onnxscript", "onnx_ir")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside: no warnings, no log messages below ``ERROR``, nothing printed by third parties."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
