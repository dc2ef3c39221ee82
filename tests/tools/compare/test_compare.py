"""Two files side by side: equal ones do not differ, and differences are found in the right place."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
import torch
from torch import nn

import commands
import models
from exports import Exporter
from modelexport import compare, export, load, quantize
from modelexport.errors import FileFormatError
from modelexport.tools.compare.comparison_report import FileComparison, OnlyInOne
from modelexport.tools.compare.comparison_text import format_comparison


class Two(nn.Module):
    """Two modules, one of which a test replaces."""

    def __init__(self, second: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def written(path: Path, model: nn.Module, **options: Any) -> Path:
    export(model, {"x": torch.ones(2, 8)}, path, check=False, **options)
    return path


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.activation = nn.Linear(8, 8), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(x))


def layers(path: Path, count: int = 2, **options: Any) -> Path:
    model = nn.Sequential(*(Layer() for _ in range(count)))
    export(model.eval(), {"input": torch.ones(2, 3, 8)}, path, check=False, **options)
    return path


def moved(comparison: FileComparison) -> Counter[str]:
    """Operator to how many more nodes of it the second file has, added up over calls."""
    total: Counter[str] = Counter()
    for change in comparison.changed:
        for operator, (before, after) in change.operators.items():
            total[operator] += after - before
    return total


@pytest.mark.parametrize("name", ["blocks", "condition", "bert", "albert"])
def test_a_file_does_not_differ_from_itself(name: str, exported: Exporter) -> None:
    path = exported(name).path
    comparison = compare(path, path, values=True)
    assert not comparison.differs
    assert (comparison.changed, comparison.entries, len(comparison.notes)) == ([], [], 1)  # of equal bytes
    assert comparison.same == comparison.first.calls == len(exported(name).hierarchy.calls)
    assert comparison.values is not None
    assert comparison.values.equal == sum(held.initializers for held in comparison.first.parameters.values()) > 0


@pytest.mark.parametrize("encoding", ["functions", pytest.param("attributes", marks=pytest.mark.slow)])
def test_the_same_export_in_another_encoding_differs_in_the_encoding_only(
    encoding: Any, exported: Exporter, tmp_path: Path
) -> None:
    path = exported("blocks").path
    case = models.case("blocks")
    export(case.build(), case.inputs(), tmp_path / "other.onnx", tags_as=encoding, check=False)
    comparison = compare(path, tmp_path / "other.onnx", values=True)
    assert not comparison.differs
    assert comparison.first.operators == comparison.second.operators
    assert (comparison.first.encoding, comparison.second.encoding) == ("metadata", encoding)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layers(tmp_path_factory.mktemp("two") / "two.onnx")


@pytest.fixture(scope="module")
def unoptimised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layers(tmp_path_factory.mktemp("raw") / "raw.onnx", optimized=False)


def test_what_the_optimiser_did_is_found_in_the_calls_it_did_it_to(two_layers: Path, unoptimised: Path) -> None:
    comparison = compare(two_layers, unoptimised)
    one, other = comparison.first.operators, comparison.second.operators
    differences = {name: other.get(name, 0) - one.get(name, 0) for name in {**one, **other}}
    assert {name: count for name, count in moved(comparison).items() if count} == {
        name: count for name, count in differences.items() if count
    }
    by_address = {change.address: change for change in comparison.changed}
    dense = by_address["1.dense"]
    assert dense.operators == {"Transpose": (0, 1)}
    assert dense.parameters == {"1.dense.weight": ("float32[8, 8] by Transpose", "float32[8, 8]")}
    assert comparison.first.settings is not None
    assert comparison.second.settings is not None
    assert (comparison.first.settings.optimize, comparison.second.settings.optimize) == (True, False)


def test_equal_differences_of_numbered_calls_are_one_line(two_layers: Path, unoptimised: Path) -> None:
    text = format_comparison(compare(two_layers, unoptimised))
    lines = [line.split("  ", 2)[1:] for line in text.splitlines() if ".dense" in line]
    assert [(name, what.strip()) for name, what in lines] == [
        ("0…1.dense (2)", "+1 Transpose; weight float32[8, 8] by Transpose -> float32[8, 8]"),
    ]


def test_another_opset_changes_the_calls_whose_operators_it_lacks(two_layers: Path, tmp_path: Path) -> None:
    comparison = compare(two_layers, layers(tmp_path / "old.onnx", opset=18))
    assert (comparison.first.opsets[""], comparison.second.opsets[""]) == (20, 18)
    assert {change.address for change in comparison.changed} == {"0.activation", "1.activation"}
    assert all(change.operators["Gelu"] == (1, 0) for change in comparison.changed)
    assert not any(change.parameters or change.attributes for change in comparison.changed)


def test_another_granularity_changes_tags_only(two_layers: Path, tmp_path: Path) -> None:
    comparison = compare(two_layers, layers(tmp_path / "all.onnx", granularity="all"))
    assert comparison.changed
    assert moved(comparison) == Counter()
    by_address = {change.address: change for change in comparison.changed}
    assert by_address["1.dense"].source_module == ("/Sequential/Layer.1", "/Sequential/Layer.1/Linear")
    assert "tags differ in" in format_comparison(comparison)


def test_more_layers_are_calls_and_entries_that_one_file_has_alone(two_layers: Path, tmp_path: Path) -> None:
    comparison = compare(two_layers, layers(tmp_path / "four.onnx", 4))
    assert comparison.only_in_first == []
    nodes = len(load(two_layers)["1"].nodes)
    assert comparison.only_in_second == [OnlyInOne(f"{i}", f"/Sequential/Layer.{i}", 3, nodes) for i in (2, 3)]
    assert {change.key.split(".")[0] for change in comparison.entries} == {"2", "3"}
    assert all(change.entry[0] is None for change in comparison.entries)
    assert "2…3 (2)" in format_comparison(comparison)
    assert "2…3.dense.bias (2)" in format_comparison(comparison)
    # The same in the other direction.
    mirrored = compare(tmp_path / "four.onnx", two_layers)
    assert mirrored.only_in_first == comparison.only_in_second


def test_a_repeated_call_that_one_file_has_alone_is_named_with_its_number(tmp_path: Path) -> None:
    class Repeated(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.block = models.Block()
            self.times = times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = self.block(x)
            return x

    comparison = compare(written(tmp_path / "2.onnx", Repeated(2)), written(tmp_path / "5.onnx", Repeated(5)))
    assert [(one.address, one.calls) for one in comparison.only_in_second] == [(f"block@{i}", 3) for i in (2, 3, 4)]
    assert comparison.entries == []
    assert "block@2…4 (3)" in format_comparison(comparison)


SHAPES = {"first.weight": ["float32[8, 8]", "float32[6, 8]"], "first.bias": ["float32[8]", "float32[6]"]}
REPLACED = [
    pytest.param(
        lambda: Two(nn.Softmax(-1)),
        lambda: Two(nn.Softmax(0)),
        {"address": "second", "attributes": {"Softmax": 1}},
        id="attribute",
    ),
    pytest.param(
        lambda: Two(nn.ReLU()),
        lambda: Two(nn.Tanh()),
        {"address": "second", "class_name": ["ReLU", "Tanh"], "operators": {"Relu": [1, 0], "Tanh": [0, 1]}},
        id="class",
    ),
    pytest.param(
        lambda: Two(nn.ReLU()), lambda: Two(nn.ReLU(), 6), {"address": "first", "parameters": SHAPES}, id="shape"
    ),
]


@pytest.mark.parametrize(("before", "after", "expected"), REPLACED)
def test_what_differs_in_a_call_is_named(
    before: Callable[[], nn.Module], after: Callable[[], nn.Module], expected: dict[str, Any], tmp_path: Path
) -> None:
    comparison = compare(written(tmp_path / "a.onnx", before().eval()), written(tmp_path / "b.onnx", after().eval()))
    (change,) = json.loads(msgspec.json.encode(comparison.changed))
    del_tags = {key: value for key, value in change.items() if key not in ("tag", "source_module")}
    assert del_tags == expected
    if "parameters" in expected:
        assert {one.key: list(one.entry) for one in comparison.entries} == expected["parameters"]


def test_a_default_that_is_written_and_one_that_is_left_out_are_the_same(tmp_path: Path) -> None:
    path = written(tmp_path / "a.onnx", Two(nn.Softmax(-1)).eval())
    model = onnx.load(path)
    (softmax,) = (node for node in model.graph.node if node.op_type == "Softmax")
    assert [(attribute.name, attribute.i) for attribute in softmax.attribute] == [("axis", -1)]
    del softmax.attribute[:]
    onnx.save(model, tmp_path / "b.onnx")
    assert not compare(path, tmp_path / "b.onnx").differs


def test_other_elements_are_found_when_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Two(nn.LayerNorm(8)).eval()
    before = written(tmp_path / "a.onnx", model)
    with torch.no_grad():
        model.second.bias.add_(1.0)
    after = written(tmp_path / "b.onnx", model)
    assert not compare(before, after).differs
    comparison = compare(before, after, values=True)
    assert comparison.values is not None
    assert (comparison.values.equal, comparison.values.different) == (3, ["second.bias"])
    assert comparison.differs


def test_a_weight_that_another_tool_put_in_place_is_compared_by_its_name_and_selectors_restrict_all(
    tmp_path: Path,
) -> None:
    before = written(tmp_path / "a.onnx", Two(nn.LayerNorm(8)).eval())
    proto = onnx.load(before)
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == "second.weight")
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) + 1, tensor.name))
    onnx.save(proto, tmp_path / "b.onnx")
    comparison = compare(before, tmp_path / "b.onnx", values=True)
    assert comparison.values is not None
    assert (comparison.values.equal, comparison.values.different) == (3, ["second.weight"])
    assert comparison.changed == []

    first = compare(before, tmp_path / "b.onnx", values=True, modules=["first"])
    assert (first.first.calls, first.first.nodes, first.first.entries) == (1, 1, 2)
    assert not first.differs
    assert list(first.first.operators) == ["Gemm"]
    text = format_comparison(first)
    assert "1 of 1 selected call in both files are the same" in text
    assert "2 of 2 parameters are stored in the same way in both files; 0 of these have other elements" in text
    assert "opset" not in text
    assert compare(before, tmp_path / "b.onnx", values=True, modules=["second"]).differs


def test_weights_are_not_read_unless_their_elements_are_compared(tmp_path: Path) -> None:
    path = written(tmp_path / "a.onnx", Two(nn.ReLU(), 64), weights="copy")
    data = tmp_path / "a.onnx.data"
    assert compare(path, path).first.bytes == path.stat().st_size + data.stat().st_size
    data.unlink()
    comparison = compare(path, path)
    assert not comparison.differs
    assert comparison.notes[0] == f"{data}, which holds weights, is missing"
    with pytest.raises(FileFormatError, match="which holds weights, is missing"):
        compare(path, path, values=True)


def test_a_sidecar_of_another_file_is_not_used(
    exported: Exporter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.onnx"
    shutil.copy(exported("blocks").path, path)
    shutil.copy(exported("bert").path.with_suffix(".hierarchy.json"), tmp_path / "a.hierarchy.json")
    with caplog.at_level("INFO", "modelexport.reading"):
        assert not compare(path, exported("blocks").path).differs
    assert "a.hierarchy.json does not belong to" in caplog.text


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return commands.run("compare", *arguments)


def test_the_command_reports_and_ends_with_status_0(two_layers: Path, unoptimised: Path) -> None:
    done = run(two_layers, unoptimised)
    assert (done.returncode, done.stderr) == (0, "")
    assert "0…1.dense (2)" in done.stdout
    document = json.loads(run(two_layers, unoptimised, "--json").stdout)
    addresses = [change["address"] for change in document["changed"]]
    assert addresses == [change.address for change in compare(two_layers, unoptimised).changed]


def test_a_file_without_tags_is_refused_in_one_line(exported: Exporter, tmp_path: Path) -> None:
    done = run(exported("blocks").path, tmp_path / "missing.onnx")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"modelexport: there is no file {tmp_path / 'missing.onnx'}\n"


def test_weights_that_a_quantizer_changed_are_told_without_their_scales(exported: Exporter, tmp_path: Path) -> None:
    quantize(exported("blocks").path, tmp_path / "q.onnx", to="int8-dynamic")
    text = format_comparison(compare(exported("blocks").path, tmp_path / "q.onnx"))
    assert re.search(r"-> uint8\[\d+, \d+\] by a step that is not recorded", text)
    assert "Unrecorded" not in text


def test_constants_that_steps_take_are_not_steps(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        inputs = (torch.ones(2, 3, 4, dtype=dtype),)
        export(nn.LSTM(4, 4).to(dtype).eval(), inputs, tmp_path / f"{dtype}.onnx", check=False)
    text = format_comparison(compare(tmp_path / "torch.float32.onnx", tmp_path / "torch.float64.onnx"))
    assert " by Slice, " in text
    assert "Constant" not in text
