"""`quantize` and `select` on the command line."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic

import modelexport
from commands import run
from exports import Exporter
from graph_texts import written
from modelexport.core.declared_options import declared
from modelexport.runtime.fitted_inputs import fitted
from modelexport.tagged.file import read_tagged
from modelexport.terminal.shared_options import METRIC
from modelexport.tools.quantize.changes_for_devices import CHANGES
from modelexport.tools.quantize.methods import METHODS
from modelexport.tools.quantize.metrics_and_bounds import METRICS
from modelexport.tools.quantize.quantize_command import Rules
from modelexport.traces import calibration_data


def test_quantize_says_what_it_did_and_how_to_check_it(exported: Exporter, tmp_path: Path) -> None:
    file, output = exported("bert").path, tmp_path / "out.onnx"
    done = run("quantize", file, "-o", output, "--to", "int8-dynamic", "--keep", "pooler", "--keep", "class:LayerNorm")
    assert done.returncode == 0, done.stderr
    assert re.search(r"out.onnx: [\d.,]+ (MB|bytes) of weights, from [\d.,]+ (MB|bytes)", done.stdout)
    assert "kept, bit for bit: embeddings.LayerNorm" in done.stdout
    assert "0 inferred, 0 untagged" in done.stdout
    assert f"next: modelexport compare {file} {output} --numbers" in done.stdout
    against = run("verify", file, "--against", output)
    assert against.returncode == 1
    assert "encoder.layer.0" in against.stdout
    assert " calls compute the same" in against.stdout
    assert (
        "compute the same within 0.03 %; in one run the first call off by more than 0.03 % is embeddings.word"
        in against.stdout
    )
    strict = run("verify", file, "--against", output, "--bound", "1e-4")
    assert strict.returncode == 1
    assert (
        "not within 0.01 %; in one run the first call off by more than 0.01 % is embeddings.word_embeddings"
        in strict.stdout
    )
    loose = run("verify", file, "--against", output, "--bound", "0.5")
    assert loose.returncode == 0
    assert loose.stdout.splitlines()[-1].startswith("agree: last_hidden_state is off by ")
    assert run("verify", file, "--bound", "1").stderr.startswith("modelexport: --bound goes with --against")
    profiled = run("profile", file, "--against", output, "--runs", "1", "--depth", "1")
    assert profiled.returncode == 0
    assert "AGAINST SECONDS" in profiled.stdout


def test_a_report_has_the_time_and_the_error_of_a_quantized_file(tmp_path: Path) -> None:
    text = 'g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 5}> { ["/a/MatMul"] y = MatMul (x, w) }'
    file = written(tmp_path / "file.onnx", text)
    modelexport.quantize(file, tmp_path / "q.onnx", to="int8-dynamic")
    done = run("report", file, "--against", tmp_path / "q.onnx", "--profile", "-o", tmp_path / "out.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out.html").read_text()
    assert all(word in page for word in ("against_seconds", "against_ratio", "error", "Against another file"))


def test_quantize_measures_ranges_on_a_file_of_inputs(exported: Exporter, tmp_path: Path) -> None:
    file = exported("bert").path
    shapes = {value.name: [int(size) for size in value.shape or ()] for value in read_tagged(file).model.graph.inputs}
    np.savez(tmp_path / "data.npz", **{name: np.ones(shape, dtype=np.int64) for name, shape in shapes.items()})
    done = run(
        "quantize", file, "-o", tmp_path / "out.onnx", "--to", "int8-static", "--data", tmp_path / "data.npz", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["methods"].keys() == {"int8-static"}
    (tmp_path / "wrong.jsonl").write_text('{"input_ids": [[1]]}')
    done = run("quantize", file, "-o", tmp_path / "no.onnx", "--to", "int8-static", "--data", tmp_path / "wrong.jsonl")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "wrong.jsonl does not fit" in done.stderr
    assert not (tmp_path / "no.onnx").exists()


def test_of_the_data_only_the_first_inputs_are_read_again_for_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 5}> { ["/a/MatMul"] y = MatMul (x, w) }'
    file, data, numbers = written(tmp_path / "file.onnx", text), tmp_path / "data.jsonl", list[float]()
    data.write_text("".join(json.dumps({"x": [[number, 1]]}) + "\n" for number in (1, 2, 3)))

    def fit(feeds: dict[str, Any], model: ir.Model) -> dict[str, Any]:
        numbers.append(feeds["x"][0][0])
        return fitted(feeds, model)

    monkeypatch.setattr(calibration_data, "fitted", fit)
    done = run("quantize", file, "-o", tmp_path / "out.onnx", "--to", "int8-static", "--data", data)
    assert done.returncode == 0, done.stderr
    assert numbers == [1, 2, 3, 1]


def test_what_a_library_prints_is_not_in_the_document(tmp_path: Path) -> None:
    modelexport.export(
        torch.nn.Sequential(torch.nn.Linear(64, 64)), (torch.randn(2, 64),), tmp_path / "linear.onnx", check=False
    )
    how = ["--to", "int4:algorithm=k_quant", "--json"]
    done = run("quantize", tmp_path / "linear.onnx", "-o", tmp_path / "out.onnx", *how)
    assert json.loads(done.stdout)["methods"] == {"int4:algorithm=k_quant": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "int4", "--keep", "poler"], "did you mean pooler"),
        (["--recipe", "recipe.yaml"], "recipe.yaml is not a recipe (Object contains unknown field `ruls`"),
        (["--recipe", "empty.yaml"], "empty.yaml is not a recipe (a rule picks nothing"),
        (["--recipe", "nothing.yaml"], "there is no file nothing.yaml"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(
    exported: Exporter, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "recipe.yaml").write_text("ruls: []\n")
    (tmp_path / "empty.yaml").write_text("rules: [{select: [], method: int4}]\n")
    done = run("quantize", exported("bert").path, "-o", "out.onnx", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.onnx").exists()


def test_select_prints_names_that_the_quantizer_of_onnx_runtime_takes(exported: Exporter, tmp_path: Path) -> None:
    file = exported("bert").path
    done = run("select", file, "encoder.layer.0", "pooler", "--as", "ort")
    assert done.returncode == 0, done.stderr
    quantize_dynamic(onnx.load(file), tmp_path / "out.onnx", nodes_to_exclude=json.loads(done.stdout))
    run("retag", tmp_path / "out.onnx", "--from", file, "-o", tmp_path / "tagged.onnx")
    tagged = read_tagged(tmp_path / "tagged.onnx")
    quantized = {
        call: sum(node.op_type == "MatMulInteger" for node in tagged.nodes_of(tagged.find(call)))
        for call in ("encoder.layer.0", "encoder.layer.1", "pooler")
    }
    assert quantized == {"encoder.layer.0": 0, "encoder.layer.1": 6, "pooler": 0}


def test_select_prints_the_forms_of_other_tools(exported: Exporter) -> None:
    file = exported("bert").path
    names = [node.name for node in read_tagged(file).nodes_of(read_tagged(file).find("pooler"))]

    def printed(form: str) -> str:
        done = run("select", file, "pooler", "--as", form)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(printed("ort")) == json.loads(printed("olive"))["nodes_to_exclude"]
    assert set(names) < set(json.loads(printed("ort"))), "a Gemm has another name when ONNX Runtime looks for it"
    assert json.loads(printed("nncf")) == {"names": names}
    patterns = [pattern.strip("'") for pattern in printed("modelopt").split()]
    assert [re.match(pattern, name) is not None for pattern, name in zip(patterns, names, strict=True)] == [True] * len(
        names
    )
    assert printed("trt").split("--layerPrecisions=")[1].strip() == ",".join(f"'{name}':fp32" for name in names)
    done = run("select", file, "pooler", "--as", "tensorrt")
    assert done.returncode == 2
    assert "the forms are ort, modelopt, olive, trt, nncf" in done.stderr


(TO,) = (field for field in dataclasses.fields(Rules) if field.name == "to")


@pytest.mark.parametrize("field, names", [(TO, {*METHODS, *CHANGES}), (METRIC, set(METRICS))], ids=["--to", "--metric"])
def test_the_help_has_every_name_that_an_option_takes(field: dataclasses.Field[str], names: set[str]) -> None:
    declaration = declared(field)
    assert declaration is not None
    assert names - set(re.findall(r"[\w-]+", declaration.help)) == set()
