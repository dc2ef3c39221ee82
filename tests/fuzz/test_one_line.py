"""What goes wrong is one line with the cause, the call and what to do; a signal ends whatever runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from corpus import copied
from limited import run
from modelexport.files import manifest_file, protobuf_reading
from modelexport.format import keys
from test_faults import TORCHSCRIPT

FAILING = """
import sys
import torch
from torch import nn

class Inner(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        if self.kind == "raises":
            raise ValueError("the layer\\nis broken")
        if self.kind == "exits":
            sys.exit("leaving")
        if self.kind == "decides":
            return x if x.sum() > 0 else -x
        return torch.ops.aten._cholesky_solve_helper(x, x, False)

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ReLU(), Inner(kind)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def raises(): return Net("raises"), {"x": torch.rand(2, 4)}
def exits(): return Net("exits"), {"x": torch.rand(2, 4)}
def decides(): return Net("decides"), {"x": torch.rand(2, 4)}
def unsupported(): return Net("unsupported"), {"x": torch.rand(2, 4)}
"""


@pytest.fixture
def place(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = copied(corpus, tmp_path / "place")
    monkeypatch.chdir(folder)
    return folder


def line(*command: str, status: int = 2) -> str:
    ended = run(*command)
    assert ended.status == status, ended
    assert not ended.out, ended
    assert ended.err.startswith("modelexport: "), ended.err
    assert ended.err.count("\n") == 1, ended.err
    return ended.err


@pytest.mark.parametrize(
    "frontend",
    ["auto", pytest.param("dynamo", marks=pytest.mark.slow), pytest.param("torchscript", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("raises", ["ValueError", "blocks.1", "the layer", "inputs"]),
        ("exits", ["ended the program ('leaving')"]),
        ("decides", ["in blocks.1 (failing.py:18)", "data-dependent", "torch.where"]),
        ("unsupported", ["in blocks.1", "_cholesky_solve_helper", "with other operations"]),
    ],
)
def test_a_model_that_cannot_be_exported_is_one_line(
    kind: str, parts: list[str], frontend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("failing.py").write_text(FAILING)
    told = line(
        "export", f"failing.py:{kind}", "-o", "x.onnx", "--frontend", frontend, status=2 if kind == "raises" else 3
    )
    assert [part for part in parts if part not in told] == [], told
    assert ("the front end torchscript failed too" in told) == (
        frontend == "auto" and kind in ("decides", "unsupported")
    )


def endless() -> onnx.NodeProto:
    def value(name: str, kind: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, None if kind == 1 else [])

    nodes = [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Identity", ["v"], ["w"])]
    inputs, outputs = [value("i", 7), value("go", 9), value("v", 1)], [value("go_on", 9), value("w", 1)]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    return helper.make_node("Loop", ["times", "true", "x"], ["looped"], name="loop", body=body)


def test_a_signal_ends_a_graph_that_runs_for_ever(place: Path) -> None:
    model = onnx.load("plain.onnx")
    model.graph.initializer.extend(
        [numpy_helper.from_array(np.array(2**62), "times"), numpy_helper.from_array(np.array(True), "true")]
    )
    model.graph.node[0].input[0] = "looped"
    model.graph.node.insert(0, endless())
    onnx.save(model, "endless.onnx")
    began = time.perf_counter()
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    assert (
        line("profile", "endless.onnx", status=128 + signal.SIGTERM)
        == "modelexport: interrupted; nothing was written\n"
    )
    assert time.perf_counter() - began < 20
    timer.join()


def own_output(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = model.graph.node[0].output[0]


def circle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]


def huge_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 2**40


def texts_as_bytes(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = onnx.TensorProto.STRING


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_output, "depends on its own outputs"),
        (circle, "depends on its own outputs"),
        (huge_opset, "version 1099511627776 of the operator set"),
        (texts_as_bytes, "texts as bytes"),
    ],
)
def test_a_graph_that_cannot_be_computed_is_refused_when_it_is_read(
    change: Callable[[onnx.ModelProto], None], reason: str, place: Path
) -> None:
    model = onnx.load("plain.onnx")
    change(model)
    onnx.save(model, "x.onnx")
    assert reason in line("cost", "x.onnx")
    assert reason in line("split", "x.onnx", "--stages", "2", "-o", "out")


def test_nodes_may_be_in_any_order(place: Path) -> None:
    model = onnx.load("flat.onnx")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    onnx.save(model, "x.onnx")
    assert run("tree", "x.onnx").status == 0


def test_a_header_that_is_nested_too_deeply_is_refused(place: Path) -> None:
    header = b'{"a":' * 50_000
    Path("new.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "not a safetensors file" in line("update-weights", "plain.onnx", "new.safetensors", "-o", "out.onnx")


def test_a_size_of_many_digits_is_not_counted(place: Path) -> None:
    model = onnx.load("plain.onnx")
    shape = model.graph.output[0].type.tensor_type.shape
    for _ in range(20):
        shape.dim.add(dim_value=2**62)
    onnx.save(model, "x.onnx")
    for command in (
        ["cost", "x.onnx"],
        ["cost", "x.onnx", "--html", "out.html"],
        ["cost", "x.onnx", "--sort", "flops"],
    ):
        assert run(*command).status == 0


@pytest.mark.slow
def test_a_package_of_a_checkpoint_can_be_written_again(place: Path) -> None:
    checkpoint = place / "checkpoint"
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    for _ in range(2):
        ended = run("export", "checkpoint", "-o", "linked/", "--parts", "whole", "--no-check", *TORCHSCRIPT)
        assert ended.status == 0, ended.err
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before
    for name in sorted(before):
        assert "checkpoint" in line("export", "checkpoint", "-o", f"checkpoint/{name}")


@pytest.mark.parametrize("output", ["out.onnx", "out/"])
def test_a_folder_that_needs_its_own_code_has_one_message(output: str, place: Path) -> None:
    config = json.loads(Path("checkpoint/config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own", "architectures": ["Own"]}
    Path("checkpoint/config.json").write_text(json.dumps(config))
    Path("checkpoint/own.py").write_text("open('ran', 'w')\n")
    assert line("export", "checkpoint", "-o", output) == (
        "modelexport: checkpoint needs its own Python code (own.Config): read that code, "
        "then pass --trust-remote-code to run it\n"
    )
    assert not Path("ran").exists()


@pytest.mark.parametrize("output", ["out.onnx", "out/"])
def test_a_configuration_that_does_not_fit_its_weights_names_an_entry(output: str, place: Path) -> None:
    config = json.loads(Path("checkpoint/config.json").read_text()) | {"hidden_size": 16}
    Path("checkpoint/config.json").write_text(json.dumps(config))
    assert "LayerNorm.bias is [8] and should be [16]" in line("export", "checkpoint", "-o", output)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ("[1]", "TypeError: 'int' object is not subscriptable"),
        ("[" * 100_000, "RecursionError"),
        ('[{"name": "0", "type": "x.Transformer", "path": "/etc"}]', "Invalid model path '/etc'"),
        ('[{"name": "0", "type": "x.Transformer", "path": "../.."}]', "Invalid model path '../..'"),
        ('[{"name": "0", "type": "sentence_transformers.models.Dense", "path": "1"}]', "RuntimeError"),
        ('[{"name": "0", "type": "os.system", "path": ""}]', "references the module class"),
    ],
)
def test_what_a_pipeline_names_is_checked(modules: str, reason: str, place: Path) -> None:
    Path("checkpoint/modules.json").write_text(modules)
    Path("checkpoint/1").mkdir()
    Path("checkpoint/1/config.json").write_text('{"in_features": 1000000000, "out_features": 1000000}')
    shutil.copy(sorted(Path("checkpoint").glob("*.safetensors"))[0], "checkpoint/1/model.safetensors")
    assert reason in line("export", "checkpoint", "-o", "out/")


@pytest.mark.parametrize("field", [b"\0\0", b"\x40\0"])  # no number, and the version of the model, again and again
def test_a_file_of_millions_of_fields_is_refused(field: bytes, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf_reading, "MOST_FIELDS", 1000)
    Path("x.onnx").write_bytes(field * 2000)
    for command in (["tree", "x.onnx"], ["cost", "x.onnx"]):
        assert "not an ONNX file, or damaged" in line(*command)


def with_size(formula: str) -> None:
    """Write ``x.onnx``, whose input has a first size that is a formula."""
    model = onnx.load("plain.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = formula
    del model.graph.value_info[:]
    onnx.save(model, "x.onnx")


@pytest.mark.parametrize(
    "formula",
    [
        "(a+b+c+d+e+f)**40",
        "*".join(f"(a{i}+b{i})" for i in range(30)),
        "floor(" + "*".join(f"(a{i}+b{i})" for i in range(30)) + "/7)",
        "(a+b)**5",
        "+".join(f"Mod(a{i}, b)*Max(a{i}, c)" for i in range(25)),
    ],
)
def test_a_size_of_many_terms_is_not_multiplied_out(formula: str, place: Path) -> None:
    with_size(formula)
    for command in (["cost", "x.onnx"], ["compare", "x.onnx", "plain.onnx"]):
        assert run(*command).status == 0


def no_operator_set(model: onnx.ModelProto) -> None:
    del model.opset_import[:]
    model.opset_import.add(domain="com.microsoft", version=1)


def without_tags(model: onnx.ModelProto) -> None:
    del model.graph.node[1].metadata_props[:]


def without_parameters(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        for entry in tensor.metadata_props:
            if entry.key == keys.PARAMETER:
                entry.value = "[]"


@pytest.mark.parametrize(
    ("change", "command", "reason"),
    [
        (no_operator_set, ["retag", "flat.onnx", "--from", "x.onnx", "-o", "out.onnx"], "which the model does not"),
        (no_operator_set, ["rename", "x.onnx", "-o", "out.onnx"], "which the model does not import"),
        (without_tags, ["rename", "x.onnx", "-o", "out.onnx"], "has no tags"),
        (without_parameters, ["update-weights", "x.onnx", "new.safetensors", "-o", "out.onnx"], "from no parameter"),
    ],
)
def test_what_a_damaged_file_lacks_is_named(
    change: Callable[[onnx.ModelProto], None], command: list[str], reason: str, place: Path
) -> None:
    model = onnx.load("plain.onnx")
    change(model)
    onnx.save(model, "x.onnx")
    for suffix in (".dag.json", ".operations.json"):
        shutil.copy(f"plain{suffix}", f"x{suffix}")
    assert reason in line(*command)


def test_the_other_name_of_the_standard_operators_is_known(place: Path) -> None:
    model = onnx.load("plain.onnx")
    model.opset_import[0].domain = "ai.onnx"
    onnx.save(model, "x.onnx")
    for command in (["cost", "x.onnx"], ["rename", "x.onnx", "-o", "out.onnx"]):
        assert run(*command).status == 0


@pytest.mark.parametrize("key", ["parts", "files"])
def test_a_manifest_of_very_many_files_is_refused(key: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_file, "MOST_PARTS", 100)
    monkeypatch.setattr(manifest_file, "PACKAGE_FILES", 100)
    manifest = json.loads(Path("package/modelexport.json").read_text())
    part = manifest["parts"][0]
    many = [{**part, "name": f"part_{n}"} if key == "parts" else f"{n}.onnx" for n in range(200)]
    Path("package/modelexport.json").write_text(json.dumps(manifest | {key: many}))
    assert f"names 20{'0' if key == 'parts' else '1'} {key}" in line("tree", "package")


def test_an_adapter_is_read_where_the_output_exists(place: Path) -> None:
    for _ in range(2):
        ended = run("update-weights", "plain.onnx", "--adapter", "adapter", "-o", "out.onnx")
        assert ended.status == 0, ended.err
    Path("adapter/adapter_config.json").write_text("[1]")
    assert "adapter_config.json is damaged" in line(
        "update-weights", "plain.onnx", "--adapter", "adapter", "-o", "out.onnx"
    )


NAMED = """
import torch
from torch import nn
def second():
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("0@1", nn.Linear(4, 4))
    return model, {"x": torch.rand(2, 4)}
"""


def test_a_module_with_the_name_of_another_ones_call_is_refused(place: Path) -> None:
    Path("named.py").write_text(NAMED)
    for command in (["export", "named.py:second", "-o", "out.onnx"], ["hierarchy", "named.py:second"]):
        assert "the module '0@1' has the name of call 2 of '0'" in line(*command)


def test_a_name_that_is_not_text_is_refused(place: Path) -> None:
    told = line("export", "factory.py:make", "--input-names", "\udcff", "-o", "out.onnx", *TORCHSCRIPT)
    assert "is not UTF-8" in told
