"""Qualcomm's NPU, simulated by `onnxruntime-qnn`: `make test-devices` installs it; skipped without it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from commands import run
from modelexport import export, sensitivity, verify_on_device

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None, reason="needs onnxruntime-qnn: `make test-devices`"
)


class Embeddings(torch.nn.Module):
    """A sum whose second addend is broadcast over the batch, and its normalization: the device fuses them, wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = torch.nn.Embedding(50, 64), torch.nn.Embedding(16, 64)
        self.norm, self.dense = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = self.positions(torch.arange(ids.shape[1])[None])
        return self.dense(self.norm(self.words(ids) + places))


def test_the_wrong_region_is_named_and_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.onnx"
    export(Embeddings(), {"ids": torch.randint(0, 50, (2, 16))}, file)
    report = verify_on_device(file, device="qnn", fix=tmp_path / "fixed.onnx")
    assert report.whole.status == "off"
    assert [region.operators for region in report.culprits] == [["Add", "LayerNormalization"]]
    assert report.fix is not None
    assert (report.agrees, report.fix.unchanged) == (True, [])
    assert report.fix.error is not None
    assert report.fix.error < 1e-2
    assert report.device.simulated


def test_sensitivity_leaves_out_what_is_wrong_without_quantization(tmp_path: Path) -> None:
    file, ids = tmp_path / "model.onnx", torch.randint(0, 50, (2, 16))
    export(Embeddings(), {"ids": ids}, file, check=False)
    report = sensitivity(file, to="int8-static", data=[{"ids": ids.numpy()}], device="qnn")
    assert max(unit.loss for unit in report.units) < 0.05
    note = next(note for note in report.table.notes if note.startswith("not in these figures"))
    assert float(note.split("has error ")[1].split()[0]) > 0.1


def test_the_devices_of_this_machine_have_options_that_are_checked(tmp_path: Path) -> None:
    listed = {one["name"]: one for one in json.loads(run("devices", "--json").stdout)["devices"]}
    assert "enable_htp_fp16_precision=1" in listed["qnn"]["options"]
    wrong = run("verify", tmp_path / "no.onnx", "--device", "qnn,soc_modl=60")
    assert wrong.returncode == 2
    assert "the device qnn has no option 'soc_modl'; did you mean soc_model?" in wrong.stderr
