"""The cheapest methods within a bound: what a search chooses, and that the file it leads to is what was judged."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxruntime import quantization
from torch import nn

import modelexport
from commands import run
from exports import ExportedCase, Exporter
from feeds import apart, feeds_of
from modelexport.core.calls import ModuleCall
from modelexport.errors import InputsError, UsageError
from modelexport.files.recipe_files import read_recipe
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tables.profiles import ModuleProfile, profile_in_turns
from modelexport.tables.table import NodeFigures
from modelexport.tables.turns import compare_turns
from modelexport.tagged.file import read_tagged
from modelexport.tools.quantize import measured_seconds as measuring
from modelexport.tools.quantize import search_within_bound
from modelexport.tools.quantize.methods import KEEP, Method, parse_method
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.quantize_text import format_search
from modelexport.tools.quantize.ranked_steps import Candidate, rank_steps
from modelexport.tools.quantize.search_within_bound import SearchResult, search
from modelexport.tools.quantize.switched_model import find_units

LAYER = "encoder.layer.0"
INT4, INT8 = parse_method("int4"), parse_method("int8-weights")


def test_the_first_step_is_the_one_that_saves_most_for_a_byte() -> None:
    ranked = rank_steps(
        [
            [Candidate(0, 0, None), Candidate(-10, 8, INT4), Candidate(-8, 1, INT8)],
            [Candidate(0, 0, None), Candidate(-100, 4, INT4), Candidate(-99, 3.99, INT8)],
            [Candidate(0, 0, None), Candidate(5, 1, INT4)],
        ]
    )
    assert ranked.methods_after(0) == {0: INT4, 1: INT4}, (
        "a method that costs more than to keep the module is not chosen"
    )
    assert [(step.unit, step.option.method) for step in ranked.steps] == [(0, INT8), (0, None), (1, None)], (
        "a step that saves less for a byte than the one after it is left out"
    )
    gains = [step.gain for step in ranked.steps]
    assert gains == sorted(gains, reverse=True)


def test_the_fewest_steps_and_the_most() -> None:
    ranked = rank_steps([[Candidate(0, 0, None), Candidate(-10, loss, INT4)] for loss in (1, 8, 4, 2)])
    assert [step.unit for step in ranked.steps] == [1, 2, 3, 0]
    assert len(ranked.fewest_within(lambda choice: 1 not in choice and 2 not in choice)) == 2
    assert len(ranked.fewest_within(lambda choice: False)) == 4
    assert len(ranked.fewest_within(lambda choice: True)) == 0
    assert [step.unit for step in ranked.best_for(25)] == [1, 2]


def test_what_costs_too_much_is_left_out_of_a_budget() -> None:
    ranked = rank_steps(
        [[Candidate(0, 0, None), Candidate(-size, loss, INT4)] for size, loss in ((100, 9000), (10, 1))]
    )
    assert [step.unit for step in ranked.best_for(50)] == [1]


def test_a_large_module_may_be_worth_more_than_many_small_steps() -> None:
    sizes = [(100, 90), *((10, 10) for _ in range(4))]
    ranked = rank_steps([[Candidate(0, 0, None), Candidate(-size, loss, INT4)] for size, loss in sizes])
    assert [step.unit for step in ranked.best_for(100)] == [0]


@pytest.mark.slow
def test_the_judged_figure_is_that_of_the_file(exported: Exporter, tmp_path: Path) -> None:
    case = exported("bert")
    feeds = feeds_of(case, 6)
    everything = search(case.path, to=["int4"], data=feeds, within="error<=10", only=[LAYER]).found
    assert everything.met
    assert not everything.changed
    assert everything.modules > 2
    bound = everything.judged / 3
    how: dict[str, Any] = {"to": ["int4", "int8-weights"], "data": feeds, "only": [LAYER]}
    found, written = modelexport.quantize_within(case.path, tmp_path / "out.onnx", **how, within=f"error<{bound:.6f}")
    assert found.met
    assert found.judged <= bound
    assert found.changed
    assert everything.bytes_after < found.bytes_after < found.bytes_before
    floats, session = open_session(case.path, optimized=True), open_session(Path(written[""].path), optimized=True)
    output = floats.get_outputs()[0].name
    errors = [apart(run_session(floats, one)[output], run_session(session, one)[output]) for one in feeds[3:]]
    assert np.mean(errors) == pytest.approx(found.judged, rel=1e-3)
    assert written[""].bytes_after == found.bytes_after
    assert read_tagged(tmp_path / "out.onnx").coverage.untagged == 0
    recipe = read_recipe(tmp_path / "out.recipe.yaml")
    assert recipe == found.recipe
    assert recipe.error_bound == pytest.approx(bound, rel=1e-3)
    assert "on 3 inputs that were not used to choose" in recipe.notes[1]
    np.savez(tmp_path / "data.npz", **{name: np.stack([one[name] for one in feeds[3:]]) for name in feeds[0]})
    report = modelexport.verify_against(case.path, tmp_path / "out.onnx", data=tmp_path / "data.npz")
    assert report.agrees, report
    assert report.judged == ["last_hidden_state"], report
    assert report.bound == pytest.approx(bound, rel=1e-3), report
    assert report.outputs[0].norm == pytest.approx(found.judged, rel=1e-3)
    assert report.inputs.startswith("3 runs of")


def test_a_search_that_keeps_every_module_is_of_no_use(exported: Exporter) -> None:
    case = exported("bert")
    for wanted in ({"budget": 10**9}, {"within": "error<=0"}):
        found = search(case.path, to=["int4"], data=feeds_of(case, 2), only=[LAYER], **wanted).found  # type: ignore[arg-type]
        assert (found.met, found.of_use, found.bytes_after) == (True, False, found.bytes_before)
        assert "every module is kept: the file stays as it is, nothing was written" in format_search(found)


def test_a_budget_is_spent_where_it_helps_most(exported: Exporter) -> None:
    case = exported("bert")
    how: dict[str, Any] = {"to": ["int4"], "data": feeds_of(case, 4), "only": [LAYER]}
    start = search(case.path, **how, within="error<=10").found
    budget = (start.bytes_after + start.bytes_before) // 2
    found = search(case.path, **how, budget=budget).found
    assert found.met
    assert start.bytes_after < found.bytes_after <= budget
    assert found.judged < start.judged
    assert all(one.method == KEEP for one in found.changed)


def test_selectors_keep_modules_out_of_the_search(exported: Exporter) -> None:
    case = exported("bert")
    found = search(case.path, to=["int4"], data=feeds_of(case, 2), within="error<=10", keep=["encoder.layer.0"]).found
    tagged = read_tagged(case.path)
    inside = tagged.select("encoder.layer.0").inside
    kept = [selector for rule in found.recipe.rules if rule.method == KEEP for selector in rule.selectors]
    assert kept
    assert {str(call) for call in inside}.issuperset(kept)


def test_a_bound_that_is_not_met_ends_with_status_1_and_writes_nothing(exported: Exporter, tmp_path: Path) -> None:
    case, data, out = exported("blocks"), tmp_path / "data.npz", tmp_path / "out.onnx"
    feeds = feeds_of(case, 2)
    np.savez(data, **{name: np.stack([one[name] for one in feeds]) for name in feeds[0]})
    asked = ["quantize", case.path, "-o", out, "--data", data, "--only", "down.*", "--to", "int8-dynamic"]
    unmet = run(*asked, "--budget", "1kB")
    assert unmet.returncode == 1
    assert "not met: at most 1000 bytes" in unmet.stdout
    assert " bytes of weights" in unmet.stdout
    assert not out.exists()
    met = run(*asked, "--to", "int8-weights", "--within", "error<=0.5")
    assert out.exists()
    assert "on 1 input that was not used to choose" in met.stdout
    for arguments, message in (
        (["--budget", "12 parsecs"], "is not a size"),
        (["--budget", "1MB", "--within", "kl<=1"], "either a bound on the error or a number of bytes"),
        (["--to", "int4"], "several --to are for a search"),
        (["--least", "time"], "--least is what a search looks for"),
    ):
        refused = run(*asked, *arguments)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_one_run_cannot_choose_and_judge(exported: Exporter) -> None:
    case = exported("bert")
    with pytest.raises(InputsError, match="the data are one run"):
        search(case.path, to=["int4"], data=feeds_of(case, 1), within="error<=1")
    with pytest.raises(UsageError, match="give methods"):
        search(case.path, to=["keep"], data=feeds_of(case, 2), within="error<=1")


def timed(case: ExportedCase, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], whole: float) -> SearchResult:
    """A search for the fastest file where methods add these seconds, and the whole takes so many times as long."""

    def measured(
        tagged: Any, units: Any, methods: Any, ranges: Any, inputs: Any, device: str
    ) -> dict[tuple[int, Method], float]:
        return {
            (unit, method): seconds[str(method)]
            for unit in range(len(units))
            for method in methods
            if str(method) in seconds
        }

    monkeypatch.setattr(search_within_bound, "measured_seconds", measured)
    monkeypatch.setattr(
        search_within_bound, "whole_time", lambda *how: compare_turns([1000] * 9, [round(1000 * whole)] * 9)
    )
    how: dict[str, Any] = {"data": feeds_of(case, 2), "within": "error<=10", "least": "time", "only": [LAYER]}
    return search(case.path, to=["int4", "int8-weights"], **how).found


def test_the_fastest_methods_are_chosen_though_they_are_not_the_smallest(
    exported: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = timed(exported("bert"), monkeypatch, {"int8-weights": -0.1}, 0.5)
    assert found.of_use
    assert found.times is not None
    assert found.times.faster
    assert {rule.method for rule in found.recipe.rules} == {"int8-weights"}


@pytest.mark.slow
def test_what_is_not_faster_as_a_whole_is_of_no_use(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(exported("bert"), monkeypatch, {"int4": -0.1}, 1.1)
    assert found.met
    assert not found.of_use
    assert "the file stays as it is, nothing was written" in format_search(found)


def test_modules_that_no_method_makes_faster_are_kept(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(exported("bert"), monkeypatch, {}, 1)
    assert found.kept == found.modules
    assert not found.of_use
    assert found.times is None
    assert not found.recipe.rules or {rule.method for rule in found.recipe.rules} == {KEEP}


def test_nothing_is_written_that_is_not_faster(
    exported: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_within_bound, "measured_seconds", lambda *how: {})
    case = exported("bert")
    how: dict[str, Any] = {
        "to": ["int4"],
        "data": feeds_of(case, 2),
        "within": "error<=10",
        "least": "time",
        "only": [LAYER],
    }
    assert not modelexport.quantize_within(case.path, tmp_path / "out.onnx", **how).written
    assert not any(tmp_path.iterdir())


def test_a_module_has_a_method_if_its_nodes_take_less_in_spite_of_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer takes a hundredth when it is quantized, the second five times as long, the third the same."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))
    modelexport.export(model, (torch.ones(2, 64),), tmp_path / "net.onnx", check=False)
    noise = [1000 + 100 * (run % 3) for run in range(20)]

    def with_times(found: ModuleProfile, times: dict[str, float]) -> ModuleProfile:
        nodes = tuple(
            NodeFigures(path, "Gemm", (ModuleCall(path),), {"seconds": 0}, tuple(int(one * factor) for one in noise))
            for path, factor in times.items()
        )
        return replace(found, table=replace(found.table, nodes=nodes))

    def in_turns(*files: Any, **how: Any) -> tuple[ModuleProfile, ModuleProfile]:
        before, after = profile_in_turns(*files, **how)
        return with_times(before, {"0": 1, "2": 1, "4": 1}), with_times(after, {"0": 0.01, "2": 5, "4": 1})

    monkeypatch.setattr(measuring, "profile_in_turns", in_turns)
    tagged = prepared(read_tagged(tmp_path / "net.onnx"))
    units = find_units(tagged, [INT4])
    saved = measuring.measured_seconds(tagged, units, [INT4], None, {"input": np.ones((2, 64), np.float32)}, "cpu")
    assert [units[unit].calls for unit, _ in saved] == [("0",)]
    assert saved[0, INT4] == pytest.approx(-0.99 * 1100e-9, rel=0.01)


def test_the_model_whose_time_is_measured_stays_as_it_is(exported: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    tagged = read_tagged(exported("bert").path)
    before = ir.to_proto(tagged.model)
    monkeypatch.setattr(measuring, "time_in_turns", lambda *how, **more: compare_turns([9] * 9, [1] * 9))
    measuring.whole_time(tagged, tagged.model, {}, "cpu")
    assert ir.to_proto(tagged.model) == before


def test_ranges_are_measured_once_for_the_choice_the_times_and_the_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    modelexport.export(model, (torch.ones(2, 64),), tmp_path / "net.onnx", check=False)
    measured = Mock(side_effect=quantization.create_calibrator)
    monkeypatch.setattr(quantization, "create_calibrator", measured)
    feeds = [{"input": np.full((2, 64), number, np.float32)} for number in (1, 2)]
    search(tmp_path / "net.onnx", to=["int8-static"], data=feeds, within="error<=10", least="time")
    assert measured.call_count == 1


@pytest.mark.slow
def test_nothing_is_written_beside_the_model_that_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    modelexport.export(model, (torch.ones(2, 64),), tmp_path / "net.onnx", check=False)
    made, make = list[Path](), tempfile.mkdtemp

    def recorded(*how: Any, **more: Any) -> str:
        made.append(Path(folder := make(*how, **more)))
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", recorded)
    feeds = [{"input": np.full((2, 64), number, np.float32)} for number in (1, 2)]
    found = search(tmp_path / "net.onnx", to=["int8-static"], data=feeds, within="error<=10")
    measuring.whole_time(found.tagged, found.made.model, feeds[0], "cpu")
    assert tmp_path not in {folder.parent for folder in made}


def test_a_size_and_the_least_time_are_not_asked_for_together(exported: Exporter) -> None:
    case = exported("bert")
    with pytest.raises(UsageError, match="--budget is for the fewest bytes"):
        search(case.path, to=["int4"], data=feeds_of(case, 2), budget=1, least="time")
