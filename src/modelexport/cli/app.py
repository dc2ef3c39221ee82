"""The ``modelexport`` command: the list of its commands, and its exit status."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
import warnings
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from modelexport.cli.arguments import spelled_out
from modelexport.cli.commands import changing, exporting, measuring, operating, proving, reading
from modelexport.cli.guards import guarded
from modelexport.cli.hash_seed import fix_hash_seed
from modelexport.cli.shield import Interrupted, raw, shielded
from modelexport.core.version import __version__
from modelexport.errors import ModelExportError, UntaggedNodeError, UsageError, VersionWarning

app = typer.Typer(
    help="Export PyTorch models to ONNX with the exact module call on every node.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS = (
    exporting.export,
    exporting.hierarchy,
    exporting.inputs,
    reading.tree,
    reading.nodes,
    reading.compare,
    proving.verify,
    measuring.cost,
    measuring.profile,
    measuring.report,
    changing.extract,
    operating.split,
    operating.replace,
    operating.place,
    operating.rename,
    changing.update_weights,
    changing.retag,
    changing.optimize,
    changing.adopt,
    changing.strip,
    changing.inline,
    exporting.internals,
)
"""The commands, in the order in which ``--help`` lists them."""
RUN_MODELS = [one.__name__ for one in COMMANDS if "model" in inspect.signature(one).parameters]
"""The names of the commands that may run a model."""
for command in COMMANDS:
    app.command()(guarded(command))


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """The ``modelexport`` command. Exit status: 0 done, 1 a check failed, 2 wrong or missing input, 130 Ctrl-C."""
    fix_hash_seed(RUN_MODELS)
    warnings.formatwarning = _on_one_line
    # A short command spends most of its time on imports, whose objects stay: garbage collection took a seventh of it.
    gc.set_threshold(50_000, 20, 100)
    before = _written()
    try:
        with shielded():
            status = _run(before)
    except Interrupted as signal:  # before the command began, or after it ended
        status = _fail(_interrupted(before), signal.status)
    sys.exit(status)


def _run(before: int) -> int:
    try:
        status = typer.main.get_command(app)(spelled_out(sys.argv[1:]), standalone_mode=False)
    except UntaggedNodeError as error:
        status = _fail(str(error), 1, listed=True)
    except ModelExportError as error:
        status = _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except TyperException as error:
        status = _fail(f"{' '.join(error.format_message().split())}; see `modelexport --help`", 2)
    except Interrupted as signal:
        status = _fail(_interrupted(before), signal.status)
    except SystemExit as error:  # no command ends like this
        status = _fail(f"code of the model, or of a library, ended the program ({error.code!r}): remove that exit", 2)
    except (Abort, KeyboardInterrupt):
        status = _fail(_interrupted(before), 130)
    except BrokenPipeError:  # `modelexport tree x.onnx | head`
        raw(sys.stderr).close()
        status = 0
    except MemoryError:
        status = _fail("there is not enough memory for this file; if it is not large, it is damaged", 2)
    except OSError as error:  # nobody knew what for; still, it is not our fault
        where = f"{error.filename}: " if error.filename else ""
        status = _fail(f"{where}{error.strerror or error}: make room or give permission, and run it again", 2)
    except Exception as error:
        status = _fail(f"internal error: {type(error).__name__}: {error}; run with --debug and report it", 2)
    return int(status or 0)


_LONGEST = 4000
"""Characters of a message: several lines of a terminal, and JSON to correct in the longest ones."""


def _on_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our own warnings as the command line says everything; others as Python does."""
    if issubclass(category, VersionWarning):
        return f"modelexport: warning: {message}\n"
    return _formatted(message, category, filename, lineno, line)


_formatted = warnings.formatwarning


def _written() -> int:
    """How many files this process has written; without the import, which costs a command that writes none."""
    atomic = sys.modules.get("modelexport.files.atomic")
    return len(atomic.written_files()) if atomic is not None else 0


def _interrupted(before: int) -> str:
    return "interrupted after its files had been written" if _written() > before else Interrupted.line


def _fail(message: str, status: int, *, listed: bool = False) -> int:
    """Print what went wrong on one line, whatever names and reasons of others contain; returns the status.

    Args:
        listed: The message is a list with a line for each entry.
    """
    if "--debug" in sys.argv:
        traceback.print_exc()
    text = message if listed else " ".join(message.splitlines())
    if not listed and len(text) > _LONGEST:  # a name from a damaged file
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    print(f"modelexport: {text}", file=sys.stderr)
    return status
