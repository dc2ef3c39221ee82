"""The command line: parse, call, show."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from modelexport import errors


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show our own warnings as the command line says everything, while a command runs; others as Python does."""
    before = warnings.formatwarning

    def one_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, errors.ModelExportWarning):
            return f"modelexport: warning: {' '.join(str(message).splitlines())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = before
