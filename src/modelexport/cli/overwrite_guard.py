"""Refuses outputs that would overwrite inputs: parameters of commands are marked as files that are read or written."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from modelexport.errors import NotWrittenError, OutputError

FOLLOW = inspect.Parameter(
    "follow_symlinks",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--follow-symlinks", help="If an output is a symbolic link, write to its target.")
    ],
)
"""The parameter of every command that writes files."""


@dataclass(frozen=True)
class ReadMark:
    """The mark of a parameter that names files or folders that the command reads."""

    files: Callable[[Any], Iterable[Path]] = lambda value: map(Path, value if isinstance(value, list) else [value])
    folder: bool = True
    """Whether it may be a folder."""


@dataclass(frozen=True)
class WrittenMark:
    """The mark of a parameter that names the file or folder that the command writes."""

    folder: bool = False
    """True if it is always a folder. Others are checked before the command runs if a file of that name exists."""
    alone: bool = False
    """Whether nothing else is written beside the file."""
    suffix: str = ""
    """The suffix that its name must have; empty if any will do."""
    several: bool = False
    """Whether one input file may give a folder of several results; otherwise it gives one file."""


def _model_files(spec: str) -> list[Path]:
    """The folder or the source file that MODEL names."""
    from modelexport.files.named_models import named_folder

    if (folder := named_folder(spec)) is not None:
        return [folder]
    name, _, factory = spec.partition(":")
    if not factory:
        return []
    module = Path(*name.split("."))
    return [Path(name), module.with_suffix(".py") if module.name else module, module / "__init__.py"]


MARKS = {
    "read": ReadMark(),
    "read file": ReadMark(folder=False),
    "model": ReadMark(_model_files),
    "libraries": ReadMark(lambda texts: [Path(text.partition("=")[2]) for text in texts]),
    "written": WrittenMark(),
    "written alone": WrittenMark(alone=True),
    "written file or folder": WrittenMark(several=True),
    "written folder": WrittenMark(folder=True),
}
"""The words of a declared option for what it names."""


def check_read_paths(marks: Mapping[str, ReadMark | WrittenMark], values: Mapping[str, Any]) -> None:
    """Refuse files that are not there, also those that the command would not come to read."""
    from modelexport.files.regular_files import check_exists

    for name, mark in marks.items():
        given = values[name] if isinstance(values[name], list) else [values[name]]
        for path in given if isinstance(mark, ReadMark) else ():
            if isinstance(path, Path):
                check_exists(path)


@contextlib.contextmanager
def guarded(marks: Mapping[str, ReadMark | WrittenMark], values: dict[str, Any]) -> Iterator[None]:
    """Refuse unsuitable outputs before a command begins; inside the block, no file that it reads can be replaced.

    Args:
        marks: Names of parameters to what they name.
        values: The parameters. With ``follow_symlinks``, which is taken out, outputs become what they lead to.
    """
    from modelexport.files.protected_inputs import reading

    marks_of_outputs = {
        name: mark for name, mark in marks.items() if isinstance(mark, WrittenMark) and values[name] is not None
    }
    if values.pop(FOLLOW.name):
        values |= {name: _followed(values[name]) for name in marks_of_outputs}
    reads = [
        path
        for name, mark in marks.items()
        if isinstance(mark, ReadMark) and values[name]
        for path in mark.files(values[name])
    ]
    outputs = {name: values[name] for name in marks_of_outputs}
    source = "source" if "source" in values else "file"
    if marks.get(source) != MARKS["read file"] or not values[source].is_dir():  # a command says itself what it takes
        _check_kinds(outputs, marks_of_outputs, source=values.get(source))
    values |= {name: Path(value) for name, value in outputs.items() if marks_of_outputs[name].folder}
    with reading(reads), _folders_made(outputs.values()):
        _check(outputs, marks_of_outputs)
        yield


@contextlib.contextmanager
def _folders_made(outputs: Iterable[Path | str]) -> Iterator[None]:
    """The folders that outputs lie in are there; those that were made go again if the command writes nothing there."""
    new_folders: list[Path] = []
    try:
        for folder in [Path(output).parent for output in outputs]:
            for above in [above for above in (*reversed(folder.parents), folder) if not above.exists()]:
                try:
                    above.mkdir()
                except OSError as error:
                    raise NotWrittenError(f"cannot make the folder {above}: {error.strerror or error}") from error
                new_folders.append(above)
        yield
    finally:
        for folder in reversed(new_folders):
            with contextlib.suppress(OSError):  # it holds what was written
                folder.rmdir()


def _followed(value: Path | str) -> Path | str:
    """The path that an output means: that which a symbolic link leads to."""
    path = Path(value)
    if not path.is_symlink():
        return value
    real = os.path.realpath(path)
    return Path(real) if isinstance(value, Path) else real + "/" * value.endswith("/")


def _check_kinds(outputs: Mapping[str, Path | str], marks: Mapping[str, WrittenMark], *, source: object) -> None:
    """Refuse a folder with the name of a file, and a file with that of a folder, before anything is written.

    Args:
        source: The parameter that names what is changed. What a command makes of a folder is a folder.
    """
    from modelexport.files.protected_inputs import OTHER_KINDS

    one_file, package = (isinstance(source, Path) and is_kind(source) for is_kind in (Path.is_file, Path.is_dir))
    for name, value in outputs.items():
        mark, path = marks[name], Path(value)
        if path.exists():
            continue
        is_file_name = path.suffix in (".onnx", *OTHER_KINDS) and not str(value).endswith("/")
        folder = mark.folder or (package and not (mark.alone or mark.several))
        if folder and is_file_name:
            raise OutputError(f"{value} would be a folder of several files: give {path.with_suffix('')}/")
        if one_file and not path.suffix and not (mark.folder or mark.alone or mark.several):
            raise OutputError(f"{value} has no suffix: give {value}.onnx")


def _check(outputs: Mapping[str, Path | str], marks: Mapping[str, WrittenMark]) -> None:
    from modelexport.files.replaceable_files import check_writable

    places: dict[str, Path] = {}
    for name, value in outputs.items():
        path = Path(value)
        if (other := places.setdefault(os.path.realpath(path), path)) is not path:
            raise OutputError(f"{path} and {other} are one file, and would both be written: give another name")
        if not marks[name].folder and not path.is_dir() and not str(value).endswith("/"):
            if (suffix := marks[name].suffix) and path.suffix != suffix:
                raise OutputError(f"{value} is not the name of a {suffix} file: give {path.stem}{suffix}")
            check_writable(path, alone=marks[name].alone)
