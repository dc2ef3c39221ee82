"""Nodes whose numbers do not tell their call, given to the call around their own: a count of a mask, for example."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.format import keys


class Mean(nn.Module):
    """A mean over what a mask leaves."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        count = mask.to(x.dtype).sum(1, keepdim=True)
        return (x * mask[..., None]).sum(1) / count


class Counted(nn.Module):
    """What is left out was counted before: an object has the count, which no call is seen to get."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(0)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask[..., None]).sum(1) / self.count


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean, self.out = nn.Linear(8, 8), Mean(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out(self.mean(self.linear(x), mask)).abs()


class CountedBefore(Pooled):
    """The caller counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Counted()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.mean.count = mask.to(x.dtype).sum(1, keepdim=True)
        return self.out(self.mean(self.linear(x), mask))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x * 2, mask)
        return result


def given(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(5, 6, 8, generator=generator).to(dtype), "mask": torch.ones(5, 6, dtype=torch.int64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("around", ["", "inner"])
def test_a_count_of_a_mask_that_is_given_to_a_call_around_its_own(
    around: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs, path = Outer(Pooled()).eval().to(dtype), given(dtype), tmp_path / "pooled.onnx"
    export(model, inputs, path)
    assert verify(model, inputs, path).agrees
    file = load_onnx(path)
    owned = {node.metadata_props[keys.CALL]: dict(node.metadata_props) for node in file.graph}
    count = next(node for node in file.graph if node.op_type == "ReduceSum" and node.inputs[0].shape == (5, 6))
    assert count.metadata_props[keys.CALL] == "inner.mean"
    count.metadata_props.update(owned[around])
    save_model(file, tmp_path / "faulty.onnx")
    report = verify(model, inputs, tmp_path / "faulty.onnx")
    assert report.diverging is not None and report.diverging.first_node == count.name
    assert report.diverging.address in (around, "inner.mean")
    assert "the tags are wrong" in report.diverging.reason


def test_a_count_that_the_caller_hides_in_an_object_is_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs, path = Outer(CountedBefore()).eval(), given(torch.float32), tmp_path / "counted.onnx"
    export(model, inputs, path)
    report = verify(model, inputs, path)
    assert [call.reason for call in report.calls if call.status == "differ"] == []
