"""The ``modelexport`` command: its pages, and its exit status."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from modelexport import errors
from modelexport.cli import warnings_as_lines
from modelexport.cli.signals_and_streams import Interrupted, raw, shielded
from modelexport.core.missing_extras import missing_extra
from modelexport.core.text import chained, first_few, suggest
from modelexport.core.version import __version__
from modelexport.terminal.printing import command_line
from modelexport.terminal.progress import LINE
from modelexport.tools import line_of_another_package

with warnings_as_lines():  # the tools of other packages are imported, which may warn
    from modelexport.cli.command_list import COMMANDS, introduction, overview

_COMPLETE = "_MODELEXPORT_COMPLETE"
"""The variable that the scripts of Typer set when a shell asks what a word could be completed to."""
_VARIABLE = "PYTHONHASHSEED"
_NAME = "modelexport"
_PAGES: dict[tuple[str, ...], Callable[[], str]] = {
    (): introduction,
    ("--help",): overview,
    ("--version",): lambda: __version__,
}
"""Command lines that need no parser, whose import takes as long as all the rest of them."""
_INTERNAL = 70
"""The status of an error of ours: ``EX_SOFTWARE`` of sysexits.h."""
_NO_CHOICE = re.compile(r"'([^']*)' is not one of (.+)")
_EXTRA = re.compile(r"unexpected extra argument(?:s|\(s\))? \((.+)\)")
_NO_NUMBER = "it is not a number, as 0.02 is, which is 2 %"
_GIVEN_WITH = {"--model": "a model", "--module": "a module"}
"""The options that take what people give as an argument."""
_LEAST_FREE = 2**26
"""Bytes that libraries need in the folder for temporary files, at least."""
_LONGEST = 4000
"""Characters of a message: several lines of a terminal, and JSON to correct in the longest ones."""


def main() -> None:
    """The ``modelexport`` command.

    Exit status: 0 done; 1 a check said no; 2 the command line or an input was wrong; 3 the model cannot be captured, or
    the file not be run; 4 nothing could be written; 70 an error of ours; 128 and the number of a signal.
    """
    fix_hash_seed([name for name, command in COMMANDS.items() if command.runs_model])
    if _is_program():
        faulthandler.enable()  # says where compiled code, such as the runtime of a device, ended the process
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # NumPy's, about overflow: comparisons count NaN
    # A short command spends most of its time on imports, whose objects stay: garbage collection took a seventh of it.
    gc.set_threshold(50_000, 20, 100)
    before = _files_written()
    try:
        with shielded(), warnings_as_lines():
            status = _run(before)
    except Interrupted as signal:  # before the command began, or after it ended
        status = _fail(_interrupted(before), signal.status)
    if _is_program():
        gc.freeze()  # otherwise Python looks for cycles among all objects before the process ends: 1.8 s with torch
    sys.exit(status)


def fix_hash_seed(commands: Collection[str]) -> None:
    """Start this process again with a fixed seed for hashes, if it is one of these commands and has none.

    A model whose code iterates over a set of texts (``set(config.layer_types)`` in several models of transformers)
    calls its modules in an order that depends on this seed, which Python draws for each process. A call has to have the
    same number when the model is exported and when the file is verified.
    """
    arguments = [text for text in sys.argv[1:] if not text.startswith("-")]
    if arguments and arguments[0] in commands and os.name == "posix" and _VARIABLE not in os.environ and _is_program():
        os.environ[_VARIABLE] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_program() -> bool:
    """Whether the process is the command, and not a program that calls ``main``."""
    words = sys.orig_argv[1:3]
    return words == ["-m", _NAME] or (len(words) > 0 and Path(words[0]).name == _NAME)


def _run(before: int) -> int:
    if (page := _PAGES.get(tuple(sys.argv[1:]))) is not None and not _completes():
        print(page())
        return 0
    from typer.exceptions import Abort, TyperException
    from typer.main import get_command

    from modelexport.cli.command_parsers import app
    from modelexport.cli.name_and_axis_options import spelled_out

    try:
        words = spelled_out(sys.argv[1:])
        LINE.start(raw(sys.stderr), next((word for word in words if word in COMMANDS), ""))
        status = get_command(app)(words, prog_name="modelexport", complete_var=_COMPLETE, standalone_mode=False)
    except errors.ModelExportError as error:
        listed = isinstance(error, errors.UntaggedNodeError)
        status = _fail(str(error) + _temporary_folder(error), error.exit_status, listed=listed)
    except TyperException as error:
        status = _fail(_misused(error), errors.UsageError.exit_status)
    except Interrupted as signal:
        status = _fail(_interrupted(before), signal.status)
    except SystemExit as error:
        if _completes():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.__context__, BrokenPipeError):  # `modelexport tree x.onnx | head`: the parser ends it so
            raw(sys.stderr).close()
            return 0
        # no command ends like this
        ended = f"code of the model, or of a library, ended the program ({error.code!r}): remove that exit"
        status = _fail(ended, errors.CaptureError.exit_status)
    except (Abort, KeyboardInterrupt):
        status = _fail(_interrupted(before), 130)
    except BrokenPipeError:
        raw(sys.stderr).close()
        status = 0
    except Exception as error:  # a person sees a line, and never a traceback without --debug
        status = _fail(*_unexpected(error))
    finally:
        LINE.stop()
    return int(status or 0)


def _completes() -> bool:
    """Whether the process answers a shell, or installs what lets it ask: Typer ends it then."""
    return _COMPLETE in os.environ or bool({"--install-completion", "--show-completion"} & set(sys.argv))


def _unexpected(error: Exception) -> tuple[str, int]:
    """What to say of an exception that no code expected, and the exit status."""
    if isinstance(error, ImportError) and (lacking := missing_extra(error)):
        return lacking, errors.UsageError.exit_status
    if isinstance(error, MemoryError):
        return (
            "there is not enough memory for this file; if it is not large, it is damaged",
            errors.RunError.exit_status,
        )
    if isinstance(error, OSError):  # nobody knew what for; still, it is not our fault
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror or error}: make room or give permission, and run it again"
        return text, errors.NotWrittenError.exit_status
    again = command_line("--debug", *(word for word in sys.argv[1:] if word != "--debug"))
    where = line_of_another_package(error)
    whose, to = (f" of {where}", " to its authors") if where else ("", "")
    said = f"internal error{whose}: {type(error).__name__}: {error}; report it{to} with what `{again}` prints"
    return said, _INTERNAL


def _temporary_folder(error: errors.ModelExportError) -> str:
    """What to say if a library could not write to the folder for temporary files: its error may name a module."""
    import errno
    import shutil
    import tempfile

    if isinstance(error, errors.NotWrittenError):  # of an output, which it names
        return ""
    try:
        free = shutil.disk_usage(folder := tempfile.gettempdir()).free
    except OSError:  # no folder can be written to
        return ""
    causes = list(chained(error))
    is_full = any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes)
    ours = str(Path(folder, "modelexport-"))  # of which a runtime may say only that it could not write to it
    if not is_full and (free >= _LEAST_FREE or not any(ours in str(cause) for cause in causes)):
        return ""
    return f"; {folder}, the folder for temporary files, has {free:,} bytes free: make room, or set TMPDIR"


def _misused(error: Any) -> str:
    """The message for a wrong command line, with what to type instead."""
    near = getattr(error, "possibilities", None)
    text = " ".join((error.message if near else error.format_message()).split()).removesuffix(".")
    text = text.replace("Value error, ", "").replace(". Did you mean", "; did you mean")
    text = text.replace("Input should be a valid number, unable to parse string as a number", _NO_NUMBER)
    if wrong := _NO_CHOICE.search(text):
        text += suggest(wrong[1], re.findall(r"'([^']+)'", wrong[2]))
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "modelexport"
    if (option := getattr(error, "option_name", "")) and context is not None and context.parent is not None:
        near = [flag for flag in near or () if flag != "--help" or option.startswith("--h")]
        others = [] if near else _commands_with(option, context.parent.command)
        text += f"; {' and '.join(others)} {'have' if len(others) > 1 else 'has'} it" if others else ""
    if (extra := _EXTRA.search(text)) and context is not None:
        before = sys.argv[sys.argv.index(extra[1]) - 1] if extra[1] in sys.argv else ""
        flag = next((p for p in context.command.params if before in p.opts and getattr(p, "is_flag", False)), None)
        if flag is not None:
            names = f", or give {before}={extra[1]}" if before == "--dynamic" else ""
            return f"{before} takes no value ({flag.help.removesuffix('.')}): leave out {extra[1]}{names}"
        flags = {flag for parameter in context.command.params for flag in parameter.opts}
        goes_with = ", ".join(f"{what} with {flag}" for flag, what in _GIVEN_WITH.items() if flag in flags)
        text += f": give {goes_with}" if goes_with else ""
        if not goes_with and context.parent is not None:
            text += f"; modules are taken by {first_few(_commands_with('modules', context.parent.command), 3)}"
    if text.startswith("Missing option") and (metavar := getattr(error.param, "metavar", None)):
        text += f" {metavar}"
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{text}{hint}; see `{command} --help`".replace("?; ", "? ")


def _commands_with(parameter: str, group: Any) -> list[str]:
    """The commands that have an option or an argument of this name, as one types them."""
    parsers = [(name, group.commands[name]) for name in group.commands]
    return [
        f"`{_NAME} {name}`" for name, parser in parsers if any(parameter in (p.name, *p.opts) for p in parser.params)
    ]


def _files_written() -> int:
    """How many files this process has written; without the import, which costs a command that writes none."""
    atomic = sys.modules.get("modelexport.files.atomic_writing")
    return len(atomic.WRITTEN) if atomic is not None else 0


def _interrupted(before: int) -> str:
    return "interrupted after its files had been written" if _files_written() > before else Interrupted.line


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
