"""Models that run in float64 with the numbers of float32."""

from __future__ import annotations

import torch
from torch import nn

from modelexport.pytorch.runs.model_trace import in_float64


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.7, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * self.weight * 0.1).exp()


def test_in_float64_only_the_numbers_that_a_model_has_are_rounded() -> None:
    model, x = Scaled(), torch.tensor([0.2, 0.9])
    with in_float64(model, (x,)) as inputs:
        result = model(*inputs)
        result.sum().backward()
    weight, tenth = torch.tensor([0.7, 0.3]).double().requires_grad_(), torch.tensor(0.1).double()
    wanted = (x.double() * weight * tenth).exp()
    torch.testing.assert_close(result, wanted, rtol=1e-15, atol=0)
    wanted.sum().backward()
    torch.testing.assert_close(model.weight.grad, weight.grad, rtol=1e-14, atol=0)
