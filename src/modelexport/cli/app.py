"""The ``modelexport`` command: the list of its commands, and its exit status."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Annotated

import typer
from typer.exceptions import Abort, TyperException

from modelexport.cli.arguments import spelled_out
from modelexport.cli.commands import changing, exporting, measuring, operating, proving, reading
from modelexport.cli.shield import Interrupted, raw, shielded
from modelexport.core.version import __version__
from modelexport.errors import ModelExportError, UsageError

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
for command in COMMANDS:
    app.command()(command)


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
    # A short command spends most of its time on imports, whose objects stay: garbage collection took a seventh of it.
    gc.set_threshold(50_000, 20, 100)
    with shielded():
        status = _run()
    sys.exit(status)


def _run() -> int:
    try:
        status = typer.main.get_command(app)(spelled_out(sys.argv[1:]), standalone_mode=False)
    except ModelExportError as error:
        status = _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except TyperException as error:
        status = _fail(f"{' '.join(error.format_message().split())}; see `modelexport --help`", 2)
    except Interrupted as signal:
        status = _fail(signal.line, signal.status)
    except (Abort, KeyboardInterrupt):
        status = _fail(Interrupted.line, 130)
    except BrokenPipeError:  # `modelexport tree x.onnx | head`
        raw(sys.stderr).close()
        status = 0
    except MemoryError:
        status = _fail("there is not enough memory for this file; if it is not large, it is damaged", 2)
    except Exception as error:
        status = _fail(f"internal error: {type(error).__name__}: {error}; run with --debug and report it", 2)
    return int(status or 0)


def _fail(message: str, status: int) -> int:
    if "--debug" in sys.argv:
        traceback.print_exc()
    print(f"modelexport: {message}", file=sys.stderr)
    return status
