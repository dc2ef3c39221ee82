"""`export MODEL -o FOLDER/`: the part of the command that writes a package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modelexport.cli.json_documents import package_document
from modelexport.cli.running import ModelChoice, print_json, progress_shown
from modelexport.errors import UsageError
from modelexport.packages.modes import PartsMode

if TYPE_CHECKING:
    from modelexport.exporting.options import Options


def export_folder(
    choice: ModelChoice,
    folder: Path,
    parts: PartsMode,
    options: Options,
    settings: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Export a model to a package, and print what was written.

    Args:
        settings: The other keywords of :func:`modelexport.export_package` that the command line gives.

    Raises:
        Exit: A part was verified and does not agree with the model.
    """
    from modelexport.cli import show_package
    from modelexport.cli.running import load_for_package
    from modelexport.core.garbage import only_new_garbage
    from modelexport.core.stages import Stages
    from modelexport.files.package_folders import check_package_folder
    from modelexport.packages.generation_parts import DecoderForm
    from modelexport.packages.packaging import export_package

    DecoderForm(static_cache=settings["static_cache"], separate_prefill=settings["separate_prefill"]).check()
    if options.tags.tags_as != "metadata":
        raise UsageError("the parts of a package carry their tags as metadata: leave out --tags-as")
    if options.weights.weights == "none":
        raise UsageError("a package always has its weights: give --weights link or copy")
    check_package_folder(folder, [Path(choice.model)])
    with progress_shown() as progress:
        stages = Stages(progress)
        loaded, example = load_for_package(choice, parts, stages)
        with only_new_garbage():
            result = export_package(
                loaded.model,
                folder,
                inputs=example,
                parts=parts,
                name=loaded.name,
                directory=loaded.directory,
                options=options,
                source=loaded.weights,
                stages=stages,
                **settings,
            )
    if as_json:
        print_json(package_document(result))
    else:
        print(show_package.format_package(result))
    if not result.agrees:
        raise typer.Exit(1)
