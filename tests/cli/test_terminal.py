"""On a terminal: what runs is said, trees fit the screen, colours mean something. In a pipe there is none of it."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from children import forked
from commands import run
from exports import Exporter
from modelexport.cli.app import main
from modelexport.core.text import printable
from modelexport.core.timed_stages import with_progress
from modelexport.terminal.printing import fitting_depth, left_out, rendered, styled
from modelexport.terminal.progress import ProgressLine

pty = pytest.importorskip("pty")


def on_terminal(*arguments: object, cwd: Path, lines: int = 30, **environment: str) -> str:
    """What the command writes to a terminal, both of its streams."""
    import fcntl
    import struct
    import termios

    def work() -> int:
        os.chdir(cwd)
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 120, 0, 0))
        for name in ("NO_COLOR", "LINES", "COLUMNS"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm"} | environment)
        sys.stdout = sys.__stdout__ = open(1, "w")  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w")  # noqa: SIM115
        sys.argv = ["modelexport", *map(str, arguments)]
        try:
            main()
        finally:
            sys.stdout.flush()
        return 0

    process, ours = forked(work, pty.fork)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.waitpid(process, 0)
    os.close(ours)
    return seen.decode()


def without_progress(text: str) -> str:
    """The text without the line that says what a command is doing, which a slow machine draws at any time."""
    return re.sub(r"\r\x1b\[K(\w+ \.\.\. [^\r]*)?", "", text)


def test_a_tree_is_as_deep_as_the_screen_and_says_how_to_see_the_rest(exported: Exporter) -> None:
    path = exported("bert").path
    whole = run("tree", path).stdout
    shown = without_progress(on_terminal("tree", path, cwd=path.parent))
    assert len(shown.splitlines()) <= 30 < len(whole.splitlines())
    assert "not shown: --depth 5 shows all" in shown
    deep = without_progress(on_terminal("tree", path, "--depth", 5, cwd=path.parent))
    assert deep.replace("\r\n", "\n") == whole


def test_colours_are_for_terminals_that_want_them(exported: Exporter) -> None:
    path = exported("blocks").path
    assert "\x1b[31m" in on_terminal("cost", path, cwd=path.parent)
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b[31m" not in on_terminal("cost", path, cwd=path.parent, **environment)
    assert "\x1b" not in run("cost", path).stdout


def test_a_table_has_the_columns_that_fit_and_names_the_others(exported: Exporter) -> None:
    path = exported("bert").path
    text = on_terminal("cost", path, cwd=path.parent, NO_COLOR="1")
    shown = [line for line in re.split(r"[\r\n]+|\x1b\[K", text) if line and not line.startswith("cost ...")]
    assert max(map(len, shown)) <= 120
    missing = next(line for line in shown if line.startswith("not shown"))
    assert "peak bytes" in missing
    assert "--csv shows all" in missing
    assert "PRECISION" in shown[0]
    assert "PEAK BYTES" not in shown[0]
    assert "PEAK BYTES" in run("cost", path).stdout.splitlines()[0]


def test_a_name_that_contains_a_colour_is_escaped_where_colours_are_shown() -> None:
    text = styled("a\x1b[31mb", "green", colour=True) + "\x1b[2J"
    assert rendered(text, printable) == "\x1b[32ma\\x1b[31mb\x1b[0m\\x1b[2J"
    assert rendered("\x1b[2J", printable) == "\\x1b[2J"


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_command_that_takes_longer_than_a_second_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelexport.terminal.progress.AFTER", 0.05)
    monkeypatch.setattr("modelexport.terminal.progress.EVERY", 0.02)
    terminal, line = Terminal(), ProgressLine()
    line.start(terminal, "export")  # type: ignore[arg-type]
    line.tell("decode: capture\n")
    end = time.monotonic() + 5
    while "decode: capture\\n ... 0 s" not in terminal.text and time.monotonic() < end:
        time.sleep(0.01)
    line.stop()
    assert "decode: capture\\n ... 0 s" in terminal.text
    assert terminal.text.endswith("\r\x1b[K")
    written = terminal.text
    time.sleep(0.1)
    assert terminal.text == written


def test_work_of_equal_pieces_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the pieces that are done; pieces inside a piece count for nothing, and after the last all is forgotten."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("modelexport.terminal.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr("modelexport.terminal.progress.EVERY", 0.01)
    terminal, line = Terminal(), ProgressLine()

    def drawn(text: str) -> bool:
        terminal.text, end = "", time.monotonic() + 5
        while text not in terminal.text and time.monotonic() < end:
            time.sleep(0.01)
        return text in terminal.text

    clock.now = -5.0  # so that the line is drawn at once
    line.start(terminal, "sensitivity")  # type: ignore[arg-type]
    clock.now = 0.0
    for piece in with_progress(range(30)):
        assert [*with_progress("abc")] == [*"abc"]
        if piece == 1:
            assert drawn("\r\x1b[Ksensitivity ... 13 s, about 4 min left")
        if piece == 20:
            assert drawn("\r\x1b[Ksensitivity ... 165 s, about 80 s left")
        clock.now += 8
    assert drawn("\r\x1b[Ksensitivity ... 245 s\r")
    line.stop()


def test_nothing_is_drawn_in_the_first_second_or_in_a_pipe(tmp_path: Path) -> None:
    terminal, line = Terminal(), ProgressLine()
    line.start(terminal, "tree")  # type: ignore[arg-type]
    line.stop()
    assert terminal.text == ""
    assert run("tree", "none.onnx", cwd=tmp_path).stderr.count("\n") == 1


def test_all_levels_are_shown_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("LINES", "30")
    assert fitting_depth([0, 1, 1, 2], None) is None
    assert fitting_depth([0, *[1] * 10, *[2] * 40], None) == 1
    assert fitting_depth([0, *[1] * 100], None) == 1
    assert fitting_depth([0, *[1] * 100], 0) == 0
    assert left_out([0, 1, 2, 2], 1) == "2 rows further inside not shown: --depth 2 shows all"
    assert left_out([0, 1], None) == ""
