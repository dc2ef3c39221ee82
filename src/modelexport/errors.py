"""The exceptions that modelexport raises on purpose.

    ModelExportError              anything below; the command line prints its text as one line
    ├── UsageError                the command line or an input was wrong or missing: exit status 2
    │   ├── NoSuchCallError       no call has this address or tag, or several have
    │   ├── ModelLoadError        MODEL cannot be loaded
    │   ├── InputsError           example inputs cannot be generated, or do not fit
    │   ├── FileFormatError       a file is missing, empty, not ONNX, damaged, or of an unknown version
    │   ├── WeightsError          weights do not fit the exported module: lists every entry that does not fit
    │   ├── CaptureError          the model cannot be exported: names the module and the exporter's own reason (3)
    │   ├── RunError              ONNX Runtime does not load or run a file (3)
    │   └── OutputError           an output is refused: it would replace an input, is not a file, has no folder
    │       └── NotWrittenError   nothing could be written: no room, no permission, or the result is unusable (4)
    ├── CheckError                an exported file computes something else (1), or is invalid or does not load (4)
    └── UntaggedNodeError         a node of the exported graph has no owner; lists every one of them (1)

The numbers are exit statuses of the command line: the attribute ``exit_status`` of each class.

Warnings, of the class ``ModelExportWarning``: ``LeftoverWarning``, a folder of temporary files could not be removed;
``LimitedFileWarning``, a file is right only for some sizes or values; ``VersionWarning``, an installed package is not
one that modelexport is tested with; ``ToolWarning``, a tool of another package cannot be used.

A message says what was wrong and what to do next. The original exception is chained (``raise ... from``).
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_NOTEBOOK = f"{os.sep}IPython{os.sep}"


class ModelExportError(Exception):
    """Anything that modelexport raises on purpose.

    Attributes:
        exit_status: The exit status of a command that ends with it.
    """

    exit_status = 1

    def __str__(self) -> str:
        return Exception.__str__(self).replace("?; ", "? ")  # after "did you mean ...?"

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the lines of the caller and the message, without the frames of this package."""
        frames = traceback.extract_tb(self.__traceback__)
        callers = itertools.takewhile(lambda frame: not frame.filename.startswith(_PACKAGE), frames)
        lines = [f"line {frame.lineno}: {frame.line}" for frame in callers if _NOTEBOOK not in frame.filename]
        return [*lines, f"{type(self).__name__}: {self}"]


class ModelExportWarning(UserWarning):
    """Any warning of this package."""


class LeftoverWarning(ModelExportWarning):
    """A folder of temporary files could not be removed. What was to be written is written."""


class LimitedFileWarning(ModelExportWarning):
    """A file is right only for some sizes or values, has an axis that is not dynamic, or takes one more input."""


class VersionWarning(ModelExportWarning):
    """An installed package is outside the tested range, or lacks something that an export uses."""


class ToolWarning(ModelExportWarning):
    """A tool of another package cannot be used. Everything else works."""


class UsageError(ModelExportError):
    """The command line, an argument or an input was wrong or missing."""

    exit_status = 2


class NoSuchCallError(UsageError, KeyError):
    """An address or a tag names no call, or several. A ``KeyError`` as well, since files are mappings."""


class ModelLoadError(UsageError):
    """MODEL cannot be loaded: it is missing, is not a model, has no weights, or its code raised an exception."""


class InputsError(UsageError):
    """Example inputs cannot be generated, or those that were given do not fit the model."""


class CaptureError(UsageError):
    """The model cannot be exported.

    Attributes:
        problem: What went wrong and where, in the exporter's words, on one line.
        address: The address of the module call that was running when it failed; ``None`` when not known.
        reason: The exporter's own reason, shortened to what fits a screen.
        constants: Arguments whose values the model reads, so that it may be exported with them as constants.
    """

    exit_status = 3

    def __init__(
        self, problem: str, *, address: str | None = None, reason: str = "", constants: Sequence[str] = ()
    ) -> None:
        offered = ", ".join(constants)
        options = " ".join(f"--constant {name}" for name in constants)
        hint = (
            f"; its structure depends on the values of {offered}: {options} keeps those of the example"
            if offered
            else ""
        )
        super().__init__(f"the model cannot be exported: {problem}{hint}")
        self.constants = tuple(constants)
        self.problem = problem
        self.address = address
        self.reason = reason


class RunError(UsageError):
    """ONNX Runtime does not load a file, or does not run it on the given inputs."""

    exit_status = 3


class FileFormatError(UsageError):
    """A file is missing, empty, not ONNX, damaged, or of a format version that this version cannot read."""


class WeightsError(UsageError):
    """Weights do not fit an exported file.

    Attributes:
        missing: Keys that the file needs and the weights lack.
        surplus: Keys that the exported module does not have.
        misshapen: Keys whose tensor has another shape or element type.
    """

    def __init__(
        self, message: str, *, missing: Sequence[str] = (), surplus: Sequence[str] = (), misshapen: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.surplus = tuple(surplus)
        self.misshapen = tuple(misshapen)


class OutputError(UsageError):
    """An output is refused, or cannot be written. An existing file of that name is unchanged."""


class NotWrittenError(OutputError):
    """Nothing could be written: there is no room or no permission, or the result does not load or run.

    Also raised if another command is writing the same files. Existing files are unchanged.
    """

    exit_status = 4


class CheckError(ModelExportError):
    """An exported file is invalid, ONNX Runtime cannot load it, or it computes something else than the model.

    The file was not written; ``keep_anyway`` (``--keep-anyway``) of an export writes it nevertheless.

    Attributes:
        reason: What is wrong with the file.
    """

    def __init__(self, message: str, *, reason: str = "", runs: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        if not runs:
            self.exit_status = NotWrittenError.exit_status


class UntaggedNodeError(ModelExportError):
    """Nodes of the exported graph have no owner.

    Attributes:
        nodes: One line for each node: its graph, name and operator.
    """

    def __init__(self, nodes: list[str]) -> None:
        self.nodes = tuple(nodes)
        listed = "\n".join(f"  {node}" for node in nodes)
        super().__init__(
            f"{len(nodes)} {'node has' if len(nodes) == 1 else 'nodes have'} no owner; no file was written:\n{listed}"
        )


@contextmanager
def raised_as(error_for: Callable[[Exception], ModelExportError]) -> Iterator[None]:
    """Around code of others, which may raise anything: that becomes an error of ours, and errors of ours stay."""
    try:
        yield
    except ModelExportError:
        raise
    except Exception as error:  # the purpose of this function
        raise error_for(error) from error
