"""Warnings and log messages of other packages: collected for the report, neither shown nor discarded."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from modelexport.core.one_at_a_time import EXCLUSIVE
from modelexport.core.text import text_without_paths

LOG = logging.getLogger("modelexport")
"""What runs, and what other packages said, at the level ``INFO``."""
READING = logging.getLogger("modelexport.reading")
"""Says, at the level ``INFO``, how the calls of a file without tags were found."""
PACKAGES = ("torch", "transformers", "diffusers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "torch_onnx")
"""Packages whose log messages are collected. What the user's own code logs and prints is shown as usual."""

_ABOUT_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
"""Warnings to the authors of those packages, about how they call each other."""

_OF_ANOTHER_PACKAGE = "torchvision is not installed"
"""What torch says of each operator of a package that it looks for; a model that has one cannot lack the package."""

_collecting: ContextVar[list[str] | None] = ContextVar("modelexport.messages", default=None)


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        if not (message := record.getMessage()).startswith(_OF_ANOTHER_PACKAGE):
            _add(self._messages, message)


class _Unhandled(_Collector):
    """Of the root logger, if it has no other: collects what those packages log under other names, such as a file's or
    none, and shows what nobody else does of the rest, as Python would. Without it, ``logging.warning`` sets up logging.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not set(PACKAGES).isdisjoint(Path(record.pathname).parts):
            super().emit(record)
            return
        logger = logging.getLogger(record.name)
        while logger.parent is not None and not logger.handlers:
            logger = logger.parent
        if logger is logging.root and logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collect warnings, and log messages of the packages that exports rely on, in the list that this yields.

    Each message is in the list once, as one line. A nested block adds to the list of the enclosing block. Printed
    output is not affected. Warnings and loggers are restored afterwards.
    """
    outer = _collecting.get()
    if outer is not None:
        yield outer
        return
    messages: list[str] = []
    with EXCLUSIVE, warnings.catch_warnings(record=True) as caught:
        token = _collecting.set(messages)
        loggers = [
            logger
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
            and (name in PACKAGES or (logger.handlers and name.partition(".")[0] in PACKAGES))
        ]
        before = [(logger, logger.handlers[:], logger.propagate) for logger in loggers]
        warnings.simplefilter("default")
        unhandled = [] if logging.root.handlers else [_Unhandled(messages)]
        logging.root.handlers += unhandled
        for logger in loggers:
            logger.handlers[:] = [_Collector(messages)]
            logger.propagate = False
        try:
            yield messages
        finally:
            for handler in unhandled:
                logging.root.removeHandler(handler)
            for logger, handlers, propagate in before:
                logger.handlers[:] = handlers
                logger.propagate = propagate
            _collecting.reset(token)
            for warning in caught:
                if not issubclass(warning.category, _ABOUT_CODE):
                    _add(messages, str(warning.message))
            for message in messages:
                LOG.info("%s", message)


def _add(messages: list[str], text: str) -> None:
    line = text_without_paths(" ".join(text.split()))
    if line and line not in messages:
        messages.append(line)


@contextmanager
def native_errors_to(target: int) -> Iterator[None]:
    """Redirect what native code writes to the process's standard error, past Python, to another file descriptor."""
    before = os.dup(2)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
