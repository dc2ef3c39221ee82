"""Adapters made by PEFT for models of the table, and what PEFT's own models compute with them: ``golden/adapters``.

They are made in a process of their own: PEFT needs accelerate, and transformers loads models otherwise where it finds
that. Both are side packages (``side_packages.py``).
"""

from __future__ import annotations

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import models
import side_packages

ADAPTERS = Path(__file__).parent / "golden" / "adapters"


@dataclass(frozen=True)
class AdapterCase:
    """An adapter for a model of the table."""

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``LoraConfig``."""
    whole: int = 0
    """As inputs: initializers that are inputs whole."""


CASES = (
    AdapterCase("attention", "llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    AdapterCase(
        "everything",
        "llama",
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": "all-linear",
            "rank_pattern": {"layers.1.mlp.up_proj": 2},
            "alpha_pattern": {"o_proj": 9},
            "modules_to_save": ["lm_head"],
        },
        whole=1,
    ),
    AdapterCase("dora", "llama", {"r": 2, "use_dora": True, "target_modules": ["embed_tokens", "o_proj"]}, whole=3),
    AdapterCase("conv1d", "gpt2", {"r": 2, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]}),
    AdapterCase(
        "conv1d-dora",
        "gpt2",
        {"r": 2, "fan_in_fan_out": True, "use_dora": True, "bias": "lora_only", "target_modules": ["c_attn", "c_fc"]},
        whole=8,
    ),
    AdapterCase("convolutions", "unet", {"r": 2, "target_modules": ["conv", "skip", "time.0", "head"]}),
    AdapterCase(
        "biased", "gpt2", {"r": 2, "fan_in_fan_out": True, "lora_bias": True, "target_modules": ["c_proj"]}, whole=4
    ),
    AdapterCase("convolutions-dora", "unet", {"r": 2, "use_dora": True, "target_modules": ["stem", "time.2"]}, whole=2),
    AdapterCase("shared-layer", "albert", {"r": 2, "target_modules": ["query", "ffn"]}),
    AdapterCase("tied-head", "tied-weights", {"r": 2, "target_modules": ["lm_head"]}),
    AdapterCase("tied-table", "tied-weights", {"r": 2, "target_modules": ["embedding"]}),
)


def first(outputs: Any) -> np.ndarray:
    """The first tensor that a model returns."""
    return (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).numpy()


def make(folder: Path) -> None:
    """Write every adapter to ``folder/NAME``, and what the model gives with it to ``folder/NAME.npy``."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(_make, folder).result()


def _make(folder: Path) -> None:
    warnings.simplefilter("ignore")
    side_packages.add("peft")
    from peft import LoraConfig, PeftModel, get_peft_model

    for seed, adapter in enumerate(CASES):
        case = models.case(adapter.model)
        if case.missing:
            continue
        model = case.build()
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, LoraConfig(**adapter.options))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape)
        wrapped.save_pretrained(str(folder / adapter.name))
        (folder / adapter.name / "README.md").unlink()
        fresh = PeftModel.from_pretrained(case.build(), str(folder / adapter.name)).eval()
        with torch.no_grad():
            np.save(folder / f"{adapter.name}.npy", first(fresh(**case.inputs())))
