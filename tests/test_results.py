"""What Python shows of a result fits on a screen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import modelexport


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    file, inputs = folder / "blocks.onnx", {"x": torch.ones(2, 4)}
    model = Blocks().eval()
    exported = modelexport.export(model, inputs, file, verify=True)
    tagged = modelexport.load(file)
    return {
        "ExportResult": exported,
        "VerifyReport": exported.verified,
        "PackageResult": modelexport.export_package(model, folder / "package", inputs=inputs, check=False),
        "TaggedModel": tagged,
        "ModuleView": tagged["blocks.0"],
        "Table": modelexport.cost(file),
        "ModuleProfile": modelexport.profile(file, runs=1, warmup=1),
        "FileComparison": modelexport.compare(file, file),
        "Extracted": tagged.extract("blocks.3", folder / "block.onnx"),
        "Split": modelexport.split(file, folder / "stages", stages=2),
        "Renamed": modelexport.rename(file, folder / "renamed.onnx"),
        "Replaced": modelexport.replace(file, ["blocks.1"], modelexport.Identity(), folder / "replaced.onnx"),
        "Placement": modelexport.place(file, ["gpu: blocks.[0-9]"], check=False),
        "RetagReport": modelexport.retag(folder / "renamed.onnx", source=file, output=folder / "retagged.onnx"),
        "UpdateResult": modelexport.update_weights(file, model.state_dict(), folder / "updated.onnx"),
        "HierarchyOverview": modelexport.hierarchy(model, inputs),
    }


def test_every_result_is_one_line_that_begins_with_its_class(results: dict[str, Any]) -> None:
    for name, result in results.items():
        text = repr(result)
        assert text.strip("<").startswith(name), text
        assert len(text) < 420 and "\n" not in text, text


def test_a_result_says_what_was_proven(results: dict[str, Any]) -> None:
    assert "121 calls, 80 nodes (80 exact), check passed, verified: agree" in repr(results["ExportResult"])
    assert "agree; 1 outputs within" in repr(results["VerifyReport"])
    assert "121 agree" in repr(results["VerifyReport"])
    assert repr(results["Split"]).endswith("stages: 2)")
