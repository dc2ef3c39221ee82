"""Packages measured part by part: a prompt and a step apart, in order, with what earlier parts give."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from test_packages import ENCODER_DECODERS, llama  # noqa: F401

from browser import MISSING, browser
from commands import run
from exports import Exporter
from modelexport import export_package
from modelexport.cli.show_package import format_package
from modelexport.errors import InputsError, UsageError
from modelexport.packages import measured_parts
from modelexport.packages.measured_parts import cost_parts, profile_parts, time_parts_in_turns
from modelexport.packages.package_export import PackageResult
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.tagged.package import read_package
from modelexport.tools.cut.splitting import split

BATCH, PROMPT = 2, 16


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> PackageResult:
    """A package of a small T5."""
    return export_package(ENCODER_DECODERS["t5"]().eval(), tmp_path_factory.mktemp("t5") / "out")


@pytest.fixture(scope="module")
def pair(written: PackageResult) -> Path:
    return written.folder


@pytest.fixture(scope="module")
def stages(exported: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "out"
    split(read_tagged(exported("blocks").path), folder, stages=2)
    return folder


@pytest.mark.slow
def test_an_export_names_what_each_part_takes_and_returns_and_the_next_command(written: PackageResult) -> None:
    lines = format_package(written, "google/t5").splitlines()
    encoder = lines.index("encoder:")
    assert lines[encoder + 1].startswith("  in   input_ids int64[batch, ")
    assert lines[encoder + 2].startswith("  out  encoder_hidden_states float32[batch, ")
    out = written.folder
    report = f"modelexport report {out} -o {out}/report.html"
    assert lines[-1] == f"next: modelexport verify {out} --model google/t5; {report}"


def test_one_graph_for_prompts_and_steps_has_a_table_for_each(llama: tuple[Path, Path]) -> None:  # noqa: F811
    tables = cost_parts(llama[1], {"batch": BATCH, "sequence": PROMPT})
    assert list(tables) == ["prefill", "decode"]
    macs = {name: table.whole["macs"] for name, table in tables.items()}
    heads, width, attended = 4, 8, BATCH * PROMPT * PROMPT
    linear = sum(
        row.own["macs"] for row in tables["prefill"].rows() if row.class_name == "Linear"
    )  # queries times keys, and weights times values
    assert macs["prefill"] == linear + 2 * heads * attended * width
    # One token for each row, which looks at the prompt and at itself.
    assert macs["decode"] == linear // PROMPT + 2 * heads * BATCH * (PROMPT + 1) * width
    assert not any(table.notes for table in tables.values())


def test_a_step_runs_with_the_cache_that_a_prompt_leaves(llama: tuple[Path, Path]) -> None:  # noqa: F811
    found = profile_parts(llama[1], sizes={"batch": BATCH, "sequence": PROMPT}, runs=2, warmup=1)
    assert list(found) == ["prefill", "decode"]
    shapes = {name: one.facts.inputs for name, one in found.items()}
    assert shapes["prefill"]["input_ids"] == "int64[2, 16]"
    assert shapes["prefill"]["past_key_values.0.key"] == "float32[2, 2, 0, 8]"
    assert shapes["decode"]["input_ids"] == "int64[2, 1]"
    assert shapes["decode"]["past_key_values.0.key"] == "float32[2, 2, 16, 8]"
    file = next(iter(read_package(llama[1]).files.values()))
    made = run_session(open_session(file), found["prefill"].feeds)
    assert found["decode"].feeds["past_key_values.0.key"] == pytest.approx(made["present.0.key"], abs=1e-5)
    assert all(one.facts.attributed >= 0.99 for one in found.values())
    longer = profile_parts(llama[1], sizes={"sequence": 4, "past_sequence": 50}, runs=1, warmup=1)
    assert longer["prefill"].facts.inputs["input_ids"] == "int64[1, 4]"
    assert longer["decode"].facts.inputs["past_key_values.0.key"] == "float32[1, 2, 50, 8]"


def test_the_uses_of_two_packages_run_in_turns(llama: tuple[Path, Path], stages: Path) -> None:  # noqa: F811
    found = profile_parts(llama[1], sizes={"sequence": 4}, runs=2, warmup=1, against=llama[1])
    assert list(found) == ["prefill", "decode"]
    for part in found.values():
        assert part.against is not None
        assert part.against.inputs == part.facts.inputs
        assert part.turns is not None
        assert part.turns.turns == 2
    assert list(time_parts_in_turns(stages, stages)) == ["stage_0", "stage_1"]


@pytest.mark.slow
def test_encoder_prefill_and_decode_are_apart(pair: Path) -> None:
    tables = cost_parts(pair, {"batch": 1, "encoder_sequence": 20, "sequence": 1})
    assert list(tables) == ["encoder", "prefill", "decode"]
    assert all(table.whole["macs"] > 0 for table in tables.values())
    found = profile_parts(pair, sizes={"encoder_sequence": 20}, runs=1, warmup=1)
    assert found["prefill"].facts.inputs["past_key_values.0.decoder.key"] == "float32[1, 4, 0, 8]"
    assert found["prefill"].facts.inputs["past_key_values.0.encoder.key"] == "float32[1, 4, 20, 8]"
    assert found["decode"].facts.inputs["past_key_values.0.encoder.key"] == "float32[1, 4, 20, 8]"
    assert all(one.facts.attributed >= 0.99 for one in found.values())


def test_a_stage_gets_what_the_stage_before_it_gives(stages: Path) -> None:
    with pytest.raises(InputsError, match="has no input typo"):
        profile_parts(stages, {"typo": np.ones(2)}, runs=1, warmup=1)
    found = profile_parts(stages, runs=1, warmup=1)
    assert list(found) == ["stage_0", "stage_1"]
    first, second = read_package(stages).manifest.parts
    made = run_session(open_session(stages / first.file), found["stage_0"].feeds)
    for name in set(first.outputs) & set(second.inputs):
        assert found["stage_1"].feeds[name] == pytest.approx(made[name], abs=1e-5)
    assert "of parts before it" in found["stage_1"].facts.inputs_from


def test_the_commands_take_a_folder(llama: tuple[Path, Path], stages: Path, tmp_path: Path) -> None:  # noqa: F811
    package = llama[1]
    sizes = ["--size", "sequence=8", "--size", "batch=1"]
    done = run("cost", package, *sizes, "--node-data", "n.json", "--json", cwd=tmp_path)
    assert list(json.loads(done.stdout)["parts"]) == ["prefill", "decode"]
    assert {path.name for path in tmp_path.iterdir()} == {"n.prefill.json", "n.decode.json"}
    listed = run("profile", stages, "--runs", "1", "--csv", "--html", "p.html", cwd=tmp_path).stdout
    assert {row["part"] for row in csv.DictReader(listed.splitlines())} == {"stage_0", "stage_1"}
    wrong = run("cost", package, "--size", "sequences=1", cwd=tmp_path).stderr
    assert "have no dynamic axis 'sequences'; did you mean sequence" in wrong
    assert "did you mean model.layers.0" in run("cost", package, "model.layer.0", cwd=tmp_path).stderr


def test_other_parts_are_refused(llama: tuple[Path, Path], stages: Path) -> None:  # noqa: F811
    with pytest.raises(UsageError, match="has stage_0, stage_1, and "):
        profile_parts(llama[1], runs=1, warmup=1, against=stages)


def test_an_input_that_another_file_lost_is_not_given_to_it(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["": 17]> g'
    for name, inputs in (("a", "float[n,4] x, int64[n] ids"), ("b", "float[n,4] x")):
        model = onnx.parser.parse_model(f"{header} ({inputs}) => (float[n,4] y) {{ y = Relu (x) }}")
        onnx.save(model, tmp_path / f"{name}.onnx")
    how: dict[str, Any] = {"sizes": {"n": 2}, "runs": 1, "warmup": 1}
    (found,) = profile_parts(tmp_path / "a.onnx", **how, against=tmp_path / "b.onnx").values()
    assert found.against is not None
    assert found.against.inputs == {"x": "float32[2, 4]"}
    with pytest.raises(InputsError, match="ids missing; the model takes"):
        profile_parts(tmp_path / "b.onnx", **how, against=tmp_path / "a.onnx")


@pytest.fixture
def two_files(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "any.onnx", tmp_path / "three.onnx"]
    for file, rows in zip(files, ("n", "3"), strict=True):
        text = (
            f'<ir_version: 8, opset_import: ["": 17]> g (float[{rows},4] x) => (float[{rows},4] y) {{ y = Relu (x) }}'
        )
        onnx.save(onnx.parser.parse_model(text), file)
    return files


def test_two_files_run_with_the_size_that_one_of_them_fixes(two_files: list[Path]) -> None:
    (found,) = profile_parts(two_files[0], runs=1, warmup=1, against=two_files[1]).values()
    assert found.facts.inputs == {"x": "float32[3, 4]"}


def test_each_of_two_files_is_read_once(two_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Path]()
    monkeypatch.setattr(measured_parts, "read_tagged", lambda file: read.append(file) or read_tagged(file))
    time_parts_in_turns(*two_files)
    assert read == two_files


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_page_of_a_package_lets_its_reader_choose_a_part(llama: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    from modelexport.tools.figures.report_page import write_report_page

    write_report_page(llama[1], tmp_path / "r.html")
    with browser() as window:
        window.open(tmp_path / "r.html")
        assert window.texts("#part option") == ["prefill", "decode"]
        before = window.run("return root.total.macs")
        window.type("#part", "decode")
        assert window.texts("h1")[0].endswith(": decode (one token)")
        assert before != window.run("return root.total.macs") == int(cost_parts(llama[1])["decode"].whole["macs"])
        window.click('#tree [data-address="model"]')
        assert window.texts("#chosen") == ["model"]
        assert window.run("return location.hash") == "#decode/model"
        window.type("#part", "prefill")
        window.run("location.hash = '#decode/model.norm'; chooseLinked(); return 0")
        assert [*window.texts("#chosen"), window.run("return data.part")] == ["model.norm", "decode"]
        assert window.complaints() == []
