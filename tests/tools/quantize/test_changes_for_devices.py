"""Changes that make a device compute nodes right: what they compute, who owns their nodes, and recipes of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import modelexport
from exports import Shared
from modelexport.errors import UsageError
from modelexport.files.recipe_files import Recipe, Rule
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.tools.quantize.changes_for_devices import CHANGES

FEEDS = {"input": np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)}


@pytest.fixture
def files(shared: Shared) -> tuple[Path, Path]:
    """A small model, and its version with int8 activations."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4)
        modelexport.export(
            torch.nn.Sequential(*layers), {"input": torch.tensor(FEEDS["input"])}, folder / "model.onnx", check=False
        )
        modelexport.quantize(folder / "model.onnx", folder / "int8.onnx", to="int8-static", data=[FEEDS])

    folder = shared("changes-for-devices", make)
    return folder / "model.onnx", folder / "int8.onnx"


def off(first: Path, second: Path) -> float:
    """The difference of two files, as a share of the size of the first's result."""
    (right,), (found,) = (run_session(open_session(path), FEEDS).values() for path in (first, second))
    return float(np.linalg.norm(right - found) / np.linalg.norm(right))


@pytest.mark.parametrize(
    ("change", "operators"),
    [
        ("apart", {"Neg": 22}),
        ("definition", {"LayerNormalization": 0, "Gelu": 0, "Erf": 1}),
        ("int16", {}),
        ("float", {"QuantizeLinear": 0}),
        ("processor", {"If": 1, "Gemm": 2, "Greater": 1}),
    ],
)
def test_a_change_computes_the_same_or_comes_nearer_to_the_unquantized_file(
    files: tuple[Path, Path], tmp_path: Path, change: str, operators: dict[str, int]
) -> None:
    model, int8 = files
    changed = tmp_path / "changed.onnx"
    result = modelexport.quantize(int8, changed, recipe=Recipe((Rule(".", change),)))
    assert set(result.methods) == {change}
    quantized_less = change in ("int16", "float")
    assert off(int8, changed) < 1e-6 or quantized_less
    if quantized_less:
        assert off(model, changed) < off(model, int8)
    tagged = read_tagged(changed)
    assert not tagged.coverage.untagged
    assert tagged.coverage.exact <= len(read_tagged(int8).nodes), "no new node says that the exporter recorded it"
    every = [node.op_type for node in tagged.nodes]
    assert {operator: every.count(operator) for operator in operators} == operators


def test_a_recipe_names_nodes_and_gives_the_same_file_again(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = files
    normalization = next(node.name for node in read_tagged(model).nodes if node.op_type == "LayerNormalization")
    rules = Rule("1", "definition", (normalization or "",)), Rule("3", "int8-dynamic")
    first, again = tmp_path / "first.onnx", tmp_path / "again.onnx"
    result = modelexport.quantize(model, first, recipe=Recipe(rules))
    assert (result.methods, result.kept) == ({"int8-dynamic": 1, "definition": 1}, ["0", "2"])
    modelexport.quantize(model, again, recipe=tmp_path / "first.recipe.yaml")
    assert first.read_bytes() == again.read_bytes()


class Places(torch.nn.Module):
    """Elements at constant places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.tensor([[0, 2], [1, -1]]), torch.tensor([[3, 1], [-2, 0]])
        return x[rows, columns]


def test_constant_places_become_what_devices_have(tmp_path: Path) -> None:
    file, changed = tmp_path / "places.onnx", tmp_path / "changed.onnx"
    modelexport.export(Places(), {"x": torch.tensor(FEEDS["input"])}, file, check=False)
    right = run_session(open_session(file), {"x": FEEDS["input"]})
    modelexport.quantize(file, changed, recipe=Recipe((Rule(".", "definition"),)))
    operators = [node.op_type for node in read_tagged(changed).nodes]
    assert "Gather" in operators
    assert "GatherND" not in operators
    found = run_session(open_session(changed), {"x": FEEDS["input"]})
    assert all(np.array_equal(array, found[name]) for name, array in right.items())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("1", "apart", ("node_of_no_file",)), "has no node 'node_of_no_file' in 1"),
        (Rule("1", "apart"), f"'apart' ({CHANGES['apart'].words}) changes nothing in 1"),
        (Rule("1", "int16"), "changes nothing in 1"),
        (Rule("3", "int8-dynamic", ("node",)), "a rule of 'int8-dynamic' names nodes"),
    ],
)
def test_a_rule_that_changes_nothing_is_refused(
    files: tuple[Path, Path], tmp_path: Path, rule: Rule, message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        modelexport.quantize(files[0], tmp_path / "out.onnx", recipe=Recipe((rule,)))
    assert message in str(raised.value)
    assert msgspec.to_builtins(Rule("1", "apart")) == {"select": "1", "method": "apart"}
