"""The one way in which commands write models: loaded and run first, unless the command has its own check or was told
not to check, or they are large or for other runtimes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from modelexport.core.limits import CHECKED_BYTES
from modelexport.core.text import reason_of
from modelexport.core.warned_callers import warn_caller
from modelexport.errors import FileFormatError, InputsError, ModelExportWarning, NotWrittenError, UsageError
from modelexport.files import atomic_writing
from modelexport.files.atomic_writing import Replacement
from modelexport.files.folder_locks import STAGING_PREFIX
from modelexport.files.linked_weights import data_files
from modelexport.files.onnx_models import load_onnx
from modelexport.files.protected_inputs import being_read
from modelexport.format import keys
from modelexport.graph.properties import drop_tag_attributes, text_of

if TYPE_CHECKING:
    from modelexport.runtime.sessions import Session

Feeds = Mapping[str, Any]

_FOREIGN = re.compile(
    r"NOT_IMPLEMENTED|is under development|Unsupported model IR version|has no bfloat16|is not a registered"
)
"""What ONNX Runtime says of a file that may be right and run elsewhere."""
_UNKNOWN_DOMAIN = re.compile(r"(?<![\w.])(?!ai\.onnx:)[\w.]+:\w+\(-?\d+\) is not a registered")
"""What it says of an operator of a library that is not registered."""


@contextlib.contextmanager
def checked_and_replaced(
    reads: Iterable[Path] = (), *, check: bool = True, inputs: Feeds | None = None
) -> Iterator[Replacement]:
    """Replaces a set of files, of one or several folders, together, if each model among them loads and runs.

    Args:
        reads: Files and folders of which nothing may be replaced.
        check: Whether the models are loaded and run; false if the command has its own check, or was told not to.
        inputs: What the models are run with; random inputs if left out.

    Raises:
        OutputError: They cannot be written.
        NotWrittenError: A model cannot be loaded or run. Nothing is replaced.
    """
    sources = [path for path in (*reads, *being_read()) if path.suffix == ".onnx" and not _is_staged(path)]
    with atomic_writing.replaced_together(reads) as replacement:
        yield replacement
        for folder in replacement.folders if check else ():
            if not _is_staged(folder.directory):  # else it is moved again, and checked then
                for file, place in folder.new().items():
                    if file.suffix == ".onnx":
                        _check(file, place, sources, inputs)


def _is_staged(path: Path) -> bool:
    return any(part.startswith(STAGING_PREFIX) for part in path.parts)


@contextlib.contextmanager
def checked_and_written(
    directory: Path,
    reads: Iterable[Path] = (),
    *,
    make: bool = False,
    package: bool = False,
    check: bool = True,
    inputs: Feeds | None = None,
) -> Iterator[Path]:
    """A folder to write files into; they are moved into ``directory`` when the block ends without an exception.

    Args:
        reads, check, inputs: As :func:`checked_and_replaced` has them.
        make, package: As :meth:`modelexport.files.atomic_writing.Replacement.folder` has them.

    Raises:
        As :func:`checked_and_replaced`.
    """
    with checked_and_replaced(reads, check=check, inputs=inputs) as replacement:
        yield replacement.folder(directory, make=make, package=package)


def _check(file: Path, place: Path, sources: Iterable[Path], inputs: Feeds | None) -> None:
    """Load and run a model in a staging folder; refuse it if that fails, and its sources load and run."""
    from modelexport.runtime.random_inputs import make_random_inputs
    from modelexport.runtime.sessions import ends_the_process, run_session

    with beside(file, place.parent):
        if sum(part.stat().st_size for part in (file, *data_files(file)) if part.is_file()) > CHECKED_BYTES:
            return
        try:
            model, session = _opened(file)
        except (UsageError, UnicodeError) as error:
            if _is_foreign(str(error), sources):
                return
            raise _refusal(place, "load", error) from error
        if ends_the_process(model):
            warn_caller(_ENDS.format(place), ModelExportWarning)
        tried = [inputs] if inputs is not None else []
        if inputs is None:
            try:
                make_random_inputs(model, session)
            except InputsError:  # they fit no file, or this one is wrong: those of its sources show which
                for source in sources:
                    with contextlib.suppress(UsageError):
                        tried.append(make_random_inputs(*_opened(source)))
        for feeds in tried:
            if feeds.keys() == {value.name for value in session.get_inputs()}:
                try:
                    run_session(session, feeds)
                except UsageError as error:
                    raise _refusal(place, "run", error) from error


_ENDS = (
    "{} has a MatMul of float16 behind a Transpose, with which some versions of ONNX Runtime end the process on a CPU: "
    "open it there with SessionOptions.graph_optimization_level = ORT_ENABLE_EXTENDED"
)


def _opened(file: Path) -> tuple[ir.Model, Session]:
    """A model, and a session for it without tags as attributes."""
    from modelexport.runtime.sessions import open_session

    model = load_onnx(file)
    is_plain = text_of(model, keys.ENCODING) != "attributes"
    if not is_plain:
        drop_tag_attributes(model)
    return model, open_session(file if is_plain else model, folder=file.parent, optimized=True)


def _is_foreign(fault: str, sources: Iterable[Path]) -> bool:
    """Whether a file that this ONNX Runtime cannot load is meant for others, like the file that it was made from."""
    if _FOREIGN.search(fault) is None:
        return False
    if _UNKNOWN_DOMAIN.search(fault) is not None:
        return True
    for file in sources:
        try:
            _opened(file)
        except UsageError as error:
            if _FOREIGN.search(str(error)):
                return True
    return False


def _refusal(place: Path, verb: str, error: Exception) -> NotWrittenError:
    problem = f"{place} was not written: the result does not {verb}, and nothing was replaced"
    return NotWrittenError(f"{problem} ({reason_of(error)})")


@contextlib.contextmanager
def beside(file: Path, folder: Path) -> Iterator[None]:
    """Make a model in a staging folder runnable inside the block: weights that lie in ``folder`` already are found.

    Raises:
        NotWrittenError: The model cannot be read.
    """
    added: list[Path] = []
    try:
        for target in data_files(file):
            source = folder / target.relative_to(file.parent)
            if not target.exists() and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(source)
                added.append(target)
        yield
    except FileFormatError as error:
        raise _refusal(folder / file.name, "load", error) from error
    finally:
        for target in added:
            target.unlink()
