"""Types of models of transformers that no test, benchmark or page names, shrunk: for ``sweep.py --untried``.

A type counts if its config can be shrunk so that the model is built and runs with generated inputs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import models  # noqa: F401 - makes torchvision importable
from zoo import Case

ROOT = Path(__file__).parent.parent

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


class UnbuiltError(Exception):
    """A type that cannot be shrunk, and does not count."""


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
    texts = (file.read_text(errors="ignore") for file in files if file.stem not in ("untried_types", "held-out"))
    known = re.sub(r"[^a-z0-9]", "", " ".join(texts).lower())
    yield from (name for name in CONFIG_MAPPING if re.sub(r"[^a-z0-9]", "", name) not in known)


def built(kind: str) -> tuple[nn.Module, Any]:
    """A tiny model of a type and inputs that it runs with."""
    from transformers import CONFIG_MAPPING, AutoModel

    from modelexport import example_inputs

    try:
        model = AutoModel.from_config(shrunk(CONFIG_MAPPING[kind]())).eval()
        assert sum(one.numel() for one in model.parameters()) <= 20_000_000
        return model, example_inputs(model)
    except Exception as error:
        raise UnbuiltError from error


def cases() -> list[Case]:
    return [Case("untried types", kind, partial(built, kind)) for kind in untried()]
