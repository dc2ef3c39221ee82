"""MODEL, as commands take it: how it is loaded, and with which inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from modelexport.core.declared_options import option
from modelexport.errors import UsageError
from modelexport.files.named_models import check_named


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How MODEL is loaded"""

    model_class: str | None = option(None, "The transformers class to load a directory with.", metavar="NAME")
    dtype: str | None = option(None, "float32, float16, bfloat16: convert the weights while loading.", metavar="NAME")
    bare: bool = option(
        False, "Of a sentence-transformers model, only the transformer, without pooling and normalization."
    )
    trust_remote_code: bool = option(False, "Run code from the model's repository.")
    seed: int = option(0, "The seed of random weights and inputs.", metavar="N", least=0)

    @property
    def keywords(self) -> dict[str, Any]:
        """What every loader of models takes."""
        return {name: value for name, value in asdict(self).items() if name != "bare"}

    @property
    def asked(self) -> bool:
        """Whether anything was given that only a model needs."""
        return self != Loading(seed=self.seed)

    def check(self, model: str | None, option: str) -> None:
        """Refuse what only a model needs without the option that gives one."""
        if model is None and self.asked:
            raise UsageError(f"--model-class, --dtype, --bare and --trust-remote-code go with {option}")


@dataclass(frozen=True)
class ModelChoice:
    """MODEL, its example inputs, and how it is loaded."""

    model: str
    inputs: Path | None = None
    loading: Loading = Loading()

    def __post_init__(self) -> None:
        check_named(self.model)  # before anything that takes seconds is imported

    def load(
        self,
        stages: Callable[[str], Any],
        *,
        make_inputs: bool = True,
        weights: Literal["memory", "files", "auto"] = "memory",
    ) -> tuple[Any, Any]:
        """The model, and example inputs for it."""
        with stages("load"):
            loaded = self._load(weights)
            _print_warnings(loaded)
        if not make_inputs or (loaded.inputs is not None and self.inputs is None):
            return loaded, loaded.inputs
        with stages("inputs"):
            return loaded, self.make_inputs(loaded)

    def _load(self, weights: Literal["memory", "files", "auto"]) -> Any:
        """The model, as the packages of its kind have it: one of sentence-transformers from tokens to embeddings."""
        how = self.loading
        if not how.bare and how.model_class is None:
            from modelexport.packages.package_kinds import folder_kind

            if (found := folder_kind(self.model, for_file=True)) is not None:
                kind, folder = found
                return kind.load(folder, trust_remote_code=how.trust_remote_code, dtype=how.dtype, weights=weights)
        from modelexport.pytorch.loading import load_model

        return load_model(self.model, weights=weights, **how.keywords)

    def of_file(self, file: Path) -> ModelChoice:
        """The same model as a file has it: of sentence-transformers whole, or its transformer alone."""
        from modelexport.packages.package_kinds import folder_kind

        if self.loading.bare or (found := folder_kind(self.model, for_file=True)) is None:
            return self
        from modelexport.core.calls import ROOT
        from modelexport.tagged.file import read_tagged

        whole = found[0].made_by(read_tagged(file).class_of(ROOT) or "")
        return self if whole else replace(self, loading=replace(self.loading, bare=True))

    def make_inputs(self, loaded: Any) -> Any:
        """Example inputs as described, or as fit the model."""
        from modelexport.packages.package_kinds import kind_for_model
        from modelexport.pytorch.inputs.generated_inputs import generate_inputs

        if self.inputs is None and (example := kind_for_model(loaded.model).example_inputs(loaded.model)) is not None:
            return example
        return generate_inputs(
            loaded.model,
            spec=self.inputs,
            directory=loaded.directory,
            seed=self.loading.seed,
            has_weights=loaded.weights is None,
        )


def load_for_package(
    choice: ModelChoice, parts: str | Mapping[str, Any], stages: Callable[[str], Any]
) -> tuple[Any, Any]:
    """The model, without its weights if they can stay in their files, and what it takes for an example run."""
    how = choice.loading
    if not isinstance(parts, str):  # named by a person: each part has inputs of its own
        loaded, _ = choice.load(stages, make_inputs=False)
        return loaded, read_arguments(choice.inputs)
    with stages("load"):
        from modelexport.packages.package_kinds import load_for_parts

        loaded, takes = load_for_parts(choice.model, "whole" if how.bare and parts == "auto" else parts, **how.keywords)
        _print_warnings(loaded)
    match takes:
        case "arguments":
            return loaded, read_arguments(choice.inputs)
        case "sizes":
            return loaded, read_sizes(choice, loaded)
        case "nothing":
            return loaded, None
    if choice.inputs is None and loaded.inputs is not None:
        return loaded, loaded.inputs
    with stages("inputs"):
        return loaded, choice.make_inputs(loaded)


def load_to_verify(choice: ModelChoice, kind: str, stages: Callable[[str], Any]) -> tuple[Any, Any]:
    """The model that a package of a kind is compared with, and what it takes: sizes of images, or inputs."""
    from modelexport.packages.package_kinds import package_kinds

    kinds = [each for each in package_kinds() if each.name == kind]
    if any(each.verified_in_memory for each in kinds):
        loaded, _ = choice.load(stages, make_inputs=False)
        return loaded, read_sizes(choice, loaded) if kinds[0].takes == "sizes" else read_arguments(choice.inputs)
    return load_for_package(choice, kind, stages)


def _print_warnings(loaded: Any) -> None:
    for warning in loaded.warnings:
        print(f"modelexport: warning: {warning}", file=sys.stderr)


def read_sizes(choice: ModelChoice, loaded: Any) -> dict[str, Any] | None:
    """The sizes of images for a model that generates, which makes its other inputs itself."""
    from modelexport.pytorch.inputs.generated_inputs import read_inputs

    return None if choice.inputs is None else read_inputs(loaded.model, choice.inputs, seed=choice.loading.seed)


def read_arguments(spec: Path | None) -> dict[str, Any] | None:
    """The arguments of a pipeline's run in a JSON file."""
    if spec is None:
        return None
    from modelexport.errors import InputsError
    from modelexport.files.regular_files import read_json

    return read_json(spec, InputsError, 'write arguments, such as {"prompt": ["a cat", "a dog"]}')
