"""A file with some of the model's outputs: what was left out at export is not missed; what a tool dropped is."""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from modelexport import export, load, retag, verify, verify_reference
from modelexport.capture import FrontEnd
from modelexport.errors import FileFormatError
from modelexport.exporting.requested_names import RequestedNames
from modelexport.format.keys import OUTPUTS

X = {"x": torch.linspace(-1, 1, 24).reshape(3, 8)}


class Heads(nn.Module):
    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self.draws = draws
        torch.manual_seed(0)
        self.body, self.norm, self.one, self.two = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.body(x).relu())
        drawn = self.two(hidden) + torch.rand(1) if self.draws else hidden - 1
        return {"logits": self.one(hidden), "more": self.two(hidden).sigmoid(), "hidden": hidden, "drawn": drawn}


@pytest.mark.parametrize(
    ("kept", "unused"), [(["logits"], "two"), pytest.param(["more", "hidden"], "one", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_outputs_that_were_left_out_are_not_missed(
    tmp_path: Path, frontend: FrontEnd, kept: list[str], unused: str
) -> None:
    export(
        Heads(),
        X,
        tmp_path / "m.onnx",
        frontend=frontend,
        dynamic=True,
        interface=RequestedNames(kept=kept),
        check=False,
    )
    report = verify(Heads(), X, tmp_path / "m.onnx")
    assert report.agrees, report
    assert [one.name for one in report.outputs] == kept
    assert {call.address: call.status for call in report.calls}[unused] == "no nodes"
    assert "agree" in {other.status for other in report.others}
    assert "differ" not in {other.status for other in report.others}


@functools.cache
def exported(folder: Path, *kept: str) -> Path:
    path = folder / f"{'-'.join(kept)}.onnx"
    export(Heads(), X, path, interface=RequestedNames(kept=list(kept)), reference=True, check=False)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("requested")


def test_random_outputs_are_told_apart_by_their_places_in_the_file(tmp_path: Path) -> None:
    model = Heads(draws=True)
    export(model, X, tmp_path / "m.onnx", interface=RequestedNames(kept=["logits", "drawn"]), check=False)
    report = verify(model, X, tmp_path / "m.onnx")
    assert [(one.name, one.status) for one in report.outputs] == [("logits", "agree"), ("drawn", "not compared")]
    assert report.agrees, report


def test_reference_values_are_those_of_the_outputs_in_the_file(folder: Path) -> None:
    report = verify_reference(exported(folder, "logits", "hidden"))
    assert report.agrees, report
    assert [one.name for one in report.outputs] == ["logits", "hidden"]


def test_they_are_remembered_where_the_runtime_drops_all_metadata(folder: Path, tmp_path: Path) -> None:
    path = exported(folder, "logits", "hidden")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "o.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(path, options)
    retag(tmp_path / "o.onnx", source=path, output=tmp_path / "r.onnx")
    assert verify(Heads(), X, tmp_path / "r.onnx").agrees


def test_a_module_cut_out_has_all_of_its_own_outputs(folder: Path, tmp_path: Path) -> None:
    path = exported(folder, "logits", "hidden")
    load(path)["norm"].extract(tmp_path / "norm.onnx")
    assert OUTPUTS not in {entry.key for entry in onnx.load(tmp_path / "norm.onnx").metadata_props}
    load(path)["."].extract(tmp_path / "all.onnx")
    assert verify(Heads(), X, tmp_path / "all.onnx").agrees


@pytest.mark.parametrize("kept", [[], ["logits", "hidden"]])
def test_an_output_that_a_tool_dropped_is_missed(folder: Path, tmp_path: Path, kept: list[str]) -> None:
    model = onnx.load(exported(folder, *kept))
    del model.graph.output[-1]
    onnx.save(model, tmp_path / "m.onnx")
    report = verify(Heads(), X, tmp_path / "m.onnx")
    assert report.verdict == "differ"
    assert "the file has no such output" in [one.reason for one in report.outputs]


def test_outputs_in_another_order_differ(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(exported(folder, "logits", "hidden"))
    outputs = list(model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend(reversed(outputs))
    onnx.save(model, tmp_path / "m.onnx")
    assert verify(Heads(), X, tmp_path / "m.onnx").verdict == "differ"


def test_a_damaged_list_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(exported(folder, "logits", "hidden"))
    next(entry for entry in model.metadata_props if entry.key == OUTPUTS).value = '{"logits": 1}'
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(FileFormatError, match=r"damaged metadata: the property modelexport\.outputs \("):
        verify(Heads(), X, tmp_path / "m.onnx")
