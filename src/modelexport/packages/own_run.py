"""The run of a package before its export says success, from prompts of other lengths in batches of other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from modelexport.core.text import error_line
from modelexport.errors import CheckError, ModelExportError
from modelexport.exporting.options import Options
from modelexport.exporting.result import ExportResult
from modelexport.format.packages import Generation, Manifest
from modelexport.packages.generator import Generator
from modelexport.packages.greedy import example_prompts, first_difference, generate_greedily
from modelexport.packages.model_parts import with_weights

_NEW_TOKENS = 4


def run_once(
    model: nn.Module,
    manifest: Manifest,
    folder: Path,
    results: Mapping[str, ExportResult],
    sizes: Any,
    options: Options,
) -> list[str]:
    """Generate some tokens from prompts of other lengths, in batches of other sizes, and compare them with the model's.

    Args:
        results: The export of each part; if one could not be checked, the package cannot run either.
        sizes: The size of images, for a model that takes it.

    Returns:
        Notes, a line each.

    Raises:
        CheckError: The package does not run, or generates something else.
    """
    checks = [result.check for result in results.values()]
    if any(check is None or check.status != "passed" for check in checks) or manifest.generation is None:
        return []
    try:
        with with_weights(model, options.weights.lent):
            fault = _fault(model, manifest, folder, sizes)
    except ModelExportError as error:
        fault = error_line(error)
    if not fault:
        return []
    if options.checks.keep_anyway:
        return [f"the package does not generate what the model does: {fault}"]
    raise CheckError(
        f"the package does not generate what the model does, and was not written: {fault}; --keep-anyway "
        f"(keep_anyway=True) writes it nevertheless",
        reason=fault,
    )


def _fault(model: nn.Module, manifest: Manifest, folder: Path, sizes: Any) -> str:
    assert manifest.generation is not None
    generator = Generator({part.name: folder / part.file for part in manifest.parts}, how=manifest.generation)
    prompts = example_prompts(model, None, seed=1, sizes=sizes if isinstance(sizes, Mapping) else None)
    for batch in batches_of(prompts, manifest.generation):
        if told := first_difference(generator, generate_greedily(model, batch, _NEW_TOKENS)):
            lengths = ", ".join(str(len(next(iter(prompt.values()))[0])) for prompt in batch)
            return f"{told} (prompts of {lengths} tokens)"
    return ""


def batches_of(prompts: Sequence[Mapping[str, Any]], how: Generation) -> list[Sequence[Mapping[str, Any]]]:
    """Prompts in the batches that a package takes: all together and the first and the last alone."""
    alone = [prompts[:1], prompts[-1:]]
    if how.cache_size:
        prompts = [one for one in prompts if _length(one) + _NEW_TOKENS - 1 <= how.cache_size]
        alone = [prompts[:1]] if prompts else []
    if how.rows == "padded":
        return [prompts, *alone] if prompts else []
    return [[prompts[0]] * 3, *alone] if how.rows == "equal" else alone


def _length(prompt: Mapping[str, Any]) -> int:
    return int(prompt["input_ids"].shape[1]) if "input_ids" in prompt else 1
