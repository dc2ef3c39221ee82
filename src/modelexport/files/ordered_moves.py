"""The order in which new files are moved into place, so that a killed run leaves no mixture of old and new files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path

from modelexport.errors import OutputError
from modelexport.files.manifest_file import files_of_package, unfinished_manifest
from modelexport.format.keys import DATA_SUFFIX, DESCRIBING_SUFFIXES, DOCUMENT_SUFFIXES
from modelexport.format.package_manifest import MANIFEST


class Order(IntEnum):
    """The order in which files are moved.

    What describes a model goes away before it and comes after it. A model whose weights lie beside it goes away before
    them and comes after them; another one takes the place of the old one.
    """

    UNFINISHED = auto()
    """A manifest that readers refuse."""
    OLD_DOCUMENT = auto()
    OLD_MODEL = auto()
    OLD_OTHER = auto()
    OTHER = auto()
    """Neither a model nor what describes one: weights."""
    MODEL = auto()
    DOCUMENT = auto()
    MANIFEST = auto()


@dataclass(frozen=True)
class Move:
    """One file that is moved: to its target or, if it is an old one, away from there."""

    order: Order
    file: Path
    target: Path
    backup: Path
    """The second name that what was there gets."""

    @property
    def is_away(self) -> bool:
        """Whether it moves an old file out of the way."""
        return self.order in _OLD.values()

    def run(self) -> None:
        """Move the file."""
        if not self.is_away and self.file.stat().st_nlink == 1:  # a link has the mode of what it links to
            mask = os.umask(0)
            os.umask(mask)
            self.file.chmod(0o666 & ~mask)  # safetensors writes files that nobody else may read
        self.file.replace(self.backup if self.is_away else self.target)

    def undo(self) -> None:
        """Put back what was at the target, or remove what has been moved there."""
        if self.backup.exists():
            self.backup.replace(self.target)
        elif not self.file.exists():
            self.target.unlink()


@dataclass(frozen=True)
class Staged:
    """A staging folder, where its files go, and whether they are a package, which its manifest holds together."""

    staging: Path
    directory: Path
    package: bool

    def new(self) -> dict[Path, Path]:
        """The new files to their places."""
        return {file: self.directory / file.relative_to(self.staging) for file in sorted(files_in(self.staging))}

    def stale(self) -> list[Path]:
        """What belongs to something that is replaced, and is not replaced itself."""
        new = {*self.new().values()}
        stale = {*(files_of_package(self.directory) if self.package else ())}
        for model in (target for target in new if order_of(target) is Order.MODEL):
            beside = [*map(model.with_suffix, DESCRIBING_SUFFIXES)]
            if model.exists():
                beside += [*map(model.with_suffix, DOCUMENT_SUFFIXES), model.with_name(model.name + DATA_SUFFIX)]
            stale.update(file for file in beside if file.is_file())
        return sorted(stale - new)

    def check_asked(self) -> None:
        """Refuse files that are there and belong neither to a model that is written nor to a package that is replaced,
        and places that a symbolic link inside the folder leads out of it.
        """
        new = self.new()
        for folder in {above for target in new.values() for above in target.relative_to(self.directory).parents}:
            if folder.parts and (self.directory / folder).is_symlink():
                raise OutputError(
                    f"{self.directory / folder} is a symbolic link, and files would be written through it: remove it"
                )
        stems = {target.with_suffix("") for target in new.values() if order_of(target) is Order.MODEL}
        if not stems:  # each file is what the command was asked to write
            return
        former = {self.directory / MANIFEST, *files_of_package(self.directory)} if self.package else set()
        for file, target in new.items():
            named = any(target.parent == stem.parent and target.name.startswith(f"{stem.name}.") for stem in stems)
            if not named and target not in former and target.exists() and not target.samefile(file):
                raise OutputError(f"{target} is there, and does not belong to what is written: give another folder")

    def moves(self, models: bool) -> list[Move]:
        """What has to be moved; makes the folder for what was there.

        Args:
            models: Whether any file of the run is a model; if not, each file takes the place of the old one directly.
        """
        new, stale, manifest = self.new(), self.stale(), self.directory / MANIFEST
        has_weights = any(order_of(file) is Order.OTHER for file in (*new.values(), *stale))
        ordered: list[tuple[Order, Path, Path]] = []
        replaced = [target for target in new.values() if models and target.exists()]
        for target in (*stale, *replaced):
            kind = order_of(target)
            if self.package and target == manifest:
                continue
            if target in stale or kind is Order.DOCUMENT or has_weights:
                ordered.append((_OLD[kind], target, target))
        for file, target in new.items():
            ordered.append((Order.MANIFEST if self.package and target == manifest else order_of(target), file, target))
        if self.package:
            unfinished = self.staging.parent / "unfinished"
            files = [file.relative_to(self.directory).as_posix() for file in (*stale, *new.values())]
            unfinished.write_bytes(unfinished_manifest(files))
            ordered.append((Order.UNFINISHED, unfinished, manifest))
        before = self.staging.parent / "before"
        moves = []
        for number, (order, file, target) in enumerate(ordered):
            new_file = self.staging / (name := target.relative_to(self.directory))
            comes = _identity(new_file) if new_file.is_file() else ""
            moves.append(Move(order, file, target, before / f"{number}-{comes}" / name))
        for move in moves:
            move.backup.parent.mkdir(parents=True)
        return moves


_OLD = {Order.DOCUMENT: Order.OLD_DOCUMENT, Order.MODEL: Order.OLD_MODEL, Order.OTHER: Order.OLD_OTHER}


def order_of(file: Path) -> Order:
    """Whether a new file is a model, a document, or another file."""
    if file.suffix == ".onnx":
        return Order.MODEL
    return Order.DOCUMENT if file.name.endswith((*DOCUMENT_SUFFIXES, ".json")) else Order.OTHER


def restore(folder: Path) -> None:
    """Put back what a killed run moved out of the way, if it was killed before all of its models were in place.

    A file that is there is replaced only if the killed run moved it there: another one was written since, and what
    would follow does not belong to it. A package is not restored: its manifest says that the run was killed, and
    readers refuse it.

    Args:
        folder: The folder of the run's temporary files.
    """
    new = {file.relative_to(folder / "new") for file in files_in(folder / "new")}
    if Path(MANIFEST) in new or not any(order_of(name) is Order.MODEL for name in new):
        return
    for backup in sorted(files_in(folder / "before"), key=order_of):  # weights before the model that needs them
        mark, *name = backup.relative_to(folder / "before").parts
        target = folder.parent / Path(*name)
        if not target.parent.resolve().is_relative_to(folder.parent.resolve()):  # a link may lead elsewhere
            continue
        if not os.path.lexists(target) or mark.partition("-")[2] == _identity(target):
            backup.replace(target)
        elif target.lstat().st_mtime_ns != backup.lstat().st_mtime_ns:  # nor is it what was there, linked or copied
            return


def _identity(file: Path) -> str:
    """What a file keeps when it is moved, and no file has that is written there afterwards."""
    status = file.lstat()
    return f"{status.st_ino}-{status.st_mtime_ns}"


def files_in(staging: Path) -> Iterator[Path]:
    """The files of a staging folder."""
    return (file for file in staging.rglob("*") if file.is_file())
