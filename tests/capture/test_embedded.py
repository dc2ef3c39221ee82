"""Modules with a model of transformers inside, attention masks that hide nothing, and ScriptModules."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import zoo.embedded
from modelexport import export
from modelexport.errors import CaptureError
from modelexport.pytorch.calls.traced_tree import masks_kept
from modelexport.pytorch.runs.repeatability import find_unrepeatable


@pytest.mark.slow
@pytest.mark.parametrize("case", zoo.embedded.CASES, ids=lambda case: case.name)
def test_a_module_around_a_transformers_model(case: Any, tmp_path: Path) -> None:
    model, inputs = case()
    result = export(model, inputs, tmp_path / "m.onnx", frontend="dynamo", verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


def test_a_mask_that_selects_nothing_scatters_nothing(tmp_path: Path) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_scatter(mask[..., None], self.norm(x[mask]))

    x, nothing = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    result = export(Scattered(), (x, nothing), tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert np.array_equal(result.session().run(None, {"x": x.numpy(), "mask": nothing.numpy()})[0], x.numpy())


class Bidirectional(nn.Module):
    """Attends causally by its mask, and both ways where there is none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers import masking_utils

        keep = not masking_utils._ignore_causal_mask_sdpa(torch.ones(x.shape[:2]).bool(), x.shape[1], x.shape[1], 0, 0)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool() if keep else None
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_model_that_computes_otherwise_without_its_mask_is_told() -> None:
    x = torch.linspace(-1, 1, 24).reshape(1, 6, 4).sin()
    model = Bidirectional()
    assert [one.kind for one in find_unrepeatable(model, (x,))] == ["mask"]
    with masks_kept():
        kept = model(x)
    assert not torch.allclose(kept, model(x))


def test_what_is_asked_before_a_mask_is_left_out_is_still_that() -> None:
    """A canary: `masks_kept` answers a question of another package."""
    from transformers import masking_utils

    for function in (masking_utils._ignore_causal_mask_sdpa, masking_utils._ignore_bidirectional_mask_sdpa):
        assert "is_torchdynamo_exporting()" in inspect.getsource(function)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.inner(x))
        if x.shape[0] > 2:
            y = y + 1
        return y


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.part = torch.jit.script(Part().eval())
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.part(x) + self.part(x * 2))


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_a_scripted_part_is_one_call_with_its_own_parameters(frontend: Any, tmp_path: Path) -> None:
    model, x = Scripted().eval(), torch.linspace(-1, 1, 12).reshape(3, 4)
    part = model.part
    result = export(model, (x,), tmp_path / "m.onnx", frontend=frontend, verify=True, check=False)
    assert model.part is part
    assert result.verified is not None
    assert result.verified.agrees
    assert [call.address for call in result.hierarchy.calls] == ["", "part", "part@1", "out"]
    parameters = {key for one in result.hierarchy.initializers for key in one.parameter}
    assert {"part.inner.weight", "part.inner.bias"} <= parameters


def _running(x: torch.Tensor) -> torch.Tensor:
    y = x
    for i in range(x.size(0)):
        y = torch.tanh(y * 1.5) + x[i]
    return y


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.run = torch.jit.script(_running)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.run(x)
        return result


def test_a_loop_of_a_scripted_function_is_of_the_call_that_runs_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Running(), nn.Linear(4, 4)).eval()
    result = export(model, (torch.rand(3, 4),), tmp_path / "m.onnx", frontend="torchscript", dynamic=True, check=False)
    owners = {node.op_type: node.metadata_props["modelexport.call"] for node in ir.load(result.path).graph.all_nodes()}
    assert {owners[kind] for kind in ("Loop", "Mul", "Tanh", "Add")} == {"1"}


@pytest.mark.slow
def test_a_scripted_model(tmp_path: Path) -> None:
    model, x = Scripted().part, torch.linspace(-1, 1, 12).reshape(3, 4)
    result = export(model, {"x": x}, tmp_path / "m.onnx", verify=True, check=False)
    assert result.verified is not None
    assert result.verified.agrees


@pytest.mark.slow
def test_a_scripted_part_decides_by_a_size_between_one_and_the_example(tmp_path: Path) -> None:
    model, x = Scripted().eval(), torch.rand(3, 4)
    result = export(model, (x,), tmp_path / "m.onnx", frontend="dynamo", dynamic=True)
    assert [condition.formula for condition in result.valid_if] == ["x_axis_0 >= 3"]


class Repeated(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.size(0)):
            x = self.inner(x)
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # a FutureWarning since torch 2.14
@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_a_scripted_part_that_loops_over_its_parts_is_refused_in_plain_words(frontend: Any, tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(Repeated()))
    with pytest.raises(CaptureError, match=r"Error in 0( \(.*\))?: a module is a ScriptModule with loops, .* before"):
        export(model, torch.rand(3, 4), tmp_path / "m.onnx", frontend=frontend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # a FutureWarning since torch 2.14
def test_a_scripted_part_of_dynamic_sizes(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 3)), nn.ReLU()).eval()
    result = export(model, (torch.ones(2, 4),), tmp_path / "m.onnx", dynamic=True, check=False)
    assert [value.shape for value in result.session().get_inputs()] == [["input_axis_0", 4]]
