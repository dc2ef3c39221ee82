"""Packages of models with ``encode`` and ``decode``: a graph for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from modelexport.packages.model_parts import ModelPart, with_forward
from modelexport.packages.package_kinds import PackageKind, Request, verify_parts
from modelexport.packages.part_reports import PartReports
from modelexport.tagged.package import Package


class AutoencoderKind(PackageKind):
    """Models with two methods: ``encode(x)`` and ``decode(codes)``."""

    name = "autoencoder"
    needs = "a model with encode and decode"

    def accepts(self, model: nn.Module) -> bool:
        return hasattr(model, "encode") and hasattr(model, "decode")

    def forms(self, request: Request) -> Iterable[list[ModelPart]]:
        return [_parts(request.model, request.inputs)]

    def verify(self, model: nn.Module, inputs: Any, package: Package, **how: Any) -> PartReports:
        return verify_parts(_parts(model, inputs), package, **how)


def _parts(model: Any, inputs: Any) -> list[ModelPart]:
    x = inputs["x"]
    with torch.no_grad():
        codes = model.encode(x)
    return [
        ModelPart("encoder", with_forward(model, _encode), {"x": x}),
        ModelPart("decoder", with_forward(model, _decode), {"codes": codes}),
    ]


def _encode(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"codes": model.encode(x)}


def _decode(model: Any, codes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": model.decode(codes)}


KIND = AutoencoderKind()
