"""Reports: what counts as agreement, what a runtime does to a sound file, chosen modules, samples and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from exports import Exporter
from modelexport import export, export_package, verify, verify_package, verify_reference
from modelexport.core.text import shortened
from modelexport.errors import FileFormatError, InputsError, UsageError
from modelexport.packages.part_reports import PartReports
from modelexport.packages.stage_runs import StagesReport
from modelexport.runtime.devices import CPU
from modelexport.tagged.file import read_tagged
from modelexport.tools.generate.verify_by_generation import GenerationReport, GenerationRun
from modelexport.tools.pipelines.verify_by_pipeline import PipelineReport
from modelexport.traces import runtime_causes
from modelexport.traces.array_differences import Difference, Verdict
from modelexport.verify import onnxruntime_outputs
from modelexport.verify.model_and_file import ModelRuns
from modelexport.verify.sampled_calls import verify_sample
from modelexport.verify.verify_report import (
    CallStatus,
    CallVerdict,
    FalseClaim,
    OtherInputs,
    ParameterReport,
    VerifyReport,
)

MISSED = ParameterReport(used=1, transformed=0, unaccounted=["w"], differing=[])
PARAMETERS = ParameterReport(used=1, transformed=0, unaccounted=[], differing=[])


def output(status: Verdict) -> Difference:
    return Difference(name="y", status=status)


def call(status: CallStatus, position: int | None = None, address: str = "a") -> CallVerdict:
    return CallVerdict(address=address, tag="/M", status=status, position=position)


def claim(document: str) -> FalseClaim:
    return FalseClaim(document=document, where="a", claimed="1", found="2")


def report(**parts: Any) -> VerifyReport:
    return VerifyReport(**{"outputs": [], "calls": [], "provider": "", "parameters": PARAMETERS, **parts})


@pytest.mark.parametrize(("found", "verdict"), [(np.nan, "agree"), (2.0, "agree"), (5.0, "differ")])
def test_where_the_model_returns_nan_by_its_type_a_file_returns_it_or_the_exact_number(
    exported: Exporter, found: float, verdict: Verdict
) -> None:
    arrays = [np.array([1, value], np.float32) for value in (np.nan, found)]
    case, exact = exported("blocks"), np.array([1.0, 2.0])
    feeds = {name: tensor.numpy() for name, tensor in case.case.inputs().items()}
    tagged = read_tagged(case.path)
    compared = onnxruntime_outputs.compare_as_run(
        tagged, feeds, [arrays[0]], [exact], ran={"y": arrays[1]}, provider=CPU
    )
    assert compared.outputs[0].status == verdict


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ({}, "not compared"),
        ({"calls": [call("not compared"), call("no nodes")]}, "not compared"),
        ({"outputs": [output("agree")]}, "agree"),
        ({"outputs": [output("tie")]}, "agree"),
        ({"outputs": [output("agree")], "calls": [call("differ")]}, "differ"),
        ({"outputs": [output("agree")], "others": [OtherInputs(what="one row", status="differ")]}, "differ"),
        ({"outputs": [output("agree")], "parameters": MISSED}, "differ"),
        ({"outputs": [output("agree")], "claims": [claim("metadata")]}, "differ"),
        ({"outputs": [output("agree")], "claims": [claim("hierarchy")]}, "agree"),
        ({"outputs": [output("agree")], "calls": [call("no nodes")], "selected": True}, "not compared"),
        ({"outputs": [output("agree")], "calls": [call("agree")], "selected": True}, "agree"),
    ],
)  # fmt: skip
def test_the_verdict_is_that_of_the_worst_part(parts: dict[str, Any], verdict: str) -> None:
    assert report(**parts).verdict == verdict
    assert report(**parts).agrees is (verdict == "agree")


def test_the_diverging_call_is_the_one_with_the_first_node_in_the_graph() -> None:
    calls = [call("differ", address="a"), call("differ", 7, "b"), call("differ", 3, "c"), call("agree", 1, "d")]
    assert report(calls=calls).diverging == calls[2]
    assert report(calls=calls[:1]).diverging == calls[0]
    assert report(calls=calls[3:]).diverging is None


def test_an_optimizer_that_makes_outputs_wrong_is_named(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: sessions with the optimizer give other numbers."""
    one, run = exported("blocks"), onnxruntime_outputs.run_session
    given = onnxruntime_outputs.open_session

    def opened(path: Any, **options: Any) -> Any:
        session = given(path, **options)
        return (session, bool(options.get("optimized")))

    def ran(pair: Any, inputs: Any) -> Any:
        session, wrong = pair
        return {name: array * np.float32(1.1 if wrong else 1) for name, array in run(session, inputs).items()}

    for module in (onnxruntime_outputs, runtime_causes):
        monkeypatch.setattr(module, "open_session", opened)
        monkeypatch.setattr(module, "run_session", ran)
    monkeypatch.setattr(runtime_causes, "blamed_optimizer", lambda path, inputs, agrees, provider: "SomeFusion")
    found = verify(one.case.build(), one.case.inputs(), one.path)
    assert found.verdict == "differ"
    assert found.cause == "ONNX Runtime's optimizer SomeFusion"
    assert {one.status for one in found.outputs} == {"differ"}
    assert "differ" not in {one.status for one in found.calls}


def test_only_chosen_modules_and_those_inside_are_shown(exported: Exporter) -> None:
    one = exported("blocks")
    found = verify(one.case.build(), one.case.inputs(), one.path, modules=["down.1"])
    assert [call.address for call in found.calls] == ["down.1", "down.1.linear", "down.1.norm"]
    with pytest.raises(UsageError, match=r"has no module call 'down\.7'"):
        verify(one.case.build(), one.case.inputs(), one.path, modules=["down.7"])


def test_some_calls_are_compared_alone(exported: Exporter) -> None:
    one = exported("bert")
    found = verify_sample(one.case.build(), one.case.inputs(), one.path, count=5)
    assert found.agrees
    assert sum(call.status == "agree" for call in found.calls) >= 3
    assert found.outputs == []
    assert verify_sample(one.case.build(), one.case.inputs(), one.path).verdict == "not compared"


def test_kept_runs_give_the_same_report(exported: Exporter) -> None:
    one = exported("blocks")
    runs = ModelRuns(one.case.build())
    first, second = (verify(runs.model, one.case.inputs(), one.path, runs=runs) for _ in range(2))
    assert first == second


def test_the_model_is_left_as_it_was(exported: Exporter) -> None:
    one = exported("blocks")
    model = one.case.build().train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert verify(model, one.case.inputs(), one.path).agrees
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(tensor.dtype is before[key].dtype for key, tensor in model.state_dict().items())


def test_reference_values_give_the_verdict_that_the_model_gives(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).eval(), torch.randn(2, 8)
    export(model, {"input": x}, tmp_path / "x.onnx", reference=True, check=False)
    by_model, by_values = verify(model, {"input": x}, tmp_path / "x.onnx"), verify_reference(tmp_path / "x.onnx")
    assert by_values.agrees
    assert [(one.address, one.status) for one in by_values.calls] == [
        (one.address, one.status) for one in by_model.calls
    ]


def test_a_model_that_is_not_the_exported_one_is_refused(exported: Exporter) -> None:
    one = exported("blocks")
    with pytest.raises((UsageError, FileFormatError)):
        verify(nn.Linear(8, 8), {"input": torch.randn(2, 8)}, one.path)


def test_inputs_that_do_not_fit_are_refused(exported: Exporter) -> None:
    one = exported("bert")
    with pytest.raises(InputsError, match="the file takes 2 inputs"):
        verify(one.case.build(), {"input_ids": one.case.inputs()["input_ids"]}, one.path)
    with pytest.raises(UsageError, match=r"\[2, 8\], and not \[2, 5\]"):
        verify(one.case.build(), {name: tensor[:, :5] for name, tensor in one.case.inputs().items()}, one.path)


def test_nothing_compared_is_not_agreement(tmp_path: Path) -> None:
    assert not PartReports({}).agrees
    assert not StagesReport([]).agrees
    assert not GenerationReport(runs=[], parameters=PARAMETERS).agrees
    assert not GenerationRun(name="prompt 0", prompts=[3], steps=0, tokens=[[]]).agrees
    assert not PipelineReport(calls=[], results=[], parameters=PARAMETERS).agrees
    model, inputs = nn.Linear(3, 2).eval(), {"input": torch.randn(2, 3)}
    export_package(model, tmp_path / "package", inputs=inputs)
    manifest = tmp_path / "package" / "modelexport.json"
    content = json.loads(manifest.read_text())
    content["parts"][0]["name"] = "network"
    manifest.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="has the part network, and the model gives model: give the model"):
        verify_package(nn.Linear(3, 2).eval(), inputs, tmp_path / "package")


def test_a_reason_that_does_not_fit_keeps_its_beginning() -> None:
    assert shortened("a reason, " + "without commas " * 20, 60).startswith("a reason, without commas without")
    long = "layer, which has no end " * 20
    assert shortened(long, 60) == "layer, which has no end layer, which has no end layer, ..."
    assert shortened("a, " * 40, 20) == "a, a, a, a, a, ..."
    assert shortened("short", 60) == "short"


def test_the_first_call_of_other_weights_is_the_first_that_differs_and_says_why(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).eval()
    inputs = (torch.rand(2, 4),)
    export(model, inputs, tmp_path / "x.onnx", check=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    found = verify(model, inputs, tmp_path / "x.onnx")
    first = found.diverging
    assert first is not None
    assert (first.address, first.position) == ("0", 0)
    assert all(call.reason for call in found.calls if call.status == "differ")
