"""``kit``: modules that run on a machine without modelexport, and what they gave there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from commands import run
from modelexport import export, update_weights, verify_results
from modelexport.errors import UsageError
from modelexport.tools.devices.kits import write_kit


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kits") / "model.onnx"
    export(Model(), {"x": torch.randn(2, 4)}, path, check=False)
    return path


def test_results_that_are_not_those_of_the_file_are_refused_in_one_line(file: Path, tmp_path: Path) -> None:
    other, kit = tmp_path / "other.onnx", tmp_path / "kit"
    update_weights(file, {name: tensor + 1 for name, tensor in Model().state_dict().items()}, other)
    assert run("kit", file, "-o", kit, "--module", "last").returncode == 0
    subprocess.run([sys.executable, "-I", kit / "runner.py"], check=True)
    right = json.loads((kit / "results.json").read_text())
    assert verify_results(file, results=kit / "results.json").agrees
    damaged = tmp_path / "results.json"

    def refused(change: Callable[[Any], None], model: Path = file, **how: Any) -> str:
        results = json.loads(json.dumps(right))
        change(results)
        damaged.write_text(json.dumps(results))
        with pytest.raises(UsageError) as raised:
            verify_results(model, results=damaged, **how)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    again = "run the runner of the kit again"
    assert "was made from another file" in refused(lambda results: None, other)
    assert f"nothing of the whole file: {again}, to its end" in refused(lambda results: results["parts"].clear())
    damage = f"the results of the whole file are damaged: {again}"
    assert refused(lambda results: results["parts"]["."].update(errors={})) == damage
    assert refused(lambda results: results["parts"]["."].update(errors={"linear": -0.5})) == damage
    assert "it has no name of a provider" in refused(lambda results: results["device"].update(provider="<script>"))
    assert "missing required field `kit`" in refused(lambda results: results.clear())
    assert "nan is not a bound" in refused(lambda results: None, bound=float("nan"))
    with pytest.raises(UsageError, match="is not a regular file but a folder"):
        verify_results(file, results=tmp_path)
    damaged.write_text(json.dumps(right | {"parts": {".": {"status": "crashed", "message": "one\ntwo\x1b[31m"}}}))
    report = verify_results(file, results=damaged)
    assert (report.agrees, report.whole.status, report.whole.reason) == (False, "crashed", "one\\ntwo\\x1b[31m")


def test_a_kit_is_not_written_through_a_link_inside_its_folder(file: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "values").symlink_to(tmp_path / "outside")
    refused = run("kit", file, "-o", tmp_path / "kit")
    assert refused.returncode == 2
    assert "values is a symbolic link" in refused.stderr
    assert [*(tmp_path / "outside").iterdir()] == []
    assert [each.name for each in (tmp_path / "kit").iterdir()] == ["values"]


@pytest.mark.slow
def test_a_kit_knows_the_weights_files_of_its_model(file: Path, tmp_path: Path) -> None:
    outside, data, kit = tmp_path / "model.onnx", tmp_path / "model.data", tmp_path / "kit"
    onnx.save(onnx.load(file), outside, save_as_external_data=True, location=data.name, size_threshold=0)
    write_kit(outside, kit, modules=["last"])
    subprocess.run([sys.executable, "-I", kit / "runner.py"], check=True)
    assert verify_results(outside, results=kit / "results.json").agrees
    data.write_bytes(bytes(len(data.read_bytes())))
    with pytest.raises(UsageError, match="was made from another file"):
        verify_results(outside, results=kit / "results.json")


def test_a_kit_gives_the_report_of_the_machine_where_it_was_run(file: Path, tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    assert run("kit", file, "-o", kit).returncode == 0
    assert {path.name for path in kit.iterdir()} >= {"runner.py", "runner.mjs", "index.html", "kit.json", "values"}
    lines = [line for line in (kit / "runner.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 100
    assert "modelexport" not in {word for line in lines if "import" in line.split() for word in line.split()}
    parts = [part["name"] for part in json.loads((kit / "kit.json").read_text())["parts"]]
    assert parts == [".", "first", "last"]

    def results() -> Path:
        subprocess.run([sys.executable, "-I", kit / "runner.py"], check=True)
        return kit / "results.json"

    report = verify_results(file, results=results())
    assert report.agrees
    assert (report.device.name, report.whole.nodes.keys()) == ("cpu", {"CPUExecutionProvider"})

    # A part whose right output is another one there, in a file that is wrong as a whole.
    text = json.loads((kit / "kit.json").read_text())
    for part in text["parts"]:
        if part["name"] != "first":
            value = part["outputs"][0]
            (kit / "values" / "other.bin").write_bytes(b"\0" * (kit / value["value"]).stat().st_size)
            value["value"] = "values/other.bin"
    (kit / "kit.json").write_text(json.dumps(text))
    source = (kit / "runner.py").read_text()
    crashes = "    model['name'] == 'first' and os.abort()\n    session, loaded"
    (kit / "runner.py").write_text(source.replace("    session, loaded", crashes, 1))
    done = run("verify", file, "--results", results(), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert [region["address"] for region in document["culprits"]] == ["last"]
    assert {region["address"]: region["status"] for region in document["regions"]} == {
        "": "off",
        "first": "not compared",
        "last": "off",
    }, "a part that crashes alone runs as a part of the whole"

    document = {"kit": {"file": "m", "digest": "0", "seed": 0}, "device": {"name": "", "provider": "P"}, "parts": {}}
    for content, message in (("{}", "is not a file of results"), (json.dumps(document), "was made from another file")):
        (kit / "results.json").write_text(content)
        done = run("verify", file, "--results", kit / "results.json")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr
