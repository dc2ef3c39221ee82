"""The kind of packages whose parts a person names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelexport.capture.exported_graph import Exported
from modelexport.core.text import align, plural
from modelexport.errors import UsageError
from modelexport.exporting.export_result import ExportResult
from modelexport.exporting.requested_names import RequestedNames
from modelexport.files.safetensors_files import errors_of_writing
from modelexport.format.package_manifest import Manifest, PartEntry
from modelexport.packages.input_and_axis_names import plain_names
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.named_parts import Part, PartLike, as_part, method_name, named_parts
from modelexport.packages.package_kinds import PackageKind, Request, verify_parts
from modelexport.packages.part_reports import PartReports
from modelexport.packages.part_runs import PartRun, compare_chain, compare_steps, first_fault, state_of
from modelexport.pytorch.nested_tensors import tensors_in
from modelexport.tagged.package import Package
from modelexport.terminal.printing import format_headings
from modelexport.terminal.show_verification import format_verify
from modelexport.traces.array_differences import worst

INPUTS = "inputs.safetensors"
"""The file of a package with the example inputs of its parts, with which ``verify`` runs them."""
_IN = "/"


class NamedPartsReport(PartReports, frozen=True, kw_only=True):
    """The comparison of a package of named parts with its model."""

    runs: list[PartRun]
    """The parts one after the other, then each part with a state over several steps."""

    @property
    def agrees(self) -> bool:
        """Whether every part agrees, and every output of every run."""
        outputs = [output for run in self.runs for output in run.outputs]
        compared = any(output.status == "agree" for output in outputs)
        return compared and all(report.agrees for report in self.parts.values()) and not self._wrong

    @property
    def _wrong(self) -> list[str]:
        return [run.part for run in self.runs for output in run.outputs if output.status == "differ"]


def format_named_parts(report: NamedPartsReport) -> str:
    """Each part as ``verify`` shows a file, a line for each run, and a summary."""
    rows: list[tuple[object, ...]] = [("PART", "INPUTS", "STEP", "STATUS", "LARGEST ERROR", "")]
    for run in report.runs:
        most = worst(run.outputs)
        if most is not None:
            error = f"{most.relative or 0:.1e}"
            rows.append((run.part, run.sequence, run.step, most.status, error, most.reason))
    right = sum(all(output.status != "differ" for output in run.outputs) for run in report.runs)
    summary = f"{right} of {plural(len(report.runs), 'run')} of the parts in turn return what PyTorch returns"
    parts = format_headings({name: format_verify(part) for name, part in report.parts.items()})
    return "\n".join([parts, "", align(rows, right={2, 4}), summary])


class NamedPartsKind(PackageKind):
    """Named methods of a model, or of modules in it, and functions of the model.

    Args:
        parts: Names to what the parts run; none for the kind before a person named any.
    """

    name = "parts"
    takes = "arguments"
    only_named = True
    needs = "a model whose parts are named with --part"
    does, example = "compute", "its parts in turn"
    verified_in_memory = True
    verified_with = ("progress",)

    def __init__(self, parts: Mapping[str, PartLike] | None = None) -> None:
        self.parts = {name: as_part(part) for name, part in (parts or {}).items()}
        if wrong := [name for name in self.parts if not re.fullmatch(r"\w[\w.-]*", name)]:
            raise UsageError(
                f"a part cannot be named {wrong[0]!r}: its file has the name; use letters, digits, _ . and -"
            )

    def with_parts(self, parts: Mapping[str, PartLike]) -> PackageKind:
        return NamedPartsKind(parts)

    def forms(self, request: Request) -> Iterable[list[ModelPart]]:
        if not self.parts:
            raise UsageError("no part is named: give --part NAME=METHOD, or parts={NAME: METHOD}")
        return [[*named_parts(request.model, self.with_inputs(request.inputs).parts, request.directory)]]

    def with_inputs(self, inputs: Any) -> NamedPartsKind:
        """This kind with example inputs that a caller gave by part: tensors, descriptions of them, or whole parts."""
        given: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
        if unknown := [name for name in given if name not in self.parts]:
            raise UsageError(f"there is no part {unknown[0]}: inputs are given by part ({', '.join(self.parts)})")
        parts = {
            name: each if isinstance(each := given[name], Part) else _described(part, each)
            for name, part in self.parts.items()
            if name in given
        }
        return NamedPartsKind(self.parts | parts)

    def name_values(self, exported: Exported) -> Exported:
        inputs, outputs = plain_names(exported)
        return RequestedNames(inputs=inputs, outputs=outputs)(exported)

    def completed(
        self, manifest: Manifest, model: nn.Module, parts: Sequence[ModelPart], results: Mapping[str, ExportResult]
    ) -> Manifest:
        entries, made = [], {part.name: part for part in parts}
        for entry in manifest.parts:
            part, document = self.parts[entry.name], results[entry.name].hierarchy
            others = [other for other in manifest.parts if other.name != entry.name]
            elsewhere = {name for other in others for name in (*other.inputs, *other.outputs)}
            pairs = state_of(document.inputs, document.outputs, part.state, elsewhere)
            _check_state(entry, part, pairs)
            entries.append(
                msgspec.structs.replace(
                    entry,
                    method=method_name(part),
                    returns=list(part.outputs or ()),
                    constants=dict(_constants_in(made[entry.name].inputs)),
                    state=pairs,
                )
            )
        return msgspec.structs.replace(manifest, parts=entries)

    def write_layouts(
        self, request: Request, folder: Path, manifest: Manifest, parts: Sequence[ModelPart]
    ) -> list[str]:
        tensors = {
            f"{part.name}{_IN}{name}": tensor.clone(memory_format=torch.contiguous_format)
            for part in parts
            for name, tensor in tensors_in(part.inputs)
            if name not in part.taken
        }
        with errors_of_writing():
            save_file(tensors, folder / INPUTS)
        return super().write_layouts(request, folder, manifest, parts)

    def find_fault(self, request: Request, manifest: Manifest, folder: Path, notes: list[str]) -> str:
        parts = [*named_parts(request.model, self.with_inputs(request.named_inputs).parts, request.directory)]
        files = {entry.name: folder / entry.file for entry in manifest.parts}
        pairs = {e.name: [f"{output} as {taken}" for output, taken in e.state.items()] for e in manifest.parts}
        notes += [f"{name} takes again: {', '.join(texts)}" for name, texts in pairs.items() if texts]
        return first_fault(compare_chain(parts, files)) or next(
            filter(None, (first_fault(runs) for runs in _steps(parts, manifest, files))), ""
        )

    def verify(self, model: nn.Module, inputs: Any, package: Package, **how: Any) -> NamedPartsReport:
        inputs = _stored_inputs(package) | dict(inputs or {})
        entries = {entry.name: entry for entry in package.manifest.parts}
        for entry in entries.values():
            if not entry.method and not isinstance(inputs.get(entry.name), Part):
                raise UsageError(
                    f"{entry.name} was exported from a function: give it again, "
                    f"verify_package(model, {{{entry.name!r}: Part(method=...)}}, {str(package.folder)!r})"
                )
        known = NamedPartsKind(
            {name: Part(method=e.method, outputs=e.returns or None, state=e.state) for name, e in entries.items()}
        )
        parts = [*named_parts(model, known.with_inputs(inputs).parts)]
        reports = verify_parts(parts, package, **how).parts
        runs = [*compare_chain(parts, package.files)]
        runs += [run for steps in _steps(parts, package.manifest, package.files) for run in steps]
        return NamedPartsReport(parts=dict(reports), runs=runs)

    def text_of_report(self, report: Any) -> str:
        return format_named_parts(report)


def _constants_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of JSON in inputs, by name; those beside tensors have the names that tensors would have there."""
    if name and _is_plain(value):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)) and not hasattr(value, "_fields"):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _constants_in(part, f"{name}.{key}" if name else str(key))


def _is_plain(value: Any) -> bool:
    """Whether a value is one of JSON."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def _stored_inputs(package: Package) -> dict[str, dict[str, Any]]:
    """The example inputs of each part, as they were exported; those that earlier parts return are not stored."""
    stored = {
        f"{entry.name}{_IN}{name}": each for entry in package.manifest.parts for name, each in entry.constants.items()
    }
    stored |= load_file(package.folder / INPUTS) if (package.folder / INPUTS).is_file() else {}
    inputs: dict[str, dict[str, Any]] = {entry.name: {} for entry in package.manifest.parts}
    for key, value in stored.items():
        part, _, name = key.partition(_IN)
        place = inputs.get(part, {})
        *outer, last = name.split(".")
        for word in outer:
            place = place.setdefault(word, {})
        place[last] = value
    return {part: {name: _as_lists(value) for name, value in each.items()} for part, each in inputs.items()}


def _as_lists(value: Any) -> Any:
    """Nested dictionaries whose keys are 0, 1, ... as lists."""
    if not isinstance(value, dict):
        return value
    inside = {key: _as_lists(each) for key, each in value.items()}
    places = [str(index) for index in range(len(inside))]
    return [inside[place] for place in places] if inside and set(inside) == set(places) else inside


def _described(part: Part, inputs: Any) -> Part:
    """A part with inputs that a caller gave: tensors, or descriptions of them."""
    described = {name: value for name, value in inputs.items() if _is_description(value)}
    tensors = {name: value for name, value in inputs.items() if name not in described}
    return replace(part, inputs=tensors, described=described)


def _is_description(value: Any) -> bool:
    return isinstance(value, Mapping) and ("shape" in value or "value" in value)


def _check_state(entry: PartEntry, part: Part, pairs: Mapping[str, str]) -> None:
    outputs = ", ".join(entry.outputs)
    if part.state and not pairs:
        raise UsageError(
            f"{entry.name} returns nothing that it takes again (it returns {outputs}, and takes "
            f"{', '.join(entry.inputs)}): leave out its state, or name the pairs, Part(state={{output: input}})"
        )
    for output, taken in pairs.items():
        if output not in entry.outputs or taken not in entry.inputs:
            wrong, what = (output, "return") if output not in entry.outputs else (taken, "take")
            raise UsageError(
                f"{entry.name} does not {what} {wrong}: it returns {outputs}, and takes {', '.join(entry.inputs)}"
            )


def _steps(parts: Sequence[ModelPart], manifest: Manifest, files: Mapping[str, Path]) -> Iterable[Any]:
    made = {part.name: part for part in parts}
    for entry in manifest.parts:
        if entry.state:
            yield compare_steps(made[entry.name], entry.state, files[entry.name])


KIND = NamedPartsKind()
