"""`extract`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE_OR_FOLDER, JSON


def extract(
    file: Path = FILE_OR_FOLDER,
    output: Path = option(
        ...,
        "The file to write; a folder for several calls.",
        flag="-o --output",
        metavar="SUB.onnx",
        file="written file or folder",
    ),
    modules: Sequence[str] = argument((), "Modules: address, glob, tag, class:NAME.", metavar="SELECTOR"),
    each: str | None = option(None, "Every call of modules of CLASS.", metavar="CLASS"),
    to_values: Sequence[str] = option(
        (), "Instead of a module: the nodes that compute this value of the file.", flag="--to", metavar="VALUE"
    ),
    from_values: Sequence[str] = option(
        (),
        "With --to: only the nodes after this value, which becomes an input of SUB.onnx.",
        flag="--from",
        metavar="VALUE",
    ),
    as_json: bool = JSON,
) -> None:
    """Write module calls, or the nodes between values, as separate models."""
    from modelexport.tagged.file import read_tagged
    from modelexport.tagged.package import parts_with
    from modelexport.tools.cut import cut_text
    from modelexport.tools.cut import extraction as cutting

    if bool(modules) + bool(each) + bool(to_values) != 1 or (from_values and not to_values):
        raise UsageError("name the calls to extract, or a class with --each, or values with --to and --from")
    # Of a package, the first part that runs it.
    tagged = read_tagged(next(iter(parts_with(file, modules[0] if modules else ".").values())))
    if to_values:
        extracted = [cutting.extract_values(tagged, to_values, output, inputs=from_values)]
    elif (each or len(tagged.select(*modules).calls) > 1) and output.suffix == ".onnx" and not output.is_dir():
        raise UsageError(f"{output} would be a folder of several files: give {output.with_suffix('')}/")
    elif each:
        extracted = cutting.extract_all(tagged, [f"class:{each}"], output)
    elif len(calls := tagged.select(*modules).calls) > 1:
        extracted = cutting.extract_all(tagged, modules, output)
    elif not output.suffix:
        raise UsageError(f"{output} has no suffix, and one call is one file: give {output}.onnx")
    else:
        extracted = [cutting.extract(tagged, str(calls[0]), output)]
    print_result(extracted, lambda: cut_text.format_extracted(extracted), as_json=as_json)
