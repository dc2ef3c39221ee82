"""Types of models of transformers that no test, benchmark or page names, shrunk, through `export(verify=True)`.

    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python benchmarks/held_out.py [--models N] [--seconds N] [TYPE ...]
                                                                 [--results FILE.tsv]

A type counts if its config can be shrunk so that the model is built and runs with generated inputs within the time. A
line of FILE is a type, ``agree``, ``differ``, ``refused`` or ``late``, the seconds, and the reason. Types that are in
FILE are not tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT / "tests")  # in place of this folder, which has a file that is called as a module of Python

import torch  # noqa: E402
from torch import nn  # noqa: E402

import models  # noqa: E402, F401 - makes torchvision importable

NUMBERS = (
    (r"(vocab|codebook)_size|^n_?vocab|num_embeddings", 120),
    (r"(image|input|patch_image)_size", 32),
    (r"patch_size", 8),
    (r"max_position|n_positions|max_(source|target)_pos|max_seq|n_ctx", 64),
    (r"(key_value|kv)_heads|num_experts_per|top_?k|num_groups|n_groups?$", 2),
    (r"num_experts|n_routed|num_local_experts", 4),
    (r"heads|n_head", 4),
    (r"(head|qk_.*|v|kv)_(head_)?dim$|head_size", 8),
    (r"num_.*layers|n_layers?$|.*_layers$|num_blocks|n_blocks", 2),
    (r"intermediate|ffn|mlp_dim|feedforward|inner", 64),
    (r"hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|^dim$|channels?$|width|_dim$|rank$", 32),
)
"""Names of settings to small numbers, the first that fits."""


class LateError(BaseException):
    """The time of a model is up."""


def shrunk(config: Any) -> Any:
    """Make the sizes of a config small, in place, those of the configs in it too."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrunk(value)
        elif type(value) is int:
            small = next((number for pattern, number in NUMBERS if re.search(pattern, name)), value)
            _set(config, name, min(value, small))
            if re.search(r"(bos|eos|pad|token)_(token_)?id$|token_index$", name) and value > 100:
                _set(config, name, value % 100)
        elif isinstance(value, list) and value and all(type(one) is int for one in value):
            if re.search(r"depths|num_blocks|layers", name):
                _set(config, name, [1] * len(value))
            elif re.search(r"hidden|dims?$|channels|sizes$|width", name) and min(value) >= 32:
                _set(config, name, [max(8, one * 16 // min(value)) for one in value])
        elif isinstance(value, list) and name == "layer_types":
            _set(config, name, value[:2])
    return config


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(Exception):  # a setting that follows from others
        setattr(config, name, value)


def untried() -> Iterator[str]:
    """The types that nothing of the project names."""
    from transformers import CONFIG_MAPPING

    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("docs/**/*.md")]
    texts = (file.read_text(errors="ignore") for file in files if file.stem not in ("held_out", "held-out"))
    known = re.sub(r"[^a-z0-9]", "", " ".join(texts).lower())
    yield from (name for name in CONFIG_MAPPING if re.sub(r"[^a-z0-9]", "", name) not in known)


def built(kind: str) -> tuple[nn.Module, Any] | None:
    """A tiny model of a type and inputs that it runs with; ``None`` if it cannot be made tiny so."""
    from transformers import CONFIG_MAPPING, AutoModel

    from modelexport import example_inputs

    try:
        torch.manual_seed(0)
        model = AutoModel.from_config(shrunk(CONFIG_MAPPING[kind]())).eval()
        if sum(one.numel() for one in model.parameters()) > 20_000_000:
            return None
        return model, example_inputs(model)
    except Exception:
        return None


def outcome(kind: str, seconds: int) -> tuple[str, str] | None:
    from modelexport import export
    from modelexport.errors import ModelExportError

    def late(*_: Any) -> None:
        raise LateError

    made = None
    signal.signal(signal.SIGALRM, late)
    signal.alarm(25)
    try:
        made = built(kind)
        if made is None:
            return None
        signal.alarm(seconds)
        with tempfile.TemporaryDirectory() as folder:
            result = export(*made, Path(folder) / "m.onnx", verify=True)
            report, frontend = result.verified, result.hierarchy.settings.frontend
            if report is not None and report.agrees:
                return "agree", "" if frontend == "dynamo" else frontend
            return "differ", " ".join(str(report).split())
    except LateError:
        return None if made is None else ("late", "")
    except ModelExportError as error:
        return "refused", str(error)
    except Exception as error:
        return "refused", f"CRASH {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--models", type=int, default=110)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--results", type=Path, default=Path("held_out.tsv"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    done = {line.split("\t")[0] for line in given.results.read_text().splitlines()} if given.results.exists() else set()
    for kind in given.types or untried():
        if kind in done or len(done) >= given.models:
            continue
        started = time.perf_counter()
        found = outcome(kind, given.seconds)
        if found is None:
            continue
        done.add(kind)
        with given.results.open("a") as file:
            file.write("\t".join((kind, found[0], f"{time.perf_counter() - started:.0f}", found[1][:600])) + "\n")


if __name__ == "__main__":
    main()
