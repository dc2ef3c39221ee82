"""ONNX Runtime's time and memory by module: nearly all of it is attributed, and planted costs are found."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from commands import run
from exports import Exporter
from graph_texts import written
from modelexport import adopt, cost, export
from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.errors import FileFormatError, InputsError, UsageError
from modelexport.pytorch.calls.call_times import time_calls
from modelexport.runtime.input_files import read_feeds
from modelexport.runtime.sessions import Level
from modelexport.tables import columns, onnxruntime_profiler
from modelexport.tables.columns import ERROR
from modelexport.tables.onnxruntime_profiler import Event, nested
from modelexport.tables.profiles import (
    SESSION,
    ModuleProfile,
    RunFacts,
    _fitted,
    _spread,
    noise_note,
    profile,
    profile_in_turns,
)
from modelexport.tables.side_by_side import profile_against, profile_beside
from modelexport.tables.table import NodeFigures, Table
from modelexport.tagged.file import read_tagged
from modelexport.tools.compare.against_file import verify_against
from modelexport.tools.optimizers.optimize_tools import optimize_file

LEVELS: Sequence[Level] = ("all", "extended", "basic", "none")


def check_sums(found: ModuleProfile) -> None:
    """Own and outside figures add up to the whole; totals are own figures and those of the children."""
    table = found.table
    rows = {row.calls[0]: row for row in table.rows()}
    own = sum(row.own["seconds"] for row in rows.values())
    assert own + table.outside["seconds"] == table.whole["seconds"] == round(found.facts.wall_seconds * 1e9)
    assert sum(figures["seconds"] for _, figures in table.outside_rows) == table.outside["seconds"]
    for call, row in rows.items():
        inside = [rows[child] for child in table.calls.children[call]]
        assert row.total["seconds"] == row.own["seconds"] + sum(child.total["seconds"] for child in inside)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["condition", "bert", "vit", "resnet", "gpt2-cache", "recurrent", "unet", "whisper", "llama", "mixtral"]
)
def test_nearly_all_time_belongs_to_modules_at_every_level(exported: Exporter, name: str) -> None:
    for level in LEVELS:
        found = profile(exported(name).path, runs=2, warmup=1, level=level)
        assert found.facts.attributed >= 0.99
        check_sums(found)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["ort-bert", "quantize-dynamic"])
def test_fused_and_quantized_files_too(exported: Exporter, tool: str, tmp_path: Path) -> None:
    changed = tmp_path / "changed.onnx"
    optimize_file(exported("bert").path, tool, changed)
    for level in LEVELS:
        found = profile(changed, runs=2, warmup=1, level=level)
        assert found.facts.attributed >= 0.99
        check_sums(found)


class Slow(nn.Module):
    """Three equal layers, one of them with a matrix ten times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, width), nn.Linear(width, 256)) for width in WIDTHS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


WIDTHS = (256, 2560, 256)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("slow") / "slow.onnx"
    export(Slow().eval(), {"x": torch.randn(1, 128, 256)}, path, check=False)
    return path


def test_a_module_made_slow_is_found_first(slow: Path) -> None:
    table = profile(slow, runs=5).table
    layers = [row for row in table.rows() if row.address in ("layers.0", "layers.1", "layers.2")]
    assert max(layers, key=lambda row: row.total["seconds"]).address == "layers.1"
    assert table.sorted(table.rows(), "seconds")[0].address.startswith("layers.1.")


def test_rows_add_up_to_a_run_without_profiling_and_name_what_is_not_the_time_of_nodes(slow: Path) -> None:
    found = profile(slow, runs=5)
    names = dict(found.table.outside_rows)
    assert set(names) == {SESSION}
    assert found.facts.kernel_seconds + sum(row["seconds"] for row in names.values()) / 1e9 == pytest.approx(
        found.facts.wall_seconds
    )
    assert found.facts.profiler_seconds > 0
    assert f"a run takes {found.facts.wall_seconds * 1e3:,.3g} ms" in found.table.notes[-2]
    shared = sum(len(node.calls) > 1 for node in found.table.nodes)
    assert shared
    assert f"{shared} kernels with several owners: the time is divided" in found.table.notes[-3]


def test_runs_that_differ_by_more_than_they_take_rank_nothing() -> None:
    """A busy machine: in half of the runs one module, in the other half the other, took a hundred times as long."""
    root, modules = ModuleCall(""), (ModuleCall("first"), ModuleCall("second"))
    tree = CallTree((TracedCall(root, None, 0, 0, 1), *(TracedCall(call, root, 1, 0, 1) for call in modules)))
    tags = {root: "/Net", **{call: f"/Net/{call.path}" for call in modules}}

    def noise(*runs: tuple[int, ...]) -> list[str]:
        nodes = tuple(
            NodeFigures(call.path, "Gemm", (call,), {"seconds": min(taken)}, taken)
            for call, taken in zip(modules, runs, strict=True)
        )
        table = Table(tree, tags, columns.PROFILE, nodes)
        facts = RunFacts(
            file="net.onnx", provider="", level="all", runs=4, warmup=1, inputs={}, inputs_from="", wall_seconds=0,
            profiled_seconds=0, kernel_seconds=table.whole["seconds"] / 1e9, scale=1, profiler_seconds=0, attributed=1,
            spread_seconds=_spread(table) / 1e9,
        )  # fmt: skip
        return noise_note(facts)

    assert noise((10, 11, 12, 11), (30, 31, 30, 32)) == []
    (line,) = noise((1000, 10, 1000, 10), (30, 3000, 30, 3000))  # the whole differs
    assert line.startswith("too noisy to rank: the runs of net.onnx differ by")
    assert noise((1000, 10, 1000, 10), (10, 1000, 10, 1000))  # the whole takes the same in every run


def test_no_time_is_negative_though_the_profiled_runs_were_slower_than_the_others() -> None:
    """A busy machine: the nodes' medians add up to 4.6 ms, a run without the profiler took 0.4 ms."""
    nodes = [
        NodeFigures(f"node{number}", "Gemm", (), {"seconds": taken, "node_seconds": taken, "peak_bytes": 7}, (taken, 9))
        for number, taken in enumerate((4_080_000, 500_000, 3_000, 0))
    ]
    fitted, scale = _fitted(nodes, 400_000, 50_000)
    taken = [node.figures["seconds"] for node in fitted]
    assert 399_996 <= sum(taken) <= 400_000
    assert taken == sorted(taken, reverse=True)
    assert min(taken) == 0
    assert scale == pytest.approx(400_000 / 4_583_000)
    assert fitted[0].figures["peak_bytes"] == 7
    assert _fitted(nodes, 5_000_000, 500_000) == (nodes, 1.0)


def test_a_full_profiler_is_used_several_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "relu.onnx", "g (float[2] x) => (float[2] y) { y = Relu(x) }")
    whole, held = onnxruntime_profiler.profiled, 2
    monkeypatch.setattr(onnxruntime_profiler, "profiled", lambda *how: [file_runs[:held] for file_runs in whole(*how)])
    with pytest.raises(UsageError, match=r"profiler is full after 2 of 2 warm-up runs and a measured one"):
        profile(path, runs=3, warmup=2)
    found = profile(path, runs=3, warmup=1)
    assert (found.facts.runs, [len(node.runs) for node in found.table.nodes if node.op_type == "Relu"]) == (3, [3])


def test_what_interrupts_nodes_is_not_taken_for_time_outside_of_them() -> None:
    """A busy machine: a run takes 22.4 ms, its nodes all but 0.6 ms of it, and the nodes' medians add up to 10 ms."""
    nodes = [
        NodeFigures(name, "Gemm", (), {"seconds": taken, "node_seconds": taken}, (taken,))
        for name, taken in (("long", 7_500_000), ("short", 2_500_000))
    ]
    fitted, scale = _fitted(nodes, 22_400_000, 600_000)
    assert [node.figures["seconds"] for node in fitted] == [16_350_000, 5_450_000]
    assert scale == pytest.approx(2.18)


def quantize(source: Path, target: Path, module: str, kind: str) -> None:
    """Quantize the matrix multiplications of one module, and restore the tags."""
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    from modelexport import retag

    tagged, plain = read_tagged(source), target.with_suffix(".plain.onnx")
    inside = [row.name for row in tagged.describe_nodes(tagged.select(module).inside)]
    if kind == "int8":
        quantize_dynamic(source, plain, nodes_to_quantize=inside)
    else:
        others = [node.name for node in tagged.nodes if node.name not in inside]
        quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, nodes_to_exclude=others)
        quantizer.process()
        quantizer.model.save_model_to_file(str(plain))
    retag(plain, source=source, output=target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "operator", "touched"),
    # int8 also quantizes what goes into the layer, where it is made.
    [
        ("int8", "DynamicQuantizeMatMul", {"layers.0.1"}),
        ("int4", "MatMulNBits", set()),
    ],
)
def test_quantizing_one_layer_shows_in_that_layer(
    slow: Path, tmp_path: Path, kind: str, operator: str, touched: set[str]
) -> None:
    quantize(slow, tmp_path / "q.onnx", "layers.1", kind)
    errors = {
        row.address: row.own.get("error", 0)
        for row in cost(slow).with_column(ERROR, verify_against(slow, tmp_path / "q.onnx").errors).rows()
    }
    assert {address for address, error in errors.items() if error > 1e-4} - {"layers.1"} == {
        "layers.1.0", "layers.1.1",
    }  # fmt: skip
    assert all(error < 1e-6 for address, error in errors.items() if address.startswith(("layers.0.0", "layers.2")))

    both = profile_against(*profile_in_turns(slow, tmp_path / "q.onnx", runs=5))
    quantized = {
        call.path
        for node in both.table.nodes
        if "against_seconds" in node.figures and node.op_type == operator
        for call in node.calls
    }
    assert quantized == {"layers.1.0", "layers.1.1", *touched}
    rows = {row.address: row for row in both.table.rows()}
    assert all(rows[f"layers.{index}"].total["against_seconds"] > 0 for index in range(3))
    assert both.document()["against"]["file"].endswith("q.onnx")


def test_pytorch_stands_beside_it(slow: Path) -> None:
    torch.manual_seed(0)
    model = Slow().eval()
    found = profile(slow, runs=3)
    seconds = time_calls(model, {"x": torch.from_numpy(found.feeds["x"])}, runs=3)
    both = profile_beside(found, seconds)
    rows = {row.address: row for row in both.table.rows()}
    assert rows["."].total["against_seconds"] == sum(seconds.values())
    assert rows["layers.1"].total["against_seconds"] > rows["layers.0"].total["against_seconds"]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["node", ""])
@pytest.mark.parametrize("chosen", [True, False])
def test_the_time_of_a_branch_is_not_that_of_another_with_equal_names(name: str, chosen: bool, tmp_path: Path) -> None:
    text = """g (bool c, float[9] x) => (float[9] y) {
        y = If (c) <then_branch = t () => (float[9] p) { p = Sinh (x) },
                   else_branch = e () => (float[9] p) { p = Sinh (x) }> }"""
    model = onnx.load(written(tmp_path / "file.onnx", text))
    branches = [attribute.g for attribute in model.graph.node[0].attribute]
    for branch, module in zip(branches, ("yes", "no"), strict=True):
        branch.node[0].name = f"/{module}/sinh/Sinh"
    onnx.save(model, tmp_path / "file.onnx")
    adopt(tmp_path / "file.onnx", tmp_path / "tagged.onnx")
    model = onnx.load(tmp_path / "tagged.onnx")
    for branch in (attribute.g for attribute in model.graph.node[0].attribute):
        branch.node[0].name = name
    onnx.save(model, tmp_path / "tagged.onnx")
    feeds = {"c": np.array(chosen), "x": np.ones(9, np.float32)}
    nodes = profile(tmp_path / "tagged.onnx", feeds, runs=1, warmup=0).table.nodes
    assert [call.address for node in nodes if node.op_type == "Sinh" for call in node.calls] == [
        "yes.sinh" if chosen else "no.sinh"
    ]


def test_nodes_without_names_have_their_times(tmp_path: Path) -> None:
    file = written(tmp_path / "file.onnx", "g (float[9] x) => (float[9] y) { a = Sinh (x) y = Cosh (a) }")
    assert {node.op_type for node in profile(file, runs=1).table.nodes if node.calls} == {"Sinh", "Cosh"}


def test_a_node_with_nested_graphs_has_its_own_time_without_theirs() -> None:
    events = msgspec.convert(
        [
            {"cat": "Node", "name": "inner", "ts": 11, "dur": 3, "args": {"op_name": "Add"}},
            {"cat": "Node", "name": "branch", "ts": 10, "dur": 9, "args": {"op_name": "If"}},
            {"cat": "Node", "name": "after", "ts": 19, "dur": 2, "args": {"op_name": "Mul"}},
        ],
        list[Event],
    )
    assert [(event.name, own) for event, own in nested(events)] == [("inner", 3), ("branch", 6), ("after", 2)]


@pytest.mark.parametrize("suffix", [".npz", ".json", ".safetensors"])
def test_inputs_come_from_a_file(slow: Path, suffix: str, tmp_path: Path) -> None:
    given, array = tmp_path / f"inputs{suffix}", np.ones((1, 128, 256), np.float32)
    if suffix == ".npz":
        np.savez(given, x=array)
    elif suffix == ".json":
        given.write_text(json.dumps({"x": {"dtype": "float32", "shape": [1, 128, 256], "range": [0, 1]}}))
    else:
        from safetensors.numpy import save_file

        save_file({"x": array}, given)
    found = profile(slow, str(given), runs=1)
    assert found.facts.inputs == {"x": "float32[1, 128, 256]"}
    assert found.facts.inputs_from == str(given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inputs": {"y": np.ones(1)}}, InputsError, "x missing; the model takes x, and y is none of them"),
        ({"inputs": {"x": np.ones((1, 128, 256), np.float32)}, "sizes": {"n": 1}}, InputsError, "leave out the sizes"),
        ({"inputs": {"x": [[1, 2], [3]]}}, InputsError, r"NumPy cannot read x \(ValueError"),
        ({"inputs": Path("no.npz")}, FileFormatError, r"there is no file no\.npz"),
        ({"provider": "NoExecutionProvider"}, UsageError, "there is no device 'NoExecutionProvider'"),
        (
            {"inputs": {"x": np.ones((1, 2))}},
            InputsError,
            r"x has the shape \[1, 2\], and the model takes \[1, 128, 256\]",
        ),
    ],
)
def test_what_is_wrong_is_said(slow: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        profile(slow, options.pop("inputs", None), **options, runs=1)


def test_another_file_is_run_with_the_sizes_that_it_fixes(tmp_path: Path) -> None:
    text = 'g (float[%s, 8] x) => (float[%s, 8] y) { ["/a/Abs"] y = Abs(x) }'
    files = [written(tmp_path / f"{rows}.onnx", text % (rows, rows)) for rows in ("N", "5")]
    done = run("profile", files[0], "--against", files[1], "--runs", "1")
    assert "random (x float32[5, 8])" in done.stdout, done.stderr
    done = run("profile", files[0], "--against", files[1], "--size", "N=4")
    assert done.returncode == 2
    assert "axis 0 of x is 5 in " in done.stderr


def test_the_command_prints_the_run_beside_the_table(slow: Path) -> None:
    command = ["profile", slow, "--runs", "2", "--warmup", "0"]
    done = run(*command, "--json")
    document = json.loads(done.stdout)
    assert set(document) == {"columns", "rows", "outside", "run"}
    assert list(document["columns"]) == ["seconds", "share", "spread", "peak_bytes"]
    assert document["run"]["attributed"] >= 0.99
    listed = run(*command, "--csv", "--by", "module").stdout
    assert next(csv.DictReader(listed.splitlines()))["address"] == "."


def test_all_arrays_that_are_given_are_used_or_refused(tmp_path: Path) -> None:
    file = written(
        tmp_path / "scaled.onnx",
        """g (float[2] x, float s) => (float[2] y) <float s = {1}> { ["/a/Mul"] y = Mul(x, s) }""",
    )
    given = {"x": np.ones(2, np.float32), "s": np.float32(5)}
    assert profile(file, given, runs=1).feeds == {"x": pytest.approx(1), "s": 5}
    assert profile(file, {"x": np.ones(2), "s": 5}, runs=1).facts.inputs == {"x": "float32[2]", "s": "float32[]"}
    with pytest.raises(InputsError, match=r"has no input t.*: it takes x, s"):
        profile(file, {**given, "t": np.float32(5)}, runs=1)


@pytest.mark.parametrize("described", [{"value": [1.5]}, {"shape": [9], "range": [0, 1]}])
def test_a_description_may_ask_for_bfloat16(tmp_path: Path, described: dict[str, Any]) -> None:
    (tmp_path / "inputs.json").write_text(json.dumps({"x": {"dtype": "bfloat16", **described}}))
    assert read_feeds(tmp_path / "inputs.json", 0)["x"].dtype.name == "bfloat16"


@pytest.mark.parametrize(
    "described",
    [
        {"dtype": "int4", "shape": [2]},
        {"dtype": "int64", "value": [1.5]},
        {"dtype": "int8", "shape": [9], "range": [0, 1000]},
        {"dtype": "uint8", "value": [-1]},
    ],
)
def test_numbers_that_a_type_does_not_hold_are_refused(tmp_path: Path, described: dict[str, Any]) -> None:
    (tmp_path / "inputs.json").write_text(json.dumps({"x": described}))
    with pytest.raises(FileFormatError, match="cannot read inputs"):
        read_feeds(tmp_path / "inputs.json", 0)
