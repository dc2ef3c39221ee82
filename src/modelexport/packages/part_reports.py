"""Comparisons of the parts of a package with the model that it was exported from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelexport.core.result_display import Report, Rows
from modelexport.verify.verify_report import ParameterReport, VerifyReport

if TYPE_CHECKING:
    from torch import nn

    from modelexport.tagged.package import Package


class PartReports(Report, msgspec.Struct, frozen=True):
    """The comparison of each part of a package, module by module."""

    parts: Mapping[str, VerifyReport]

    @property
    def agrees(self) -> bool:
        """Whether every part agrees."""
        return bool(self.parts) and all(report.agrees for report in self.parts.values())

    @property
    def document(self) -> Any:
        return super().document | {"parts": {name: report.document for name, report in self.parts.items()}}

    def _table(self) -> Rows:
        yield "part", "what"
        yield from self.parts.items()


def first_wrong_module(model: nn.Module, inputs: Mapping[str, Any], file: Path, provider: str) -> str | None:
    """The address of the first module of a part that differs from PyTorch's; ``None`` if none does."""
    from modelexport.verify.verify import verify

    diverging = verify(model, inputs, file, provider=provider).diverging
    return None if diverging is None else diverging.address or "."


def verify_parameters_of_parts(model: nn.Module, package: Package) -> ParameterReport:
    """The comparison of the parameters of all parts with the model's ``state_dict``, bit for bit."""
    from modelexport.verify.parameters_in_pytorch import verify_parameters

    reports = {name: verify_parameters(model, file) for name, file in package.files.items()}

    def named(field: str) -> list[str]:
        return [f"{part}: {name}" for part, report in reports.items() for name in getattr(report, field)]

    used, transformed = (sum(getattr(each, field) for each in reports.values()) for field in ("used", "transformed"))
    lists = {field: named(field) for field in ("unaccounted", "differing", "untraced")}
    return ParameterReport(used=used, transformed=transformed, **lists)
