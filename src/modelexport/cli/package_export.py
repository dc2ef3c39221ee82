"""`export MODEL -o FOLDER/`: the part of the command that writes a package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from modelexport.cli.json_documents import package_document
from modelexport.cli.model_choice import ModelChoice
from modelexport.cli.printing import print_result
from modelexport.cli.progress import LINE

if TYPE_CHECKING:
    from modelexport.exporting.options import Options


def export_folder(choice: ModelChoice, folder: Path, options: Options, *, as_json: bool) -> None:
    """Export a model to a package, and print what was written.

    Raises:
        Exit: A part was verified and does not agree with the model.
    """
    from modelexport.cli import show_package
    from modelexport.cli.model_choice import load_for_package
    from modelexport.core.garbage import only_new_garbage
    from modelexport.core.stages import Stages
    from modelexport.files.package_folders import check_package_folder
    from modelexport.packages.packaging import export_package

    options.check_together(package=True)
    check_package_folder(folder, [Path(choice.model)])
    stages = Stages(LINE.tell)
    loaded, example = load_for_package(choice, options.package.parts or "auto", stages)
    options.quantized.check_model(loaded.model)
    with only_new_garbage():
        result = export_package(
            loaded.model,
            folder,
            inputs=example,
            name=loaded.name,
            directory=loaded.directory,
            options=options,
            source=loaded.weights,
            stages=stages,
        )
    print_result(package_document(result), lambda: show_package.format_package(result), as_json=as_json)
    if not result.agrees:
        raise typer.Exit(1)
