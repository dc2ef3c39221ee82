"""Commands that operate on modules in a file: `split`, `replace`, `place`, `rename`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from modelexport.cli.printing import print_result
from modelexport.cli.shared_options import FILE, JSON, OUTPUT, parsed_sizes
from modelexport.core.declared_options import argument, option
from modelexport.core.text import plural
from modelexport.errors import UsageError
from modelexport.surgery import Sharing

if TYPE_CHECKING:
    from modelexport.surgery.substitutes import Substitute

SHARING = option("auto", "External weights: link the files next to the output, or copy the used weights.")
MOST_MEGABYTES = 1e12
By = Literal["bytes", "flops", "time"]
Body = Literal["keep", "drop"]


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Where stages begin"""

    stages: int | None = option(None, "The number of stages.", metavar="N", least=1)
    max_mb: float | None = option(
        None, "The most weights that a stage may have, in millions of bytes; not with --by flops or time.", metavar="M"
    )
    at: Sequence[str] = option(
        (), "Begin a stage at each of these modules; with --stages, stages may begin only there.", metavar="SELECTOR"
    )
    by: By = option("bytes", "The figure by which stages are balanced.")
    size: Sequence[str] = option((), "The size of a dynamic axis, for --by flops and time.", metavar="NAME=N")

    @property
    def max_bytes(self) -> int | None:
        if self.max_mb is not None and not 0 < self.max_mb < MOST_MEGABYTES:
            raise UsageError(
                f"--max-mb {self.max_mb:g}: give the largest weights of a stage in millions of bytes, such as 500"
            )
        return None if self.max_mb is None else int(self.max_mb * 1e6)


def split(
    file: Path = FILE,
    output: Path = option(..., "The folder to write.", flag="-o --output", metavar="FOLDER", file="written folder"),
    *,
    cuts: Cuts,
    weights: Sharing = SHARING,
    as_json: bool = JSON,
) -> None:
    """Cut FILE at module boundaries into stages that run in sequence."""
    from modelexport.cli import show_changed
    from modelexport.tagged_model import split as run

    if cuts.size and cuts.by == "bytes":
        raise UsageError("--size goes with --by flops or --by time")
    result = run(
        file,
        output,
        stages=cuts.stages,
        max_bytes=cuts.max_bytes,
        at=cuts.at,
        by=cuts.by,
        sizes=parsed_sizes(cuts.size),
        weights=weights,
    )
    print_result(result, lambda: show_changed.format_split(result), as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class Instead:
    """What the modules are replaced by: one of --with, --with-op and --with-identity"""

    model: Path | None = option(
        None, "Insert this model, tagged or not.", flag="--with", metavar="SUB.onnx", file="read"
    )
    mapping: Sequence[str] = option(
        (), "An input or output of SUB.onnx, and its value in FILE.", flag="--map", metavar="SUB=VALUE"
    )
    operator: str | None = option(None, "Insert one node of this operator.", flag="--with-op", metavar="DOMAIN:OpType")
    attribute: Sequence[str] = option((), "An attribute of the operator.", metavar="NAME=VALUE")
    inputs: Sequence[str] = option(
        (), "An input of the operator: an argument, a value, a parameter.", flag="--input", metavar="NAME"
    )
    body: Body = option("drop", "keep: the old module becomes the operator's function, for runtimes without a kernel.")
    identity: bool = option(False, "Make the module return its input.", flag="--with-identity")

    def substitute(self) -> Substitute:
        """What the options describe."""
        from modelexport.surgery.substitutes import CustomOperator, FromModel, Identity

        if sum([self.model is not None, self.operator is not None, self.identity]) != 1:
            raise UsageError("say what to replace it by: --with SUB.onnx, --with-op DOMAIN:OpType or --with-identity")
        if self.mapping and self.model is None:
            raise UsageError("--map goes with --with SUB.onnx")
        if self.operator is None and (self.attribute or self.inputs or self.body != "drop"):
            raise UsageError("--attribute, --input and --body go with --with-op")
        if self.model is not None:
            return FromModel(self.model, _pairs("--map", self.mapping))
        if self.operator is None:
            return Identity()
        domain, _, name = self.operator.rpartition(":")
        values = {key: _value(text) for key, text in _pairs("--attribute", self.attribute).items()}
        return CustomOperator(domain, name, values, self.body == "keep", self.inputs)


def replace(
    file: Path = FILE,
    modules: Sequence[str] = argument(..., "Modules: addresses, globs, tags, class:NAME.", metavar="SELECTOR"),
    output: Path = OUTPUT,
    *,
    instead: Instead,
    one_call: bool = option(False, "Replace only the named calls, not every call of their modules."),
    weights: Sharing = SHARING,
    as_json: bool = JSON,
) -> None:
    """Replace modules of FILE by a model, by an operator or by nothing."""
    from modelexport.cli import show_changed
    from modelexport.surgery.replacing import replace as run

    result = run(file, modules, instead.substitute(), output, every_call=not one_call, weights=weights)
    print_result(result, lambda: show_changed.format_replaced(result), as_json=as_json)


def _pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise UsageError(f"{option} {text}: write NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _value(text: str) -> Any:
    """A number, a list or a text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def place(
    file: Path = FILE,
    rule: Sequence[str] = option(
        ..., "The device of modules: 'gpu: model.layers.*'.", metavar="'DEVICE: SELECTOR ...'"
    ),
    output: Path | None = option(
        None, "Write the session options here.", flag="-o --output", metavar="SESSION.json", file="written alone"
    ),
    provider: Sequence[str] = option(
        (), "A device of the session, in order: NAME[,option=value...].", flag="--device --provider", metavar="NAME"
    ),
    library: Sequence[str] = option((), "The library of a plug-in provider.", metavar="NAME=PATH", file="libraries"),
    check: bool = option(True, "Do not open a session."),
    as_json: bool = JSON,
) -> None:
    """Assign modules of FILE to devices: write ONNX Runtime's session options, and show where the modules run."""
    from modelexport.cli import show_changed
    from modelexport.files.atomic_writing import write_alone
    from modelexport.tagged_model import place as run

    libraries = {name: Path(path) for name, path in _pairs("--library", library).items()}
    placement = run(file, rule, check=check, providers=provider or list(libraries), libraries=libraries)
    if output is not None:
        write_alone(output, f"{json.dumps(placement.session_options(), indent=1)}\n".encode())
    print_result(placement, lambda: show_changed.format_placement(placement, output, libraries), as_json=as_json)
    if placement.faults:
        raise typer.Exit(1)


def rename(
    file: Path = FILE,
    output: Path = OUTPUT,
    values: bool = option(False, "Name values as well: /encoder/layer.0/MatMul_1_output_0."),
    as_json: bool = JSON,
) -> None:
    """Name the nodes of FILE after their modules: /encoder/layer.0/attention/self/MatMul_1."""
    from modelexport.surgery.renaming import rename as run

    renamed = run(file, output, values=values)
    also = f" and {plural(len(renamed.values), 'value')}" if values else ""
    text = f"{renamed.path}: {plural(len(renamed.renamed), 'node')}{also} renamed"
    print_result(renamed, lambda: text, as_json=as_json)
