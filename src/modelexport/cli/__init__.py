"""The command line: parse, call, show."""

import warnings

from modelexport import errors

_formatted = warnings.formatwarning


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our own warnings as the command line says everything; others as Python does."""
    if issubclass(category, errors.ModelExportWarning):
        return f"modelexport: warning: {' '.join(str(message).splitlines())}\n"
    return _formatted(message, category, filename, lineno, line)


warnings.formatwarning = _warning_line  # before the tools of other packages are imported, which may warn
