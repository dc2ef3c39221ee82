"""Faults while files are written: either all old files or all new files remain; readers never accept a mixture."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

from children import OUTSIDE, in_child
from corpus import copied, seeded
from kills import (
    READERS,
    accepting,
    files_of_set,
    is_killed,
    kill,
    killed_after,
    mixed,
    restored,
    write_set,
)
from limited import run
from modelexport.errors import LeftoverWarning, ModelExportError, NotWrittenError
from modelexport.files.atomic_writing import written_together
from modelexport.files.safetensors_files import errors_of_writing
from modelexport.format import keys
from modelexport.tagged.file import read_tagged
from modelexport.tagged.package import read_package

OUTPUT, PACKAGE = "out.onnx", "out"
TORCHSCRIPT = ["--frontend", "torchscript"]
WRITERS: Mapping[str, list[str]] = {
    "extract": ["extract", "plain.onnx", "blocks.0", "-o", OUTPUT],
    "update-weights": ["update-weights", "plain.onnx", "new.safetensors", "-o", OUTPUT],
    "update-weights beside": ["update-weights", "copied.onnx", "new.safetensors", "-o", OUTPUT],
    "retag": ["retag", "flat.onnx", "--from", "plain.onnx", "-o", OUTPUT],
    "adopt": ["adopt", "copied.onnx", "-o", OUTPUT],
    "strip": ["strip", "attributes.onnx", "-o", OUTPUT],
    "inline": ["inline", "functions.onnx", "-o", OUTPUT],
    "optimize": ["optimize", "copied.onnx", "--with", "onnxscript", "-o", OUTPUT],
    "export": ["export", "factory.py:make", "-o", OUTPUT, "--frontend", "torchscript", "--weights", "copy"],
    "export with DAG files": [
        "export",
        "factory.py:make",
        "-o",
        OUTPUT,
        "--frontend",
        "torchscript",
        "--dag-dir",
        "dags",
    ],
    "replace": ["replace", "plain.onnx", "blocks.1", "--with-identity", "-o", OUTPUT],
    "rename": ["rename", "copied.onnx", "-o", OUTPUT],
    "extract several": ["extract", "plain.onnx", "--each", "Linear", "-o", "out-cut"],
    "split": ["split", "plain.onnx", "--stages", "2", "-o", PACKAGE],
    "update-weights of a package": ["update-weights", "package", "new.safetensors", "-o", PACKAGE],
    "export a package": ["export", "factory.py:make", "-o", f"{PACKAGE}/", "--parts", "whole", *TORCHSCRIPT],
    "place": ["place", "plain.onnx", "--rule", "gpu: blocks.0", "--no-check", "-o", "out.json"],
    "report": ["report", "plain.onnx", "-o", "out.html"],
    "cost": ["cost", "plain.onnx", "--html", "out.html"],
    "inputs": ["inputs", "factory.py:make", "-o", "out.npz"],
}
QUICK_WRITERS = ["extract", "update-weights beside", "retag", "split"]
Files = dict[str, bytes]


def files(folder: Path) -> Files:
    """Everything in a folder except the time that an export took."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix != ".md"
        and "__pycache__" not in path.parts
        and ".modelexport-" not in str(path)
    }


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """What runs in the background, or under nohup, ignores Ctrl-C or hang-ups; the tests send both."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


EARLIER = {
    "out.json": '{"session.layer_assignment_settings": "before"}',
    "out.html": "<title>modelexport</title>before",
    "out.npz": "before",
}
"""Outputs of an earlier run, which may be replaced."""


@pytest.fixture
def place(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the corpus in which something else, with all that belongs to it, is at the place of each output."""
    folder = copied(corpus, tmp_path / "place")
    shutil.copytree(folder / "old-stages", folder / PACKAGE)
    for name, before in EARLIER.items():
        (folder / name).write_text(before)
    for suffix in (".onnx", ".hierarchy.json", ".dag.json", ".operations.json"):
        shutil.copy((folder / "plain.onnx").with_suffix(suffix), (folder / OUTPUT).with_suffix(suffix))
    monkeypatch.chdir(folder)
    return folder


def new_set(writer: str, place: Path, tmp_path: Path) -> Files:
    """The files of the writer without a fault; a second run gives the same bytes."""
    folder = Path(shutil.copytree(place, tmp_path / "whole"))
    with contextlib.chdir(folder):
        ended = run(*WRITERS[writer])
    assert ended.status == 0, ended.err
    return files(folder)


def staging(folder: Path) -> list[Path]:
    return list(folder.rglob(".modelexport-*"))


def check_after(folder: Path, before: Files, after: Files) -> None:
    """No input was changed; files that a reader uses are all old or all new."""
    now = files(folder)
    for name, content in before.items():
        if not name.startswith("out"):
            assert now[name] == content, f"{name}, an input, was changed"
    check_package(folder, before, after, now)
    for name in ("out.json", "out.html", "out.npz"):
        assert now[name] in (before[name], after[name])
    try:
        tagged = read_tagged(folder / OUTPUT)
    except ModelExportError:
        return
    mine = {
        name: content
        for name, content in now.items()
        if name.startswith("out.") and not name.endswith(keys.DESCRIBING_SUFFIXES)
    }
    if tagged.hierarchy is not None:
        mine |= {name: content for name, content in now.items() if name == "out.hierarchy.json"}
    assert any(all(content == whole.get(name) for name, content in mine.items()) for whole in (before, after)), (
        f"a mixture was accepted: {sorted(mine)}"
    )


def check_package(folder: Path, before: Files, after: Files, now: Files) -> None:
    """A reader refuses the package, or all of it is old, or all new."""
    try:
        read_package(folder / PACKAGE)
    except ModelExportError:
        return
    mine = {name: content for name, content in now.items() if name.startswith(f"{PACKAGE}/")}
    wholes = [{name: whole[name] for name in whole if name.startswith(f"{PACKAGE}/")} for whole in (before, after)]
    assert mine in wholes, f"a mixed package was accepted: {sorted(mine)}"


def counting(name: str, at: int, then: Callable[[], Any]) -> Any:
    """Patch a function of ``os`` to do something else at its ``at``-th call.

    A call that makes a folder that is there already (``mkdir`` with ``exist_ok``) is not counted: it writes nothing,
    the system answers that the folder exists before it looks for space, and pathlib asks whether it is there.
    """
    original, calls = getattr(os, name), 0

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        if not (name == "mkdir" and Path(arguments[0]).is_dir()):
            calls += 1
            if calls == at + 1:
                then()
        return original(*arguments, **keywords)

    return mock.patch.object(os, name, counted)


def killed_at(writer: str, at: int, place: Path, after: Files, name: str = "replace") -> bool:
    """Kill a writer before its ``at``-th move; returns whether there was one."""
    before = files(place)

    def work() -> int:
        with counting(name, at, kill):
            return run(*WRITERS[writer]).status

    status = in_child(work)
    check_after(place, before, after)
    assert run("extract", "plain.onnx", "head", "-o", "next.onnx").status == 0
    assert not staging(place)
    return os.WIFSIGNALED(status)


MIXED = {name: command for name, command in WRITERS.items() if OUTPUT in command} | {
    "export with all": [*WRITERS["export"], "--reference"]
}
"""The writers of a set of files with one model."""


def set_in_place(folder: Path, weights: str) -> None:
    """Put a set with every kind of file, its weights inside the model or beside it, where writers write theirs."""
    if weights == "inside":
        for suffix in (".onnx", *keys.DOCUMENT_SUFFIXES):
            shutil.copy((folder / "plain.onnx").with_suffix(suffix), (folder / OUTPUT).with_suffix(suffix))
    else:
        write_set(folder, "copy", seed=1)


def sets(writer: str, weights: str, place: Path, kept: Path) -> tuple[Files, Files]:
    """The old set, which is in its place afterwards and in a copy of the folder, and the one that replaces it."""
    set_in_place(place, weights)
    shutil.copytree(place, kept)
    before = files_of_set(place)
    ended = run(*MIXED[writer])
    assert ended.status == 0, ended.err
    after = files_of_set(place)
    restored(kept, place)
    return before, after


@pytest.mark.sweep
@pytest.mark.parametrize("weights", ["beside", "inside"])
@pytest.mark.parametrize("writer", MIXED)
def test_a_kill_before_any_move_leaves_no_files_of_two_sets(writer: str, weights: str, place: Path) -> None:
    """A kill leaves what is there at that moment."""
    set_in_place(place, weights)
    before, found, move = files_of_set(place), list[Files](), os.replace

    def seen(*arguments: Any, **keywords: Any) -> None:
        found.append(files_of_set(place))
        move(*arguments, **keywords)

    with mock.patch.object(os, "replace", seen):
        assert run(*MIXED[writer]).status == 0
    after = files_of_set(place)
    assert len(found) > 3
    assert [mixed(now, before, after) for now in found] == [[]] * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["inside", "beside"])
@pytest.mark.parametrize("writer", MIXED)
def test_a_kill_at_any_moment_leaves_no_files_of_two_sets(
    writer: str, weights: str, place: Path, tmp_path: Path
) -> None:
    before, after = sets(writer, weights, place, tmp_path / "kept")
    began = time.perf_counter()
    assert not is_killed(MIXED[writer], killed_after(100))
    seconds = time.perf_counter() - began
    for seed in range(8):
        restored(tmp_path / "kept", place)
        is_killed(MIXED[writer], killed_after(float(seeded(writer, seed).random()) * seconds))
        assert not mixed(files_of_set(place), before, after), f"seed {seed}"


def test_no_reader_accepts_files_of_two_sets(place: Path) -> None:
    write_set(place, "copy", seed=1)
    before = files_of_set(place)
    # the weights alone differ: documents are equal, and belong to both
    write_set(place, "copy", seed=2)
    after = files_of_set(place)
    assert accepting() == [*(" ".join(command) for command in READERS), "load", "load_dag", "load_operations"]
    assert run("verify", OUTPUT).status == 0
    for name in (OUTPUT, f"{OUTPUT}.data"):
        Path(name).write_bytes(before[name])
        assert not accepting()
        assert run("verify", OUTPUT).status == 2
        Path(name).write_bytes(after[name])


def test_documents_of_another_graph_are_refused_alone(place: Path) -> None:
    """The model is read without them; who reads such a document itself is told."""
    write_set(place, "copy", seed=1)
    assert run("rename", "copied.onnx", "-o", "renamed.onnx").status == 0
    for suffix in keys.DESCRIBING_SUFFIXES:
        document = Path(OUTPUT).with_suffix(suffix)
        content = document.read_bytes()
        document.write_bytes(Path("renamed.onnx").with_suffix(suffix).read_bytes())
        refused = {".dag.json": "load_dag", ".operations.json": "load_operations"}.get(suffix)
        readers = [" ".join(command) for command in READERS] + ["load", "load_dag", "load_operations"]
        assert accepting() == [reader for reader in readers if reader != refused], suffix
        assert (read_tagged(OUTPUT).hierarchy is None) == (suffix == ".hierarchy.json")
        document.write_bytes(content)


def test_a_linked_checkpoint_of_the_same_form_is_refused(place: Path) -> None:
    torch.manual_seed(1)
    BertModel(BertConfig.from_pretrained("checkpoint")).save_pretrained("tuned", max_shard_size="4KB")
    assert (
        run("export", "checkpoint", "-o", "checkpoint/out.onnx", "--weights", "link", "--no-check", *TORCHSCRIPT).status
        == 0
    )
    assert run("tree", "checkpoint/out.onnx").status == 0
    for shard in Path("tuned").glob("*.safetensors"):
        shutil.copy(shard, "checkpoint")
    for command in (["tree", "checkpoint/out.onnx"], ["cost", "checkpoint/out.onnx"]):
        ended = run(*command)
        assert ended.status == 2, ended
        assert "other weights: put a copy" in ended.err, ended
        assert ended.err.count("\n") == 1, ended


def test_a_folder_that_cannot_be_removed_is_a_warning(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patched, pytest.warns(LeftoverWarning, match="temporary files: remove it"):
        patched.setattr(os, "rmdir", fail)
        ended = run(*WRITERS["retag"])
    assert ended.status == 0
    assert run("tree", OUTPUT).status == 0


@pytest.mark.parametrize(
    "writer", ["extract", *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK_WRITERS if name != "extract")]
)
def test_a_kill_before_any_move_leaves_no_mixture_that_is_read(writer: str, place: Path, tmp_path: Path) -> None:
    after = new_set(writer, place, tmp_path)
    kept = Path(shutil.copytree(place, tmp_path / "kept"))
    assert killed_at(writer, 0, place, after)
    for at in (1, 2, 3):
        shutil.rmtree(place)
        shutil.copytree(kept, place)
        os.chdir(place)
        if not killed_at(writer, at, place, after):
            break


def failed_at(writer: str, at: int, place: Path, after: Files, name: str, number: int) -> bool:
    """Let the ``at``-th call of a function of ``os`` fail; returns whether there was one."""
    before, reached = files(place), []

    def fail() -> None:
        reached.append(True)
        raise OSError(number, os.strerror(number))

    with counting(name, at, fail):
        ended = run(*WRITERS[writer])
    assert not staging(place)
    if ended.status == 0:
        # Without a second name, what is replaced is copied: the run is complete.
        assert not reached or name == "link", "a fault was not reported"
        assert name != "link" or files(place) == after, "a fault was not reported, and the files are not complete"
        return bool(reached)
    assert ended.status == 4
    assert ended.err.startswith("modelexport: cannot "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert files(place) == before, "a failure left changed files"
    return True


@pytest.mark.sweep
@pytest.mark.parametrize("writer", QUICK_WRITERS)
def test_a_move_that_fails_takes_the_others_back(writer: str, place: Path, tmp_path: Path) -> None:
    after = new_set(writer, place, tmp_path)
    for at in range(6):
        if not failed_at(writer, at, place, after, "replace", errno.EIO):
            assert at
            break


@pytest.mark.sweep
@pytest.mark.parametrize("writer", QUICK_WRITERS)
def test_a_full_disk_is_one_line_with_the_file_and_the_space(writer: str, place: Path) -> None:
    before = files(place)

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))
        ended = run(*WRITERS[writer])
        known = ended.err.startswith("modelexport: cannot write out") and "needs" in ended.err
        return 7 if ended.status == 4 and known and ended.err.count("\n") == 1 else 1

    assert os.waitstatus_to_exitcode(in_child(work)) == 7
    assert files(place) == before
    assert not staging(place)


def test_what_a_killed_run_left_is_removed_and_what_runs_is_not(place: Path) -> None:
    from modelexport.files.atomic_writing import scratch

    with scratch(place) as running:
        assert run("extract", "plain.onnx", "head", "-o", "next.onnx").status == 0
        assert running.is_dir()
    assert not staging(place)


WITH_WEIGHTS = (OUTPUT, f"{OUTPUT}.data", "out.operations.json")


def killed_while_moving(moves: int, folder: Path, names: Sequence[str] = WITH_WEIGHTS) -> dict[str, bytes]:
    """The files of a folder before a run that is killed while it replaces them."""

    def write(content: str) -> int:
        with written_together(folder) as new:
            for name in names:
                (new / name).write_text(f'{{"": {{"op_type":"{content}')
        return 0

    def work() -> int:
        with counting("replace", moves, kill):
            return write("after")

    write("before")
    before = files(folder)
    assert os.WIFSIGNALED(in_child(work))
    assert files(folder) != before
    return before


@pytest.mark.parametrize("moves", [1, 2, 3, 4])
def test_the_next_run_restores_what_a_killed_one_moved_away(moves: int, tmp_path: Path) -> None:
    before = killed_while_moving(moves, tmp_path)
    with written_together(tmp_path):
        pass
    assert files(tmp_path) == before


def test_documents_are_restored_beside_a_model_that_was_copied_because_links_are_not_possible(tmp_path: Path) -> None:
    with mock.patch("os.link", side_effect=OSError):
        before = killed_while_moving(1, tmp_path, (OUTPUT, "out.operations.json"))
    with written_together(tmp_path):
        pass
    assert files(tmp_path) == before


def test_what_was_written_after_a_kill_is_not_replaced_by_what_the_killed_run_moved_away(tmp_path: Path) -> None:
    killed_while_moving(4, tmp_path)
    (data := tmp_path / f"{OUTPUT}.data").write_text("of another tool")
    with written_together(tmp_path):
        pass
    assert files(tmp_path) == {data.name: b"of another tool"}


SIGNALLED = """
import os, signal
def make():
    os.kill(os.getpid(), signal.{name})
    raise AssertionError("the signal was not taken")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_ends_a_command_with_one_line(name: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED.format(name=name))
    command = [sys.executable, "-m", "modelexport", "export", "signalled.py:make", "-o", "x.onnx"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (status, "modelexport: interrupted; nothing was written\n")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["signalled.py"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_between_two_moves_leaves_what_was_there(number: signal.Signals, place: Path) -> None:
    before = files(place)
    with counting("replace", 1, lambda: os.kill(os.getpid(), number)):
        ended = run(*WRITERS["retag"])
    assert ended.status == 128 + number
    assert ended.err == "modelexport: interrupted; nothing was written\n"
    assert files(place) == before
    assert not staging(place)


def at_a_random_moment(writer: str, seed: int, place: Path, after: Files, seconds: float) -> None:
    """Send a signal to a run at a moment within the time that it takes; then run it again, to the end."""
    before, random = files(place), seeded(writer, seed)
    number = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP][int(random.integers(4))]
    reading, writing = os.pipe()

    def work() -> int:
        os.close(reading)
        threading.Timer(random.random() * seconds, lambda: os.kill(os.getpid(), number)).start()
        ended = run(*WRITERS[writer])
        os.write(writing, ended.err.encode()[:4000])
        return ended.status

    status = in_child(work)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        err = told.read().decode()
    check_after(place, before, after)
    if number == signal.SIGINT and status == OUTSIDE << 8:
        return  # before the command began, or after it ended: Python's own handler took it
    if os.WIFEXITED(status) and (code := os.WEXITSTATUS(status)):
        assert code == 128 + number, err
        assert err.splitlines()[-1] in (LINE, "modelexport: interrupted after its files had been written")
        assert not staging(place)
        now = files(place)
        assert (now == before) == (err.splitlines()[-1] == LINE) or before == after
    assert run(*WRITERS[writer]).status == 0
    # An empty one may be of a run that was killed before it could lock it: it is removed when it is older.
    assert not [folder for folder in staging(place) if any(folder.iterdir())]
    assert files(place) == after


LINE = "modelexport: interrupted; nothing was written"


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_a_signal_at_any_moment_leaves_all_or_nothing(writer: str, place: Path, tmp_path: Path) -> None:
    began = time.perf_counter()
    after = new_set(writer, place, tmp_path)
    seconds = time.perf_counter() - began
    kept = Path(shutil.copytree(place, tmp_path / "kept"))
    for seed in range(8):
        shutil.rmtree(place)
        shutil.copytree(kept, place)
        os.chdir(place)
        at_a_random_moment(writer, seed, place, after, seconds)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of a size in bytes, where one may be made."""
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "modelexport-test", folder], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("a file system can be made by root only, and where mount is allowed")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


DISK_WRITERS = [name for name in WRITERS if name not in ("place", "inputs")]


def to_disk(writer: str) -> list[str]:
    """A writer's command with its outputs on the small disk."""
    return [f"disk/{word}" if word.startswith(("out", "dags")) else word for word in WRITERS[writer]]


@pytest.mark.parametrize(
    "writer",
    [
        name if name in QUICK_WRITERS else pytest.param(name, marks=pytest.mark.slow)
        for name in DISK_WRITERS
        if name != "place"
    ],
)
def test_a_disk_that_is_full_is_one_line_and_what_was_there_stays(writer: str, place: Path) -> None:
    for size in (4096, 8192, 16384):  # of one, two and four pages: some files fit, and not all
        with small_disk(place / "disk", size):
            (place / "disk" / OUTPUT).write_bytes(b"old")
            ended = run(*to_disk(writer))
            if ended.status == 0 and size > 4096:
                assert not staging(place)
                continue
            line = ended.err
            assert ended.status == 4, f"{size}: {ended}"
            assert line.startswith("modelexport: cannot write "), line
            assert line.count("\n") == 1, line
            assert "disk/" in line, line
            assert ("needs" in line and "free" in line) or "No space left" in line, line
            assert {file.name: file.read_bytes() for file in (place / "disk").iterdir()} == {OUTPUT: b"old"}


def test_tensors_that_do_not_fit_on_a_disk_are_one_line(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 8192),
        pytest.raises(NotWrittenError, match="No space left"),
        written_together(tmp_path / "disk") as folder,
        errors_of_writing(),
    ):
        save_file({"w": torch.zeros(8192)}, folder / "w.safetensors")


@pytest.mark.parametrize(
    "writer", [name if name in QUICK_WRITERS else pytest.param(name, marks=pytest.mark.slow) for name in WRITERS]
)
def test_a_read_only_disk_is_one_line_before_anything_runs(writer: str, place: Path) -> None:
    with small_disk(place / "disk", 2**20):
        subprocess.run(["mount", "-o", "remount,ro", place / "disk"], check=True)
        ended = run(*to_disk(writer))
    assert ended.status == 4
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("modelexport: cannot write disk/"), ended.err
    assert "read-only" in ended.err, ended.err


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_survives_every_fault(writer: str, place: Path, tmp_path: Path) -> None:
    after = new_set(writer, place, tmp_path)
    kept = Path(shutil.copytree(place, tmp_path / "kept"))

    def fresh() -> None:
        shutil.rmtree(place)
        shutil.copytree(kept, place)
        os.chdir(place)

    count = 0
    for name in ("replace", "mkdir", "link"):
        for number in (errno.ENOSPC, errno.EACCES, errno.EIO):
            for at in range(40):
                fresh()
                if name == "replace" and number == errno.EIO:
                    reached = killed_at(writer, at, place, after)
                else:
                    reached = failed_at(writer, at, place, after, name, number)
                if not reached:
                    break
                count += 1
    assert count > 10
