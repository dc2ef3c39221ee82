"""What commands share: a model loaded with its inputs, progress on a terminal, one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        from modelexport.pytorch.inputs import example_inputs

        return loaded, example_inputs(
            loaded.model,
            spec=inputs,
            directory=loaded.directory,
            seed=seed,
            has_weights=loaded.weights is None,
        )


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """Says on a terminal what stage the work is in; silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda stage: None
        return
    erase, terminal = "\r\x1b[K", raw(sys.stderr)
    try:
        yield lambda stage: print(f"{erase}{on_one_line(stage)} ...", end="", file=terminal, flush=True)
    finally:
        print(erase, end="", file=terminal, flush=True)


def print_json(document: Any) -> None:
    """Print a value as the one JSON document that a command prints."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(document), indent=1))
