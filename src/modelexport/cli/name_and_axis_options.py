"""Names of inputs, outputs and axes on the command line: their options, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelexport.core.declared_options import option
from modelexport.core.text import suggest
from modelexport.errors import UsageError
from modelexport.terminal.shared_options import parsed_pairs

if TYPE_CHECKING:
    from modelexport.exporting.requested_names import RequestedNames

_AXIS = re.compile(r"([^,]+):(-?\d+)=([A-Za-z_]\w*)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SPEC = re.compile(r"[A-Za-z_]\w*(,[A-Za-z_]\w*)+|.+:-?\d+=[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class NamedParts:
    """Parts of a FOLDER/ that you name"""

    part: Sequence[str] = option(
        (),
        "A part, and what it runs: a method of MODEL, or of a module in it (encoder.step), or a module (decoder).",
        metavar="NAME=METHOD",
    )
    state: Sequence[str] = option(
        (), "A named part that takes some of its outputs again in the next run (a cache).", metavar="NAME"
    )
    fixed: Sequence[str] = option((), "A named part whose axes all have the sizes of the example.", metavar="NAME")

    def parts(self) -> dict[str, Any]:
        """Name of a part to what it runs."""
        from modelexport.packages.named_parts import Part

        named = parsed_pairs("--part", self.part, "METHOD")
        if len(named) < len(self.part):
            raise UsageError("two parts have one name: give each --part another")
        for flag, names in (("--state", self.state), ("--fixed", self.fixed)):
            if missing := [name for name in names if name not in named]:
                raise UsageError(f"{flag} {missing[0]}: no --part has this name{suggest(missing[0], named)}")
        return {
            name: Part(method=method, state=name in self.state, dynamic=name not in self.fixed)
            for name, method in named.items()
        }


@dataclass(frozen=True, kw_only=True)
class NameOptions:
    """The names of inputs, outputs and axes of FILE.onnx"""

    axes: Sequence[str] = option(
        (),
        "Names of dynamic axes: batch,sequence (the first of every input) or input_ids:0=batch,mask:0=batch.",
        metavar="SPEC",
    )
    input_names: str | None = option(None, "New names of all inputs, or old=new, ...", metavar="NAMES")
    output_names: str | None = option(None, "New names of all outputs, or old=new, ...", metavar="NAMES")
    outputs: str | None = option(None, "Keep only these outputs; * matches any.", metavar="NAMES")
    named: NamedParts = NamedParts()


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """A command line in which ``--dynamic`` with a value is replaced by ``--axes``: a flag cannot take a value."""
    replaced: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word.startswith("--dynamic="):
            replaced += ["--axes", word.removeprefix("--dynamic=")]
        elif word == "--dynamic" and words and _SPEC.fullmatch(words[0]):
            replaced += ["--axes", words.pop(0)]
        else:
            replaced.append(word)
    return replaced


def read_interface(names: NameOptions) -> RequestedNames:
    """The interface that the options describe."""
    from modelexport.exporting.requested_names import RequestedNames

    open_axes: dict[tuple[str, int], str] = {}
    leading: list[str] = []
    for spec in names.axes:
        words = spec.split(",")
        axes = [_AXIS.fullmatch(word) for word in words]
        if all(axes):
            open_axes |= {(axis[1], int(axis[2])): axis[3] for axis in axes if axis is not None}
        elif all(_NAME.fullmatch(word) for word in words) and not leading:
            leading = words
        else:
            raise UsageError(
                f"--axes {spec}: write batch,sequence for the first axes of all inputs, or ids:0=batch,mask:0=batch"
            )
    return RequestedNames(
        inputs=_names(names.input_names, "--input-names"),
        outputs=_names(names.output_names, "--output-names"),
        kept=names.outputs.split(",") if names.outputs else (),
        axes=open_axes,
        leading=leading,
    )


def _names(text: str | None, option: str) -> Mapping[str, str] | Sequence[str]:
    if not text:
        return {}
    words = text.split(",")
    pairs = [word.partition("=") for word in words]
    if (
        not all(name and (new or not equal) for name, equal, new in pairs)
        or len({bool(equal) for _, equal, _ in pairs}) > 1
    ):
        raise UsageError(f"{option} {text}: write new names for all, or old=new for some")
    return {old: new for old, _, new in pairs} if pairs[0][1] else words
