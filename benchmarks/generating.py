"""Types of models that generate, tiny and random: exported, run by the loop of docs/generating-loop.md, compared.

    OMP_NUM_THREADS=1 python benchmarks/generating.py [TYPE...] [--tokens 24] [--rows ROWS.md]

Each type is exported to a package. The loop, which knows only the manifest, generates from a batch of three prompts of
different lengths (padded on the left; those of an encoder on the right), and from each prompt alone; a model of images
or sound gets one in each prompt, with all that its processor gives. The tokens have to be those of `generate`. A row of
the table is a type. With `--rows` rows are added to a file, and the types that it has are not tried again.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from generating_types import DECODERS, IMAGE, MORE, STATES, Case, build
from modelexport import export_package

PAGE = Path(__file__).parent.parent / "docs" / "generating-loop.md"
PROMPTS = (7, 3, 12)


def loop_of_the_page() -> Callable[..., Any]:
    """The code of the page."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["generate"]


def right(model: Any, inputs: Mapping[str, Any], tokens: int) -> Any:
    """What `generate` gives, ends of text ignored."""
    starts = {"decoder_start_token_id": 1, "bos_token_id": 1} if model.config.is_encoder_decoder else {}
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **starts
    )
    with torch.no_grad():
        given = {name: torch.from_numpy(value) for name, value in inputs.items()}
        made = model.generate(**given, generation_config=model.generation_config)
    return made[:, -tokens:].numpy()


def prompts(name: str) -> list[dict[str, Any]]:
    """Three prompts of one row each, without padding."""
    random, case = np.random.default_rng(3), MORE.get(name, Case("", {}, placeholders=0))
    found = []
    for length in PROMPTS:
        row: dict[str, Any] = {}
        if case.placeholders is not None:
            start = [4, *[IMAGE] * case.placeholders] if case.placeholders else []
            row["input_ids"] = np.array([[*start, *random.integers(3, IMAGE, length)]])
        for key, value in case.beside.items():
            if isinstance(value, tuple):
                row[key] = random.standard_normal(value).astype(np.float32)
            elif isinstance(value, int):  # for each token
                ones = np.ones_like(row["input_ids"]) * value
                row[key] = ones[..., None, None] if key == "cross_attention_mask" else ones
            else:
                row[key] = value
        if case.types:
            row[case.types] = (row["input_ids"] == IMAGE).astype(np.int64)
        found.append(row)
    return found


def batch(rows: list[dict[str, Any]], *, left: bool) -> dict[str, Any]:
    """Prompts in one batch, with the mask of their padding."""
    if "input_ids" not in rows[0]:
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    longest = max(row["input_ids"].shape[1] for row in rows)
    rows = [{**row, "attention_mask": np.ones_like(row["input_ids"])} for row in rows]
    found = {}
    for key in rows[0]:
        of_text = key.endswith("token_type_ids") or key in ("input_ids", "attention_mask", "cross_attention_mask")
        values = []
        for row in rows:
            missing = longest - row["input_ids"].shape[1] if of_text else 0
            sides = [(0, 0), (missing, 0) if left else (0, missing)]
            values.append(np.pad(row[key], [*sides, *[(0, 0)] * (row[key].ndim - 2)]) if missing else row[key])
        found[key] = np.concatenate(values)
    return found


def tried(name: str, tokens: int) -> tuple[str, ...]:
    """A row of the table: the parts, padded batch, alone, seconds."""
    generate, rows = loop_of_the_page(), prompts(name)
    start = time.perf_counter()
    try:
        model = build(name)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"[:160], "", ""
    left = not model.config.is_encoder_decoder
    given = {key: rows[0][key] for key in MORE[name].given} if name in MORE else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "package"
        try:
            result = export_package(model, path, inputs=given or None)
        except Exception as error:
            return "refused", " ".join(str(error).split())[:200], "", f"{time.perf_counter() - start:.0f}"
        how = result.manifest.generation
        assert how is not None
        taken = {one for part in result.manifest.parts for one in part.inputs}
        form = "/".join(part.name for part in result.manifest.parts)
        form += " one by one" if how.first in how.one_by_one else ""
        form += ", text only" if name in MORE and not taken.intersection(MORE[name].beside or taken) else ""

        def same(*some: dict[str, Any]) -> str:
            inputs = batch(list(some), left=left)
            expected = right(model, inputs, tokens)
            if not left:
                inputs["decoder_input_ids"] = np.ones((len(some), 1), np.int64)
            try:
                return "equal" if np.array_equal(generate(path, inputs, tokens), expected) else "DIFFERENT"
            except Exception as error:
                return f"{type(error).__name__}: {error}".replace("\n", " ")[:120]

        alone = sorted({same(row) for row in rows} - {"equal"})
        together = same(*rows) if how.rows == "padded" else how.rows
        return form, together, alone[0] if alone else "equal", f"{time.perf_counter() - start:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rows", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = arguments.rows.read_text() if arguments.rows is not None and arguments.rows.exists() else ""
    kept = {line.split("|")[1].strip(): line for line in known.splitlines() if line.startswith("| ")}
    names, rows = arguments.types or [*STATES, *DECODERS, *MORE], []
    for name in names:
        if name not in kept:
            kept[name] = f"| {name} | {' | '.join(tried(name, arguments.tokens))} |"
            if arguments.rows is not None:
                with arguments.rows.open("a") as opened:
                    print(kept[name], file=opened)
        rows.append(kept[name])
    print("| type | parts | padded batch | alone | s |\n|---|---|---|---|---|", *rows, sep="\n")
    for what, of in (("decoders", [*STATES, *DECODERS]), ("with an encoder, images or sound", list(MORE))):
        own = [kept[name].split(" | ") for name in names if name in of]
        whole = [row for row in own if "text only" not in row[1]]
        alone, together = (sum(row[column] == "equal" for row in whole) for column in (3, 2))
        if own:
            print(f"\n{what}: of {len(own)}, {alone} give the tokens of `generate` alone, {together} in a batch.")


if __name__ == "__main__":
    main()
