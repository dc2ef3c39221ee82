"""The kinds of packages: what a tool knows of the packages that it makes, and which kind a model becomes.

The table of tools (:mod:`modelexport.tools`) lists them. ``PackageKind`` itself is the kind of a model that is exported
whole; the others are subclasses, each in the folder of its tool.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import nn

from modelexport.core.text import first_few, suggest
from modelexport.core.warned_callers import warn_caller
from modelexport.errors import InputsError, ToolWarning, UsageError
from modelexport.exporting.export_result import ExportResult
from modelexport.exporting.options import Options, PackageOptions
from modelexport.files.first_module_folder import first_module_folder
from modelexport.files.named_models import named_folder
from modelexport.files.safetensors_files import INDEX, SINGLE
from modelexport.format.package_manifest import Manifest
from modelexport.packages.configs_and_tokenizers import write_configs_and_tokenizers
from modelexport.packages.model_parts import ModelPart
from modelexport.packages.part_reports import PartReports
from modelexport.packages.shared_weights import share_weights
from modelexport.pytorch.loading import LoadedModel, load_model
from modelexport.runtime.devices import CPU
from modelexport.tagged.package import Package, read_package
from modelexport.tools import imported, kinds_of_tools
from modelexport.weights.bytes_of_entries import Weights

if TYPE_CHECKING:
    from modelexport.capture.exported_graph import Exported

AUTO, WHOLE = "auto", "whole"
Loads = Literal["memory", "files", "auto"]
"""Where weights are when a model is loaded: in memory, in their files, or in these if they can stay there."""
Takes = Literal["arguments", "nothing", "sizes", "inputs"]
"""What a model is given for an example run: the arguments of a pipeline; nothing; only the sizes of images, where the
other inputs are made; or inputs."""


@dataclass(frozen=True)
class Request:
    """A model that becomes a package, and what a caller asked for."""

    model: nn.Module
    inputs: Mapping[str, Any] | Sequence[Any] | None
    directory: Path | None
    """The model's folder."""
    options: Options

    @property
    def named_inputs(self) -> Mapping[str, Any] | None:
        """The inputs, if they have names."""
        return self.inputs if isinstance(self.inputs, Mapping) else None


class PackageKind:
    """A kind of packages. This class is the kind of a model that is exported whole, as one graph."""

    name = WHOLE
    """Its name in the manifest, and as ``--parts``."""
    takes: Takes = "inputs"
    never_whole = False
    """Whether a model that it accepts cannot be exported whole."""
    only_named = False
    """Whether ``auto`` leaves it out: it is used only if it is asked for by name."""
    needs = "a model"
    """The models that it accepts, in words, for the message that refuses another one."""
    does, example = "", ""
    """The trial before a package is written, and its input, in words: ``generate``, ``a prompt``; empty if none."""
    keeps_as_inputs: Collection[str] = ()
    """Inputs that stay inputs although the caller asks for constants, since every step gives them other values."""
    verified_in_memory = False
    """Whether a verification runs the model whole, so that its weights are in memory."""
    verified_with: Collection[str] = ("weights", "progress")
    """The keywords of ``verify_package`` that :meth:`verify` takes, beside ``provider``."""

    def find(self, spec: str) -> Path | None:
        """The folder that ``spec`` names, if it has a layout that this kind loads; ``None`` otherwise."""
        return None

    def load(self, folder: Path, *, weights: Loads, trust_remote_code: bool, dtype: str | None) -> LoadedModel:
        """Load the model in a folder that :meth:`find` found."""
        raise NotImplementedError

    loads_for_files = False
    """Whether a model in such a folder is loaded by :meth:`load` for a single file as well."""

    def made_by(self, class_name: str) -> bool:
        """Whether :meth:`load` gives models of a class, by the name that it has in a file."""
        return False

    def as_module(self, model: Any) -> nn.Module | None:
        """A value that is not a module, such as a pipeline, as one; ``None`` if it is not of this kind."""
        return None

    def accepts(self, model: nn.Module) -> bool:
        """Whether a model becomes a package of this kind."""
        return True

    def with_parts(self, parts: Mapping[str, Any]) -> PackageKind:
        """This kind for parts that a person named."""
        raise UsageError(f"a package of kind {self.name} finds its parts by itself: leave out --part")

    def check_options(self, asked: PackageOptions) -> None:
        """Refuse options that are for other kinds."""
        if asked.static_cache is not None or asked.separate_prefill:
            raise InputsError("--static-cache and --separate-prefill are for a model that generates: leave them out")

    def forms(self, request: Request) -> Iterable[list[ModelPart]]:
        """The forms that the parts of a model may have, the best first. Each is made when it is asked for."""
        inputs = request.inputs
        if inputs is None:
            from modelexport.pytorch.inputs.generated_inputs import generate_inputs

            inputs = generate_inputs(request.model, directory=request.directory)
        return [[ModelPart("model", request.model, inputs)]]

    def example_inputs(self, model: nn.Module) -> Any:
        """Example inputs of a model that needs others than :func:`generate_inputs` makes; ``None`` otherwise."""
        return None

    def share_weights(self, request: Request, parts: Sequence[ModelPart], folder: Path) -> Mapping[str, Weights]:
        """Write or link the weights of all parts into the folder, once.

        Returns:
            Name of a part to the places of the entries that it uses.
        """
        asked = request.options.weights
        weights = share_weights(request.model, asked.source, folder, asked.weights)
        return defaultdict(lambda: weights)

    def name_values(self, exported: Exported) -> Exported:
        """Give inputs, outputs and axes of a part the names that runtimes expect, in place."""
        return exported

    def completed(
        self, manifest: Manifest, model: nn.Module, parts: Sequence[ModelPart], results: Mapping[str, ExportResult]
    ) -> Manifest:
        """The manifest with the fields of this kind."""
        return manifest

    def find_fault(self, request: Request, manifest: Manifest, folder: Path, notes: list[str]) -> str:
        """How the parts differ from the library that runs the model, on other batches; empty if they do not.

        It is called only where ``does`` is set.

        Args:
            notes: Gets what was not compared.
        """
        return ""

    def write_layouts(
        self, request: Request, folder: Path, manifest: Manifest, parts: Sequence[ModelPart]
    ) -> list[str]:
        """Write the files that other loaders need beside the graphs.

        Returns:
            The files that could not be written and why, one line each.
        """
        write_configs_and_tokenizers(request.model, request.directory, folder, manifest)
        return []

    def inputs_for_verification(
        self, loaded: LoadedModel, manifest: Manifest, user_inputs: Mapping[str, Any] | None, seed: int
    ) -> Any:
        """What :meth:`verify` takes if the caller gives only the sizes of images, or nothing."""
        return user_inputs

    def verify(self, model: nn.Module, inputs: Any, package: Package, **how: Any) -> Any:
        """Compare a package with the model that it was exported from."""
        return verify_parts([ModelPart("model", model, inputs)], package, **how)

    def text_of_report(self, report: Any) -> str | None:
        """What :meth:`verify` returned, as text for people; ``None`` for ``PartReports``, which kinds share."""
        return None


@functools.cache
def package_kinds() -> tuple[PackageKind, ...]:
    """The kinds of all installed tools, and at last that of models exported whole."""
    kinds = (_imported(place) for place in kinds_of_tools())
    return (*(kind for kind in kinds if kind is not None), PackageKind())


def _imported(place: str) -> PackageKind | None:
    """The kind at a place; ``None``, with a warning, if the code of another package cannot give it."""
    if place.startswith("modelexport."):
        return cast(PackageKind, imported(place))
    try:
        kind = imported(place)
        problem = _lacking_in(kind)
    except Exception as error:  # code of another package, which must not end our commands
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warn_caller(f"the kind of packages {place} cannot be used: {problem}", ToolWarning)
        return None
    return cast(PackageKind, kind)


def _lacking_in(kind: object) -> str:
    """Why the kind of another package would take models that it is not for; empty if it would not."""
    if not isinstance(kind, PackageKind):
        return f"it is a {type(kind).__name__}"
    lacks = [name for name in ("name", "needs") if getattr(kind, name) == getattr(PackageKind, name)]
    if not kind.only_named and getattr(kind.accepts, "__func__", None) is PackageKind.accepts:
        lacks.append("accepts")
    return f"it has no {lacks[0]} of its own" if lacks else ""


def as_module(model: Any) -> Any:
    """A pipeline as one module; other values as they are."""
    made = (kind.as_module(model) for kind in package_kinds())
    return next((module for module in made if module is not None), model)


def kind_for_model(model: nn.Module, name: str | Mapping[str, Any] = AUTO) -> PackageKind:
    """The kind of the package that a model becomes.

    Args:
        name: The kind that is asked for, or ``auto`` for the first that accepts the model; or named parts.
    """
    kinds, what = package_kinds(), type(model).__name__
    if not isinstance(name, str):
        return next(kind for kind in kinds if kind.only_named).with_parts(name)
    accepting = [kind for kind in kinds if kind.accepts(model)]
    if name == WHOLE and any(kind.never_whole for kind in accepting):
        raise InputsError(f"{what} is not one model: leave out --parts {WHOLE}")
    for kind in accepting:
        if name == kind.name or (name == AUTO and not kind.only_named):
            return kind
    needs = [kind.needs for kind in kinds if kind.name == name]
    if not needs:
        names = sorted({AUTO, *(kind.name for kind in kinds)})
        raise InputsError(f"no kind of packages is named {name}{suggest(name, names)}; there are {', '.join(names)}")
    raise InputsError(f"{what} is not {' or '.join(needs)}: use --parts {WHOLE}, or give another model")


def folder_kind(spec: str, name: str = AUTO, *, for_file: bool = False) -> tuple[PackageKind, Path] | None:
    """The kind that loads the folder that ``spec`` names, and the folder; ``None`` if no kind does.

    Args:
        name: The kind that is asked for, or ``auto``.
        for_file: Only kinds that load such a folder for a single file, too.
    """
    for kind in package_kinds():
        if name in (AUTO, kind.name) and (kind.loads_for_files or not for_file):
            folder = kind.find(spec)
            if folder is not None:
                return kind, folder
    return None


def load_for_parts(
    spec: str, parts: str, *, model_class: str | None, trust_remote_code: bool, seed: int, dtype: str | None
) -> tuple[LoadedModel, Takes]:
    """Load a model for a package, and tell what it takes. Weights stay in their files if they can.

    Args:
        spec: A folder of a pipeline, or what :func:`modelexport.pytorch.loading.load_model` takes, like the others.
        parts: The kind that is asked for, or ``auto``.
    """
    folder = first_module_folder(named_folder(spec) or Path(spec))
    linked = any((folder / name).is_file() for name in (SINGLE, INDEX))
    weights: Loads = "files" if linked else "auto"
    if parts != WHOLE and (found := folder_kind(spec, parts)) is not None:
        kind, place = found
        return kind.load(place, weights=weights, trust_remote_code=trust_remote_code, dtype=dtype), kind.takes
    loaded = load_model(
        spec, model_class=model_class, seed=seed, weights=weights, trust_remote_code=trust_remote_code, dtype=dtype
    )
    return loaded, PackageKind.takes if parts == WHOLE else kind_for_model(loaded.model).takes


def kind_of_package(package: Package, model: nn.Module) -> PackageKind:
    """The kind of a package that exists, if the model is one that it can come from."""
    name = package.manifest.kind
    kinds = [kind for kind in package_kinds() if kind.name == name]
    if name == "stages":
        raise UsageError(
            f"{package.folder} consists of {name}: give compare {package.folder}/ FILE --numbers, with the split file"
        )
    if not kinds:
        raise UsageError(f"{package.folder} is a package of kind {name}, which no installed tool knows: install it")
    for kind in kinds:
        if kind.accepts(model):
            return kind
    needs = " or ".join(kind.needs for kind in kinds)
    raise UsageError(f"{type(model).__name__} is not {needs}: give the model that {package.folder} was exported from")


def verify_package(
    model: Any,
    inputs: Mapping[str, Any] | Sequence[Any] | None,
    folder: str | os.PathLike[str] | Package,
    *,
    provider: str = CPU,
    new_tokens: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    weights: Weights | None = None,
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Compare a package with the model or the pipeline that it was exported from.

    Args:
        inputs: Of the model, prompts, or arguments of a pipeline; ``None`` for those that are made.
        provider: The execution provider of ONNX Runtime.
        new_tokens: The number of tokens to generate with a package that generates.
        steps, seed: Of the scheduler of a pipeline, and of the random numbers of its run.
        weights: The places of the weights of a model that was built without them.
        progress: Called with the name of each step.

    Returns:
        The report of the kind: ``agrees`` for each; a package of parts has that of each in ``parts``.

    Raises:
        FileFormatError: The folder is not a package, or is damaged.
        UsageError: The model is not the one that was exported, or its kind of package has no tokens or steps.
    """
    package = folder if isinstance(folder, Package) else read_package(Path(folder))
    module = as_module(model)
    kind = kind_of_package(package, module)
    counts = {name: count for name, count in {"new_tokens": new_tokens, "steps": steps}.items() if count is not None}
    if wrong := [name for name in counts if name not in kind.verified_with]:
        raise UsageError(
            f"{package.folder} is a package of kind {kind.name}, which is verified without {wrong[0]}: leave it out"
        )
    every = {"seed": seed, "weights": weights, "progress": progress, **counts}
    how = {name: every[name] for name in kind.verified_with if name in every}
    return kind.verify(module, inputs, package, provider=provider, **how)


def verify_parts(parts: Iterable[ModelPart], package: Package, **how: Any) -> PartReports:
    """Compare each part of a package with what its model computes.

    Args:
        parts: What the parts were exported from, or are exported from now.
        how: Keywords of :func:`modelexport.verify.verify.verify`.
    """
    from modelexport.verify.verify import verify

    given = {part.name: part for part in parts}
    if unknown := [name for name in package.files if name not in given]:
        raise UsageError(
            f"{package.folder} has the part {first_few(unknown)}, and the model gives {first_few(given)}: give the "
            "model that it was exported from"
        )
    reports = {name: verify(given[name].model, given[name].inputs, file, **how) for name, file in package.files.items()}
    return PartReports(reports)
