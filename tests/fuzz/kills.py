"""Kills of a run that replaces a set of files by another one: what is there afterwards, and which readers accept it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from children import in_child
from corpus import Tiny
from limited import run
from modelexport import export, load
from modelexport.errors import ModelExportError
from modelexport.tagged.documents.reader import load_dag, load_operations

NAME = "out"
OUTPUT = f"{NAME}.onnx"
Files = dict[str, bytes]

READERS = [
    ["tree", OUTPUT],
    ["tree", OUTPUT, "--check"],
    ["nodes", OUTPUT, "."],
    ["cost", OUTPUT],
    ["compare", OUTPUT, "plain.onnx"],
    ["verify", OUTPUT, "--against", OUTPUT],
    ["retag", "flat.onnx", "--from", OUTPUT, "-o", "next.onnx"],
    ["update-weights", OUTPUT, "new.safetensors", "-o", "next.onnx"],
    ["extract", OUTPUT, ".", "-o", "next.onnx"],
]


def write_set(folder: Path, weights: str, seed: int) -> None:
    """A set with every kind of file: documents, reference values, a report and, unless they are inside, weights."""
    torch.manual_seed(seed)
    model = Tiny()
    export(
        model,
        {"x": torch.rand(2, 12)},
        folder / OUTPUT,
        weights=weights,
        reference=True,
        frontend="torchscript",
        granularity="all",
        check=False,
    )


def files_of_set(folder: Path) -> Files:
    """The files of the set in a folder, but for the report, which has the times of the run."""
    found = {file.name: file.read_bytes() for file in folder.glob(f"{NAME}.*") if file.is_file()}
    return {name: content for name, content in found.items() if not name.endswith(".report.md")}


def mixed(now: Files, before: Files, after: Files) -> list[str]:
    """The files of the old set and of the new one, if there are files that only one of them has."""
    old = [name for name, content in now.items() if content == before.get(name) != after.get(name)]
    new = [name for name, content in now.items() if content == after.get(name) != before.get(name)]
    return sorted(old) + sorted(new) if old and new else []


def accepting() -> list[str]:
    """The readers that accept the set in the current folder."""
    found = [" ".join(command) for command in READERS if run(*command).status == 0]
    for name, read in {"load": _loaded, "load_dag": load_dag, "load_operations": load_operations}.items():
        suffix = {"load": "onnx", "load_dag": "dag.json", "load_operations": "operations.json"}[name]
        with contextlib.suppress(ModelExportError):
            if Path(f"{NAME}.{suffix}").exists():
                read(f"{NAME}.{suffix}")
                found.append(name)
    return found


def _loaded(path: str) -> None:
    _ = load(path).hierarchy


def kill() -> None:
    """End this process as nothing can prevent."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Kill the process after some time, unless the block ended before."""
    timer = threading.Timer(seconds, kill)
    timer.start()
    yield
    timer.cancel()


def is_killed(command: list[str], killing: contextlib.AbstractContextManager[None]) -> bool:
    """Run a command in a process of its own; returns whether it was killed before it ended."""

    def work() -> int:
        with killing:
            run(*command)
        return 0

    return os.WIFSIGNALED(in_child(work))


def restored(kept: Path, place: Path) -> None:
    """Make a folder, which becomes the current one, what it was."""
    os.chdir("/")
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    os.chdir(place)
