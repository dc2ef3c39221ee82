"""Shared by commands: loading a model with its inputs, progress on a terminal, printing a JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modelexport.cli.shield import raw
from modelexport.core.text import on_one_line


def load_with_inputs(
    model: str,
    inputs: Path | None,
    model_class: str | None,
    trust_remote_code: bool,
    seed: int,
    stages: Callable[[str], Any],
    *,
    make_inputs: bool = True,
    dtype: str | None = None,
    weights: Literal["memory", "files", "auto"] = "memory",
) -> tuple[Any, Any]:
    """The model that MODEL names, and example inputs for it."""
    with stages("load"):
        from modelexport.pytorch.loading import load_model

        loaded = load_model(
            model,
            model_class=model_class,
            trust_remote_code=trust_remote_code,
            seed=seed,
            dtype=dtype,
            weights=weights,
        )
        for warning in loaded.warnings:
            print(f"modelexport: warning: {warning}", file=sys.stderr)
    if not make_inputs or (loaded.inputs is not None and inputs is None):
        return loaded, loaded.inputs
    with stages("inputs"):
        from modelexport.pytorch.inputs import generate_inputs

        return loaded, generate_inputs(
            loaded.model,
            spec=inputs,
            directory=loaded.directory,
            seed=seed,
            has_weights=loaded.weights is None,
        )


@dataclass(frozen=True)
class ModelChoice:
    """MODEL and the options for loading it."""

    model: str
    inputs: Path | None = None
    model_class: str | None = None
    trust_remote_code: bool = False
    seed: int = 0
    dtype: str | None = None

    def load(self, stages: Callable[[str], Any], **keywords: Any) -> tuple[Any, Any]:
        """The model, and example inputs for it: as :func:`load_with_inputs`."""
        return load_with_inputs(
            self.model,
            self.inputs,
            self.model_class,
            self.trust_remote_code,
            self.seed,
            stages,
            dtype=self.dtype,
            **keywords,
        )


def load_for_package(choice: ModelChoice, parts: str, stages: Callable[[str], Any]) -> tuple[Any, Any]:
    """The model, without its weights if they can stay in their files, and inputs if it is exported whole."""
    from modelexport.files.safetensors_files import INDEX, SINGLE

    folder = Path(choice.model).expanduser()
    linked = any((folder / name).is_file() for name in (SINGLE, INDEX))
    weights: Literal["files", "auto"] = "files" if linked else "auto"
    if parts in ("auto", "pipeline") and folder.is_dir():
        from modelexport.packages.diffusion.components_module import MODEL_INDEX, load_diffusion
        from modelexport.packages.sentence_pipelines import is_pipeline, load_pipeline

        if (folder / MODEL_INDEX).is_file():
            with stages("load"):
                found = load_diffusion(folder, trust_remote_code=choice.trust_remote_code, dtype=choice.dtype)
            return found, read_arguments(choice.inputs)
        if is_pipeline(folder):
            with stages("load"):
                return load_pipeline(folder, trust_remote_code=choice.trust_remote_code, weights=weights), None
    loaded, example = choice.load(stages, make_inputs=False, weights=weights)
    from modelexport.packages.generation_parts import can_generate
    from modelexport.pytorch.inputs import generate_inputs

    if parts != "whole" and can_generate(loaded.model):
        return loaded, read_sizes(choice, loaded)
    if choice.inputs is not None or loaded.inputs is None:
        with stages("inputs"):
            example = generate_inputs(
                loaded.model,
                spec=choice.inputs,
                directory=loaded.directory,
                seed=choice.seed,
                has_weights=loaded.weights is None,
            )
    return loaded, example


def read_sizes(choice: ModelChoice, loaded: Any) -> dict[str, Any] | None:
    """The sizes of images for a model that generates, which makes its other inputs itself."""
    from modelexport.pytorch.inputs import read_inputs

    return None if choice.inputs is None else read_inputs(loaded.model, choice.inputs, seed=choice.seed)


def read_arguments(spec: Path | None) -> dict[str, Any] | None:
    """The arguments of a pipeline's run in a JSON file.

    Raises:
        InputsError: It is not a JSON object.
    """
    if spec is None:
        return None
    from modelexport.core.limits import SETTINGS_BYTES
    from modelexport.errors import FileFormatError, InputsError
    from modelexport.files.regular import read_regular

    try:
        found = json.loads(read_regular(spec, SETTINGS_BYTES))
    except (ValueError, FileFormatError, RecursionError) as error:
        raise InputsError(f"{spec} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputsError(f'{spec} is not a JSON object of arguments, such as {{"prompt": ["a cat", "a dog"]}}')
    return found


def named_files(path: Path) -> dict[str, Path]:
    """The files of FILE: the file itself with an empty name, or the parts of a package by name."""
    if not path.is_dir():
        return {"": path}
    from modelexport.tagged.package import read_package

    return read_package(path).files


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """Show the running stage if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage: None
        return
    erase, terminal = "\r\x1b[K", raw(sys.stderr)
    try:
        yield lambda stage: print(f"{erase}{on_one_line(stage)} ...", end="", file=terminal, flush=True)
    finally:
        print(erase, end="", file=terminal, flush=True)


def print_json(document: Any) -> None:
    """Print a value as a JSON document."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(document), indent=1))
