"""`replace`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modelexport.core.declared_options import argument, option
from modelexport.errors import UsageError
from modelexport.regions import Sharing
from modelexport.terminal.printing import print_result
from modelexport.terminal.shared_options import FILE, JSON, OUTPUT, SHARING, parsed_pairs

if TYPE_CHECKING:
    from modelexport.tools.cut.substitutes import Substitute

Body = Literal["keep", "drop"]


@dataclass(frozen=True, kw_only=True)
class Substitution:
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
        from modelexport.tools.cut.substitutes import CustomOperator, FromModel, Identity

        if sum([self.model is not None, self.operator is not None, self.identity]) != 1:
            raise UsageError("say what to replace it by: --with SUB.onnx, --with-op DOMAIN:OpType or --with-identity")
        if self.mapping and self.model is None:
            raise UsageError("--map goes with --with SUB.onnx")
        if self.operator is None and (self.attribute or self.inputs or self.body != "drop"):
            raise UsageError("--attribute, --input and --body go with --with-op")
        if self.model is not None:
            return FromModel(self.model, parsed_pairs("--map", self.mapping))
        if self.operator is None:
            return Identity()
        domain, _, name = self.operator.rpartition(":")
        values = {key: _value(text) for key, text in parsed_pairs("--attribute", self.attribute).items()}
        return CustomOperator(domain, name, values, self.body == "keep", self.inputs)


def replace(
    file: Path = FILE,
    modules: Sequence[str] = argument(..., "Modules: addresses, globs, tags, class:NAME.", metavar="SELECTOR"),
    output: Path = OUTPUT,
    *,
    instead: Substitution,
    one_call: bool = option(False, "Replace only the named calls, not every call of their modules."),
    weights: Sharing = SHARING,
    as_json: bool = JSON,
) -> None:
    """Replace modules of FILE by a model, by an operator or by nothing."""
    from modelexport.tools.cut import cut_text
    from modelexport.tools.cut.replacing import replace as run

    result = run(file, modules, instead.substitute(), output, every_call=not one_call, weights=weights)
    print_result(result, lambda: cut_text.format_replaced(result), as_json=as_json)


def _value(text: str) -> Any:
    """A number, a list or a text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
