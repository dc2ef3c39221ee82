"""What verify saves: copies of weights, hashes, and inspecting a model before each run. It changes no result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.pytorch.model_run import ModelRun
from modelexport.runtime.evidence import SeenTensor
from modelexport.runtime.fingerprints import NEAR, Index, fingerprint_of
from torch import nn

from modelexport import export, verify
from modelexport.core.calls import ModuleCall
from modelexport.pytorch.traced import state_remembered, untouched
from modelexport.runtime.sessions import open_session, run_session
from modelexport.verify import matching


def adding(weights: np.ndarray) -> ir.Model:
    """A model that adds a weight to its input."""
    kind, shape = ir.TensorType(ir.DataType.from_numpy(weights.dtype)), ir.Shape(weights.shape)
    x, w = ir.Value(name="x", type=kind, shape=shape), ir.Value(name="w", const_value=ir.Tensor(weights))
    node = ir.Node("", "Add", [x, w], name="add")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", kind, shape
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 20}, name="adding")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_session_computes_with_the_weights_that_it_is_given(dtype: type, optimized: bool) -> None:
    weights = np.arange(1000, dtype=dtype)
    session = open_session(adding(weights), optimized=optimized)
    assert np.array_equal(run_session(session, {"x": weights})["y"], 2 * weights)


def test_a_session_that_runs_the_nodes_one_by_one_does_not_copy_weights() -> None:
    weights = np.ones(1000, dtype=np.float32)
    session = open_session(adding(weights))
    weights[:] = 5
    assert np.all(run_session(session, {"x": np.zeros(1000, dtype=np.float32)})["y"] == 5)


class TwoOfOneChecksum(nn.Module):
    """Returns two different tensors with the same CRC-32: they differ by its polynomial."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x + 0, x + 0x1DB710641, x * 1


def test_different_contents_with_one_checksum_are_told_apart() -> None:
    run = ModelRun(TwoOfOneChecksum(), (torch.zeros(3, dtype=torch.int64),))
    one, other, again = (tensor.content for tensor in run.tensors if tensor.side == "outputs")
    assert one == again != other
    assert one.partition("-")[2] in other
    assert [run.array(content)[0] for content in (one, other)] == [0, 0x1DB710641]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls.append(1)
        return x + self.count


def test_a_remembered_state_is_restored_after_every_run() -> None:
    model = Counting()
    with state_remembered(model):
        for _ in range(3):
            with untouched(model):
                assert float(model(torch.zeros(1))) == 1
            assert (model.training, float(model.count), model.calls) == (True, 0, [])


class Sizes(nn.Module):
    """Writes down the sizes that it runs with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            RAN.append(tuple(x.shape))
        return self.linear(x)


RAN: list[tuple[int, ...]] = []
"""Not in the module, whose state is restored after every run."""


def test_few_sizes_show_what_many_would(tmp_path: Path) -> None:
    """Larger ones show a table as long as the example, and an odd one of a single row that a size is rounded."""
    model, inputs = Sizes().eval(), (torch.randn(2, 64, 6),)
    export(model, inputs, tmp_path / "file.onnx", dynamic=True)
    RAN.clear()
    assert verify(model, inputs, tmp_path / "file.onnx", perturb=False).agrees
    assert set(RAN) == {(2, 64, 6), (3, 72, 6), (1, 9, 6)}


def test_a_parameter_is_read_as_it_is_in_the_file_and_not_taken_from_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 30)).eval(), (torch.arange(12).reshape(3, 4),)
    export(model, inputs, tmp_path / "file.onnx")
    assert verify(model, inputs, tmp_path / "file.onnx").agrees
    with torch.no_grad():
        model[0].weight[49, 39] += 1  # of a row that the inputs do not look up
    report = verify(model, inputs, tmp_path / "file.onnx", others=False)
    assert report.parameters.differing == ["0.weight"]
    assert not report.agrees


def test_an_index_finds_what_is_near_as_one_by_one() -> None:
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(50).astype(np.float32) * (1 + 1e-4 * (i % 7)) for i in range(20)]
    arrays += [array * np.float32(1 + change) for array in arrays for change in (1e-7, 1e-4, 1.9e-4, 3e-4)]
    prints = [fingerprint_of(array) for array in [*arrays, np.zeros(50, np.float32), np.full(50, 1e18, np.float32)]]
    index: Index[int] = Index()
    for place, own in enumerate(prints):
        index.add(own, place)
    for apart in (NEAR, 1e-6, 8e-3):
        for own in prints:
            assert list(index.near(own, apart)) == [i for i, one in enumerate(prints) if own.near(one, apart)]


class Arrays:
    """A run with some contents."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays, call = arrays, ModuleCall("", 0)
        self.tensors = [SeenTensor(call, "outputs", "", one, str(arrays[one].dtype), (500,)) for one in arrays]

    def array(self, content: str) -> np.ndarray:
        return self.arrays[content]


class Nearly(nn.Module):
    """Adds little to its input, as a layer with fresh weights does whose branch is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * 1e-5


def test_values_that_are_nearly_the_same_are_not_compared_with_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 30
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(Nearly() for _ in range(layers))).eval(), (torch.randn(64, 16),)
    export(model, inputs, tmp_path / "file.onnx")
    compared: list[int] = []
    distance = matching.distance

    def counted(right: np.ndarray, found: np.ndarray) -> float:
        compared.append(right.size)
        return distance(right, found)

    monkeypatch.setattr(matching, "distance", counted)
    assert verify(model, inputs, tmp_path / "file.onnx", others=False, perturb=False).agrees
    assert len(compared) < 8 * layers


def test_the_nearest_content_is_found_as_one_by_one() -> None:
    generator = np.random.default_rng(0)
    arrays, mask = [], np.where(np.arange(500) % 5 == 0, -np.inf, 0).astype(np.float32)
    for step in (1e-7, 1e-6, 1e-5, 1e-4):
        array = generator.standard_normal(500).astype(np.float32)
        for _ in range(20):
            arrays += [array, array + mask, array.astype(np.float16)]
            array = array + (step * generator.standard_normal(500)).astype(np.float32)
    arrays += [mask, mask[::-1], np.zeros(500, np.float32), np.arange(500), np.arange(500)[::-1]]
    run = Arrays({str(array.dtype) + array.tobytes().hex(): array for array in arrays})
    contents = matching._Contents(run)
    for array in arrays:
        for noise in (0, 1e-7, 1e-5):
            value = (array * (1 + noise * generator.standard_normal(500))).astype(array.dtype)
            own = fingerprint_of(value)
            near = [right for right in run.arrays.values() if fingerprint_of(right).near(own)]
            least = min((matching.distance(right, value) for right in near), default=np.inf)
            content, found = contents.nearest(own, value, NEAR)
            assert found == pytest.approx(least, rel=1e-9)
            assert content is None or matching.distance(run.arrays[content], value) == found
