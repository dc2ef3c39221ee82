"""``modelexport.json`` read from a folder, and which files of the folder it says are the package's."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import msgspec

from modelexport.core.json_decoding import decode_json
from modelexport.core.limits import MOST_PARTS, PACKAGE_FILES, SETTINGS_BYTES
from modelexport.core.text import first_few
from modelexport.errors import FileFormatError
from modelexport.files.regular_files import is_file, read_regular, what_it_is
from modelexport.format.keys import DATA_SUFFIX, DESCRIBING_SUFFIXES, REPORT_SUFFIX
from modelexport.format.package_manifest import MANIFEST, PACKAGE_VERSION, UNFINISHED, Manifest, encode_manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a package whose files are all there.

    Raises:
        FileFormatError: There is none, it is damaged, of an unknown version or of a run that was killed, or it names
            files that are missing or not in the folder.
    """
    path = folder / MANIFEST
    if not path.exists():
        models = [model.name for model in sorted(folder.glob("*.onnx"))]
        step = f"make one with `modelexport export MODEL -o {folder}/` or `modelexport split`"
        step = f"give one of its files, {first_few(models, 3)}" if models else step
        raise FileFormatError(f"{folder} is not a package: it has no {MANIFEST}; {step}")
    manifest = _decoded(path)
    if manifest.format_version != PACKAGE_VERSION:
        raise FileFormatError(
            f"{path} has format version {manifest.format_version}, which this version of modelexport does not read "
            f"({PACKAGE_VERSION}): make the package again"
        )
    if manifest.kind == UNFINISHED:
        raise FileFormatError(f"{folder} has files of two runs: the second one was killed; make the package again")
    names = [part.name for part in manifest.parts]
    if not names or len(set(names)) != len(names):
        raise FileFormatError(f"{path} is damaged: it has no parts, or two of one name; make the package again")
    needed = [*(part.file for part in manifest.parts), *manifest.weights]
    if strays := [name for name in needed if not _is_name(name)]:
        raise FileFormatError(f"{path} names {strays[0] or 'nothing'}, which is not a file in {folder}: it is damaged")
    if missing := [name for name in needed if not is_file(folder / name)]:
        raise FileFormatError(f"{folder} lacks {', '.join(missing)}: copy it there, or make the package again")
    return manifest


def write_manifest(manifest: Manifest, staging: Path) -> None:
    """Write the manifest of the files in a staging folder."""
    files = (file.relative_to(staging).as_posix() for file in staging.rglob("*") if file.is_file())
    names = sorted(name for name in files if name != MANIFEST)
    (staging / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=names)))


def _decoded(path: Path) -> Manifest:
    content = read_regular(path, SETTINGS_BYTES)
    manifest: Manifest = decode_json(
        content, kind=Manifest, damaged=f"{path} cannot be read", then="make the package again"
    )
    for what, names, most in (
        ("parts", manifest.parts, MOST_PARTS),
        ("files", [*manifest.files, *manifest.weights], PACKAGE_FILES),
    ):
        if len(names) > most:
            raise FileFormatError(
                f"{path} names {len(names):,} {what}, and at most {most:,} are read: make the package again"
            )
    return manifest


def _is_name(name: str) -> bool:
    """Whether a name of a manifest is one of a file below its folder."""
    pure = PurePosixPath(name)
    return bool(pure.parts) and "\0" not in name and not pure.is_absolute() and ".." not in pure.parts


def files_of_package(folder: Path, *, every: bool = False) -> list[Path]:
    """The files that an earlier run wrote into a folder, the manifest not counted; none without a manifest.

    What else is in the folder, somebody else put there.

    Args:
        every: Also what is not a regular file.
    """
    try:
        manifest = _decoded(folder / MANIFEST)
    except FileFormatError:
        return []
    names = {*manifest.files, *manifest.weights}
    for part in manifest.parts:
        file = PurePosixPath(part.file)
        if file.suffix == ".onnx":
            beside = (file.with_suffix(suffix) for suffix in (*DESCRIBING_SUFFIXES, REPORT_SUFFIX))
            names |= {str(file), f"{file}{DATA_SUFFIX}", *map(str, beside)}
    places = [folder / name for name in sorted(names - {MANIFEST}) if _is_name(name)]
    inside = [file for file in places if Path(os.path.realpath(file.parent)).is_relative_to(os.path.realpath(folder))]
    return [file for file in inside if os.path.lexists(file) and (every or what_it_is(file) is None)]


def folder_of_stages(file: Path) -> Path | None:
    """The folder of the stages of a split file that a file is one of."""
    is_stage = read_kind(file.parent) == "stages" and file in files_of_package(file.parent)
    return file.parent if is_stage else None


def read_kind(folder: Path) -> str | None:
    """The kind of the package in a folder; ``None`` without a manifest that can be read."""
    try:
        return _decoded(folder / MANIFEST).kind
    except FileFormatError:
        return None


def unfinished_manifest(files: Collection[str]) -> bytes:
    """What stands for the manifest while files are moved: names all that may be there, and is refused by readers."""
    return encode_manifest(
        Manifest(format_version=PACKAGE_VERSION, kind=UNFINISHED, parts=[], weights=[], files=sorted({*files}))
    )
