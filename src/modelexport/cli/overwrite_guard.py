"""What a command reads and what it writes, said once, at its parameters: no output takes the place of an input."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from modelexport.errors import NotWrittenError, OutputError


@dataclass(frozen=True)
class Read:
    """In the annotation of a parameter: it names files or folders that the command reads."""

    files: Callable[[Any], Iterable[Path]] = lambda given: map(Path, given if isinstance(given, list) else [given])


@dataclass(frozen=True)
class Written:
    """In the annotation of a parameter: it names what the command writes."""

    folder: bool = False
    """Always a folder. What is none, or may be one, is checked before the command runs where it is a file."""
    alone: bool = False
    """Nothing is written beside it."""


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
    "read": Read(),
    "model": Read(_model_files),
    "libraries": Read(lambda texts: [Path(text.partition("=")[2]) for text in texts]),
    "written": Written(),
    "written alone": Written(alone=True),
    "written folder": Written(folder=True),
}
"""The words of a declared option for what it names."""

FollowOption = Annotated[
    bool, typer.Option("--follow-symlinks", help="Where an output is a symbolic link, write what it leads to.")
]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command that refuses outputs before it does anything, with ``--follow-symlinks``; itself if it writes nothing.

    While it runs, whatever is written, nothing that it reads is replaced.
    """
    signature = inspect.signature(command, eval_str=True)
    marks = {
        name: mark
        for name, parameter in signature.parameters.items()
        for mark in get_args(parameter.annotation)[1:]
        if isinstance(mark, Read | Written)
    }
    outputs = {name: mark for name, mark in marks.items() if isinstance(mark, Written)}
    if not outputs:
        return command

    @functools.wraps(command)
    def run(**values: Any) -> None:
        from modelexport.files.protected_inputs import reading

        follow = values.pop("follow_symlinks")
        given = {name: values[name] for name in outputs if values[name] is not None}
        if follow:
            given = {name: _followed(value) for name, value in given.items()}
        reads = [
            path
            for name, mark in marks.items()
            if isinstance(mark, Read) and values[name]
            for path in mark.files(values[name])
        ]
        with reading(reads), _folders_made(given.values()):
            _check(given, outputs)
            command(**values | given)

    following = inspect.Parameter(
        "follow_symlinks", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=FollowOption
    )
    parameters = [*signature.parameters.values(), following]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {**command.__annotations__, "follow_symlinks": FollowOption}
    return run


@contextlib.contextmanager
def _folders_made(outputs: Iterable[Path | str]) -> Iterator[None]:
    """The folders that outputs lie in are there; those that were made go again if the command writes nothing there.

    Raises:
        OutputError: One cannot be made.
    """
    made: list[Path] = []
    try:
        for folder in [Path(output).parent for output in outputs]:
            for above in [above for above in (*reversed(folder.parents), folder) if not above.exists()]:
                try:
                    above.mkdir()
                except OSError as error:
                    raise NotWrittenError(f"cannot make the folder {above}: {error.strerror or error}") from error
                made.append(above)
        yield
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # it holds what was written
                folder.rmdir()


def _followed(value: Path | str) -> Path | str:
    """The path that an output means: that which a symbolic link leads to."""
    path = Path(value)
    if not path.is_symlink():
        return value
    real = os.path.realpath(path)
    return Path(real) if isinstance(value, Path) else real + "/" * value.endswith("/")


def _check(given: Mapping[str, Path | str], outputs: Mapping[str, Written]) -> None:
    from modelexport.files.atomic_writing import check_writable

    places: dict[str, Path] = {}
    for name, value in given.items():
        path = Path(value)
        if (other := places.setdefault(os.path.realpath(path), path)) is not path:
            raise OutputError(f"{path} and {other} are one file, and would both be written: give another name")
        if not outputs[name].folder and not path.is_dir() and not str(value).endswith("/"):
            if not outputs[name].alone and path.suffix not in ("", ".onnx", ".onnx_adapter"):
                raise OutputError(
                    f"{value} is not the name of an ONNX file: give {path.stem}.onnx, or a folder, {value}/"
                )
            check_writable(path, alone=outputs[name].alone)
