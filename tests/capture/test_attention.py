"""Attention whose mask leaves no key to some rows, in every form that PyTorch takes and at several opsets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelexport import export, load
from modelexport.files.onnx_models import load_onnx
from truth import wrong

HIDDEN = float("-inf")
LOWEST = torch.finfo(torch.float32).min
attend = nn.functional.scaled_dot_product_attention


class Attends(nn.Module):
    """One input and one mask, True where a query may see a key, through all forms of attention."""

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> dict[str, torch.Tensor]:
        x_heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        few_heads = x_heads[:, :1]
        added = torch.zeros(seen.shape).masked_fill(~seen, HIDDEN)
        first = attend(x_heads, x_heads, x_heads, added)
        return {
            "boolean": attend(x_heads, x_heads, x_heads, seen),
            "added": first,
            "two layers": attend(first, first, first, added),
            "grouped": attend(x_heads, few_heads, few_heads, seen, enable_gqa=True),
            "grouped, three axes": attend(x_heads[0], few_heads[0], few_heads[0], seen[0, 0], enable_gqa=True),
            "three axes": attend(x, x, x, seen[:, 0]),
            "two axes": attend(x[1], x[1], x[1], seen[1, 0]),
            "five axes": attend(x_heads[None], x_heads[None], x_heads[None], seen[None]),
        }


def inputs(*hidden: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.ones(3, 1, 4, 4, dtype=torch.bool).tril()
    for row, *keys in hidden:
        seen[row, ..., keys] = False
    return torch.linspace(-2, 3, 96).sin().reshape(3, 4, 8), seen


@pytest.mark.parametrize(
    ("frontend", "opset"),
    [
        ("dynamo", 23),
        pytest.param("dynamo", 18, marks=pytest.mark.slow),
        pytest.param("torchscript", 17, marks=pytest.mark.slow),  # the encoder below is traced as well
    ],
)
def test_rows_without_keys_are_what_they_are_in_pytorch(frontend: Any, opset: int, tmp_path: Path) -> None:
    model, path = Attends().eval(), tmp_path / "m.onnx"
    export(model, inputs(), path, frontend=frontend, opset=opset, check=False)
    padded = inputs((0, 0, 1), (2, 0, 1, 2, 3))
    operators = [node.op_type for node in load_onnx(path).graph]
    assert "IsNaN" not in operators  # a selection of all weights, which took longer
    assert operators.count("ReduceMax") < len(model(*padded))  # layers share the condition
    assert all(one.isfinite().all() for one in model(*padded).values())
    assert (model(*padded)["boolean"][0, :, :2] == 0).all()
    assert wrong(path, model, padded) == ""


class Lowest(nn.Module):
    def forward(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(x, x, x, added), attend(x, x, x, added[1:2])


@pytest.mark.parametrize("opset", [pytest.param(18, marks=pytest.mark.slow), 23])
def test_rows_of_the_smallest_number_are_averages(opset: int, tmp_path: Path) -> None:
    """ONNX Runtime's own Attention would give zeros, and takes no mask with one row for all queries."""
    x = torch.linspace(-2, 3, 96).sin().reshape(1, 3, 4, 8)
    export(Lowest(), (x, torch.zeros(4, 4)), tmp_path / "m.onnx", frontend="dynamo", opset=opset, check=False)
    added = torch.zeros(4, 4)
    added[1] = LOWEST
    assert torch.allclose(Lowest()(x, added)[0][:, :, 1], x.mean(2))
    assert wrong(tmp_path / "m.onnx", Lowest(), (x, added)) == ""


class Separate(nn.Module):
    """Queries, keys, values and a mask for all heads as inputs; the keys of ``few`` are shared by heads."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor, few: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(query, key, value, added), attend(query, few, few, is_causal=True, enable_gqa=True)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
def test_attention_of_separate_inputs_has_dynamic_axes(opset: int, tmp_path: Path) -> None:
    def drawn(batch: int, heads: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        sizes = ((heads, queries, 8), (heads, keys, 8), (heads, keys, 8), (1, queries, keys), (heads // 2, keys, 8))
        return tuple(torch.linspace(-2, 3, batch * math.prod(size)).sin().reshape(batch, *size) for size in sizes)

    model, path = Separate(), tmp_path / "m.onnx"
    result = export(model, drawn(2, 4, 5, 7), path, frontend="dynamo", opset=opset, dynamic=True)
    assert not result.fixed
    assert not result.valid_if
    assert wrong(path, model, drawn(3, 6, 9, 4)) == ""


@pytest.mark.parametrize("frontend", ["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)])
def test_an_encoder_is_finite_in_rows_of_padding_alone(frontend: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval()
    x, padding = torch.rand(2, 5, 8), torch.zeros(2, 5).bool()
    inputs = {"src": x, "src_key_padding_mask": padding}
    result = export(model, inputs, tmp_path / "m.onnx", frontend=frontend, check=False)
    hidden = torch.tensor([[True], [False]]).expand(2, 5)
    feeds = {"src": x.numpy(), "src_key_padding_mask": hidden.numpy()}
    computed = torch.tensor(result.session().run(None, feeds)[0])
    # With gradients: PyTorch's fused encoder computes NaN in these rows.
    assert torch.allclose(model(x, src_key_padding_mask=hidden), computed, atol=1e-5)


@pytest.mark.slow
def test_queries_of_one_projection_are_normalized_in_segments(tmp_path: Path) -> None:
    """The attention that transformers exports in its place leaves these norms out."""
    glm_ocr = pytest.importorskip("transformers.models.glm_ocr.modeling_glm_ocr")
    configuration = pytest.importorskip("transformers.models.glm_ocr.configuration_glm_ocr")
    sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32, "patch_size": 4}
    model = glm_ocr.GlmOcrVisionModel(configuration.GlmOcrVisionConfig(depth=1, image_size=16, **sizes)).eval()
    inputs = {"hidden_states": torch.randn(16, 96), "grid_thw": torch.tensor([[1, 4, 4]])}
    result = export(model, inputs, tmp_path / "x.onnx", documents=False)
    assert {"q_norm", "k_norm"} <= {address.rpartition(".")[2] for address in load(result.path)}
