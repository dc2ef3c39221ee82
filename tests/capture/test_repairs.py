"""The smallest model of each operator that torch.onnx translates wrongly or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.capture.repairs import translations
from truth import wrong

A, B = torch.linspace(-2, 3, 40).reshape(2, 4, 5), torch.tensor([[0, 3], [1, -100]])
IDS = torch.tensor([1, 2, 9, 2, 0, 5])
BAGS = torch.tensor([0, 2, 2, 4])


class Computes(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Parameter(torch.linspace(-1, 1, 40).reshape(10, 4))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.table, *inputs)


F = nn.functional
LOGITS = torch.linspace(-1, 2, 24).reshape(2, 4, 3).sin()
LABELS = torch.tensor([[0, 3, 1], [2, -100, 1]])
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "squeeze an axis of another size": (lambda t, x: x.squeeze(1) * 1.5, (A,)),
    "squeeze an axis of size 1": (lambda t, x: x[:, :1].squeeze(1) * 1.5, (A,)),
    "label smoothing": (lambda t, x, y: F.cross_entropy(x, y, label_smoothing=0.2), (LOGITS, LABELS)),
    "label smoothing, weighted": (
        lambda t, x, y: F.cross_entropy(x, y, t[0].exp(), label_smoothing=0.2),
        (LOGITS, LABELS),
    ),
    "label smoothing, each": (
        lambda t, x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"),
        (LOGITS, LABELS),
    ),
    "class probabilities": (lambda t, x, y: F.cross_entropy(x, y), (LOGITS[..., 0], LOGITS[..., 1].softmax(-1))),
    "bags": (lambda t, i, o: F.embedding_bag(i, t, o), (IDS, BAGS)),
    "bags, weighted": (lambda t, i, o: F.embedding_bag(i, t, o, mode="sum", per_sample_weights=i * 0.5), (IDS, BAGS)),
    "bags, the largest": (lambda t, i, o: F.embedding_bag(i, t, o, mode="max"), (IDS, BAGS)),
    "bags, padded": (lambda t, i, o: F.embedding_bag(i, t, o, padding_idx=2), (IDS, BAGS)),
    "adaptive maxima": (lambda t, x: F.adaptive_max_pool2d(x, 3, return_indices=True), (A[None].clone(),)),
    "histogram": (lambda t, x: torch.histc(x, 6, -1.0, 2.0), (A,)),
    "histogram of all": (lambda t, x: torch.histc(x, 6), (A,)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_computes_what_pytorch_does(case: str, tmp_path: Path) -> None:
    function, inputs = CASES[case]
    model = Computes(function).eval()
    result = export(model, inputs, tmp_path / "m.onnx", frontend="dynamo", check=False)
    assert wrong(tmp_path / "m.onnx", model, inputs) == ""
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


def test_every_operator_of_the_table_is_there() -> None:
    """A canary: if torch dropped a name, the error would appear far away."""
    assert all(isinstance(operator, torch._ops.OpOverload) for operator in translations())
