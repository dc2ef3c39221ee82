"""``--device``: devices by name, what is wrong on one, and what becomes of one that crashes or hangs."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch

from commands import run
from exports import Shared
from graph_texts import written
from modelexport import export, load, quantize, verify_on_device
from modelexport.core.calls import ModuleCall
from modelexport.errors import OutputError, UsageError
from modelexport.graph.node_owners import owner_of
from modelexport.runtime import runner_process
from modelexport.runtime.devices import Device, find_device, find_devices
from modelexport.runtime.runner import output_error
from modelexport.runtime.runner_process import RunnerResult, inputs_with_dynamic_axes, with_fixed_sizes
from modelexport.tools.devices import device_regions
from modelexport.tools.devices.device_check import check
from modelexport.tools.devices.device_regions import ReferenceRegion, RegionCutter
from modelexport.tools.devices.device_report import DeviceReport
from modelexport.tools.devices.device_text import format_device
from modelexport.tools.devices.found_changes import find_changes
from modelexport.tools.devices.judged_regions import RegionRuns, judge
from modelexport.tools.devices.wrong_regions import smallest_region
from spoiled_device import SpoiledDevice, Spoils, is_fused, is_operator

UINT8 = ir.DataType.UINT8


class Block(torch.nn.Module):
    """A sum that is normalized, a gate, and a product that no module inside it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x + x.roll(1, 1))
        return torch.softmax(x @ y.transpose(1, 2), -1) @ torch.tanh(self.gate(y))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(2)), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return torch.sigmoid(self.head(x))


@pytest.fixture
def file(shared: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small file; results of this test are kept in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(folder: Path) -> object:
        torch.manual_seed(0)
        return export(Model(), {"x": torch.randn(1, 5, 8)}, folder / "model.onnx", check=False)

    return shared("device-file", make) / "model.onnx"


def checked(file: Path, device: SpoiledDevice) -> DeviceReport:
    """The file on a device that is wrong by design."""
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)}
    return check(RegionCutter(load(file), feeds), device)


def test_a_device_that_is_right_runs_the_whole_and_nothing_else(file: Path) -> None:
    report = checked(file, SpoiledDevice(is_operator("Erf")))
    assert report.agrees
    assert [region.address for region in report.regions] == [""]
    assert report.measured == 1


def test_the_smallest_wrong_modules_are_named_and_no_other(file: Path) -> None:
    report = checked(file, SpoiledDevice(is_operator("LayerNormalization")))
    assert not report.agrees
    assert [region.address for region in report.culprits] == ["blocks.0.norm", "blocks.1.norm"]
    assert {region.address for region in report.regions if region.status == "agree"} >= {"blocks.0.gate", "head"}


def test_an_operator_of_a_module_itself_is_named_as_a_region(file: Path) -> None:
    report = checked(file, SpoiledDevice(is_operator("Softmax"), by=1.5))
    assert [(region.address, region.operators) for region in report.culprits] == [
        ("blocks.0", ["Softmax"]),
        ("blocks.1", ["Softmax"]),
    ]


def test_nodes_that_are_right_alone_and_wrong_together_are_the_smallest_region(file: Path) -> None:
    report = checked(file, SpoiledDevice(is_fused("Add", "LayerNormalization")))
    assert [region.operators for region in report.culprits] == [["Add", "LayerNormalization"]] * 2
    norms = [region for region in report.regions if region.address.endswith("norm")]
    assert [region.status for region in norms] == ["agree", "agree"]


class NotingDevice(SpoiledDevice):
    """Notes the names and nodes of the regions that it runs."""

    def __init__(self, spoils: Spoils) -> None:
        super().__init__(spoils)
        self.regions: list[tuple[str, tuple[ir.Node, ...]]] = []

    def run(self, region: ReferenceRegion, *, log: bool = False) -> RunnerResult:
        self.regions.append((region.name, region.nodes))
        return super().run(region, log=log)


@pytest.mark.parametrize("spoils", [is_operator("Softmax"), is_fused("Add", "LayerNormalization")])
def test_no_region_runs_twice_while_the_smallest_is_looked_for(file: Path, spoils: Spoils) -> None:
    device = NotingDevice(spoils)
    assert checked(file, device).culprits
    assert len(device.regions) == len(set(device.regions))


def test_what_a_type_costs_on_the_processor_is_not_blamed_on_the_device(file: Path) -> None:
    region = RegionCutter(load(file), {"x": np.ones((1, 5, 8), np.float32)}).whole()
    half, narrow = find_device("cpu"), msgspec.structs.replace(find_device("cpu"), computes="float16")
    on_cpu, in_half = region.errors_on_cpu(), region.cost_of_half()
    assert on_cpu < 1e-6
    assert 1e-5 < in_half < 1e-2

    def status(error: float, device: Device) -> str:
        return judge(region, RunnerResult(status="ran", errors={"y": error}), device, bound=0.0)[0]

    assert [status(1.5 * on_cpu, device) for device in (half, narrow)] == ["agree", "agree"]
    assert [status(1.5 * in_half, device) for device in (half, narrow)] == ["off", "rounding"]
    assert [status(3 * in_half, device) for device in (half, narrow)] == ["off", "off"]


@pytest.mark.parametrize("fuses", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_change_that_makes_a_region_right_is_tried_and_written(file: Path, tmp_path: Path, fuses: bool) -> None:
    """Nodes that are fused are kept apart; an operator that is wrong is replaced by its definition."""
    spoils = is_fused("Add", "LayerNormalization") if fuses else is_operator("LayerNormalization")
    device, tagged = SpoiledDevice(spoils), load(file)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)}
    report = check(regions := RegionCutter(tagged, feeds), device)
    fix = find_changes(regions, report, tmp_path / "fixed.onnx", device)
    assert (fix.agrees, fix.unchanged) == (True, [])
    assert {step.change for step in fix.steps} == ({"apart"} if fuses else {"definition"})
    fixed = load(tmp_path / "fixed.onnx")
    assert check(RegionCutter(fixed, feeds), device).agrees
    assert not fixed.coverage.untagged
    assert {str(owner_of(node).call) for node in fixed.nodes} == {str(owner_of(node).call) for node in tagged.nodes}


def test_the_right_values_of_a_file_are_computed_once_for_all_changes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_regions, "FileRun", ran := Mock(side_effect=device_regions.FileRun))
    device, feeds = SpoiledDevice(is_fused("Add", "LayerNormalization")), {"x": np.ones((1, 5, 8), np.float32)}
    regions = RegionCutter(load(file), feeds)
    find_changes(regions, check(regions, device), tmp_path / "fixed.onnx", device)
    assert [call.args[0] for call in ran.call_args_list].count(regions.tagged.model) == 1


@pytest.mark.slow
def test_what_a_type_costs_is_regained_by_more_precise_types(file: Path, tmp_path: Path) -> None:
    """A device that computes in float16 loses a little with each 8-bit number; with 16 bits it does not."""
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)}
    quantize(file, tmp_path / "int8.onnx", to="int8-static:weights=int8", data=[feeds])
    device = SpoiledDevice(lambda node: node.op_type == "DequantizeLinear" and node.inputs[0].dtype == UINT8, by=1.0001)
    device.device = msgspec.structs.replace(device.device, computes="float16")
    tagged = load(tmp_path / "int8.onnx")
    report = check(regions := RegionCutter(tagged, feeds), device, bound=1e-5)
    assert (report.whole.status, report.culprits) == ("rounding", [])
    fix = find_changes(regions, report, tmp_path / "fixed.onnx", device)
    assert fix.agrees
    assert {step.change for step in fix.steps} == {"int16"}
    assert fix.moved > 1e-4, "it is nearer to the unquantized file"
    quantize(tmp_path / "int8.onnx", tmp_path / "again.onnx", recipe=fix.recipe)
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "fixed.onnx").read_bytes()


def test_an_operator_that_falls_back_is_tried_in_other_ways(file: Path) -> None:
    report = checked(file, SpoiledDevice(is_operator("Erf"), lacks=["LayerNormalization"]))
    (fallback,) = report.fallbacks
    assert (fallback.operator, len(fallback.nodes), fallback.calls) == (
        "LayerNormalization", 2, ["blocks.0.norm", "blocks.1.norm"],
    )  # fmt: skip
    assert fallback.example.endswith("FLOAT[1,5,8], FLOAT[8], FLOAT[8] -> FLOAT[1,5,8]")
    assert [change.change for change in fallback.tried if change.helps] == ["definition"]
    (fallback,) = checked(file, SpoiledDevice(is_operator("Erf"), lacks=["LayerNormalization", "Sqrt"])).fallbacks
    assert {change.change: change.result for change in fallback.tried} == {"definition": "not there either"}


def test_a_region_is_found_by_halving() -> None:
    looked: list[int] = []

    def is_wrong(some: object) -> bool:
        looked.append(1)
        return {40, 43} <= set(some)  # type: ignore[call-overload]

    assert smallest_region(range(90), is_wrong) == [40, 43]
    assert len(looked) < 20


RUNNER = """
import os, sys, time
from modelexport.runtime import runner

def run_model(folder, model, device, real=runner.run_model):
    if model["name"] == "blocks.0":
        os.abort()
    if model["name"] == "blocks.1":
        time.sleep(60)
    return real(folder, model, device)

runner.run_model = run_model
runner.serve()
"""


def test_a_device_that_crashes_or_hangs_does_so_for_one_part(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runner.py").write_text(RUNNER)
    tagged = load(file)
    regions = RegionCutter(tagged, {"x": np.ones((1, 5, 8), np.float32)})
    with RegionRuns(find_device("cpu"), limit=60, keep=True) as runs:
        assert runs.run(regions.whole()).error < 1e-5
    monkeypatch.setattr(runner_process.runner, "__file__", str(tmp_path / "runner.py"))
    with RegionRuns(find_device("cpu"), limit=60, keep=True) as runs:
        parts = {name: regions.of_call(tagged.find(name)) for name in ("blocks.0.norm", "blocks.0", "head", "blocks.1")}
        assert runs.run(regions.whole()).status == "ran"
        assert runs.measured == 0, "the result of the first run was kept"
        assert runs.run(parts["blocks.0.norm"]).status == "ran"
        crashed = runs.run(parts["blocks.0"])
        assert (crashed.status, crashed.message) == ("crashed", "the process ended with signal 6")
        assert runs.run(parts["head"]).error < 1e-5
        runs.limit = 0.5
        assert runs.run(parts["blocks.1"]).status == "hung"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("openvin", "there is no device 'openvin'; did you mean openvino"),
        ("NoneExecutionProvider", "there is no device 'NoneExecutionProvider'"),
        ("openvino", "the device openvino needs the package onnxruntime-openvino: pip install onnxruntime-openvino"),
        ("nnapi", "needs the package onnxruntime-android"),
        ("cpu,threads=2", "the device cpu has no option 'threads'"),
        ("cpu,", "'' in the device 'cpu,' is not an option"),
        ("cpu,threads", "'threads' in the device 'cpu,threads' is not an option: write NAME,option=value"),
    ],
)
def test_what_is_wrong_with_a_device_is_one_line(file: Path, device: str, message: str) -> None:
    if device in {found.name for found in find_devices()}:
        pytest.skip("this machine has it")
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        verify_on_device(file, device=device)
    done = run("verify", file, "--device", device)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_error_that_no_number_of_float64_is_cannot_be_compared() -> None:
    with np.errstate(over="ignore"):
        assert output_error(np.ones(2), np.array([1, 1e200])) is None


def test_right_values_of_a_file_in_half_precision_are_exact(tmp_path: Path) -> None:
    text = "g (float16[1] x, float16[1] large) => (float16[1] y) { sum = Add(x, large) y = Sub(sum, large) }"
    inputs = {"x": np.ones(1, np.float16), "large": np.full(1, 2048, np.float16)}
    region = RegionCutter(load(written(tmp_path / "half.onnx", text)), inputs).whole()
    assert region.outputs["y"].tolist() == [1]


def test_a_device_without_an_answer_for_a_region_is_not_passed_over(file: Path) -> None:
    class Garbled(SpoiledDevice):
        def run(self, region: ReferenceRegion, *, log: bool = False) -> RunnerResult:
            if region.name != ".":
                raise UsageError("answered nonsense")
            return super().run(region, log=log)

    feeds = {"x": np.ones((1, 5, 8), np.float32)}
    with pytest.raises(UsageError, match="answered nonsense"):
        check(RegionCutter(load(file), feeds), Garbled(is_operator("Erf")), modules=[ModuleCall("head")])


def test_dynamic_axes_have_the_sizes_of_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # nothing can be kept there, and no command needs it
    file = written(tmp_path / "model.onnx", "g (float[n,m] x) => (float[n,m] y) { y = Exp(x) }")
    inputs = {"x": np.ones((3, 6), np.float32)}
    region = RegionCutter(load(file), inputs).whole()
    assert inputs_with_dynamic_axes(region.model, inputs) == ["x"]
    assert [list(value.shape or ()) for value in with_fixed_sizes(region.model, inputs).graph.inputs] == [[3, 6]]
    report = verify_on_device(file, device="cpu", inputs=inputs)
    assert report.agrees
    told = "dynamic axes had the sizes of the inputs, as devices that compile need: x [3, 6]"
    assert told in report.notes


def test_devices_lists_what_this_machine_has() -> None:
    listed = json.loads(run("devices", "--json").stdout)["devices"]
    assert ("cpu", "CPUExecutionProvider", "") in [(one["name"], one["provider"], one["unavailable"]) for one in listed]
    assert "cpu" in run("devices").stdout


def test_the_command_shows_where_the_file_runs_and_what_it_is_off_by(file: Path) -> None:
    right = run("verify", file, "--device", "cpu")
    assert right.returncode == 0
    assert "agree: on cpu the file is off by" in right.stdout
    document = json.loads(run("verify", file, "--device", "cpu", "--json").stdout)
    assert (document["verdict"], document["regions"][0]["status"]) == ("agree", "agree")
    quantizes = "quantize", file, "-o", file.with_name("int8.onnx"), "--to", "int8-dynamic"
    for wrong, message in (
        (("verify", file, "--bound", "0.1"), "--bound goes with"),
        (("verify", file, "--device", "cpu", "--bound", "-1"), "-1 is not a bound"),
        (("verify", file, "--device", "cpu", "--limit", "0"), "0 is not a limit"),
        (("verify", file, "--limit", "300"), "--limit and --fresh are for FILE alone on a device"),
        (("verify", file, "--steps", "4"), "--new-tokens and --steps go with a folder"),
        (("values", file, "--through", "'"), "No closing quotation"),
        (("values", file, "--through", "''"), "--through is empty"),
        (("verify", file, "--limit", "3", "--fresh"), "--limit and --fresh are for FILE alone on a device"),
        (("verify", file, "--against", file, "--limit", "3"), "--limit and --fresh are for FILE alone on a device"),
        ((*quantizes, "--device", "cpu"), "--metric, --compare, --device, --through, --jobs are for a search"),
    ):
        refused = run(*wrong)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert message in refused.stderr
    root = run("verify", file, "--device", "cpu", "--csv").stdout.splitlines()
    row = dict(zip(root[0].split(","), root[1].split(","), strict=True))
    placed = [count for providers in document["placed"].values() for count in providers.values()]
    assert int(row["total.on_device"]) == sum(placed) > 0
    assert int(row["total.off_device"]) == 0


def test_a_file_agrees_only_if_all_of_its_outputs_were_compared(tmp_path: Path) -> None:
    text = """g (float[2] x) => (float[2] y, seq(float[2]) z)
        { ["/a/Relu"] y = Relu(x) ["/b/SequenceConstruct"] z = SequenceConstruct(x, y) }"""
    report = verify_on_device(written(tmp_path / "both.onnx", text), device="cpu", keep=False)
    assert (report.whole.status, report.agrees) == ("not compared", False)
    assert report.whole.reason.startswith("an output is a sequence or empty, or its right numbers are not finite")
    assert format_device(report).splitlines()[-1].startswith("not compared: on cpu")
    alone = text.replace("float[2] y, ", "")
    report = verify_on_device(written(tmp_path / "alone.onnx", alone), device="cpu", keep=False)
    assert report.whole.status == "not compared"
    never = "g (float[2] x) => (float[2] y) { z = Abs(x) n = Neg(z) y = Log(n) }"
    assert verify_on_device(written(tmp_path / "never.onnx", never), device="cpu", keep=False).verdict == "not compared"


@pytest.mark.parametrize(("other", "status"), [("", "not compared"), (", float[2] z", "agree")])
def test_outputs_without_elements_are_no_evidence_for_a_device(tmp_path: Path, other: str, status: str) -> None:
    text = f"g (float[0] x, float[2] w) => (float[0] y{other}) {{ y = Relu(x) {'z = Neg(w)' if other else ''} }}"
    assert verify_on_device(written(tmp_path / "x.onnx", text), device="cpu", keep=False).whole.status == status


def test_a_recipe_that_is_not_ours_is_refused_before_the_device_is_tried(file: Path, tmp_path: Path) -> None:
    (tmp_path / "fixed.recipe.yaml").write_text("rules: []\n")
    with pytest.raises(OutputError, match=r"fixed\.recipe\.yaml exists and was not written by modelexport"):
        verify_on_device(file, device="cpu", fix=tmp_path / "fixed.onnx")
