"""What inner calls return can be outputs of the file, named by address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from modelexport import export, load, retag, verify, verify_reference
from modelexport.capture import FrontEnd
from modelexport.errors import UsageError
from modelexport.tagged.encodings import Encoding
from modelexport.tools.optimizers.optimize_tools import optimize_file


class Two(nn.Module):
    """Returns two tensors, the second as it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lin(x).tanh(), x


class Model(nn.Module):
    """Calls one block twice, and returns what a module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Two(), Two()])
        self.shared = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.shared(block(x)[0])
        return x


EXPOSED = {
    *("blocks.0:output.0", "blocks.0:output.1", "blocks.1:output.0", "blocks.1:output.1"),
    *("blocks.0.lin", "shared", "shared@1"),
}


@pytest.fixture
def model() -> Model:
    return Model().eval()


def seen(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """What hooks see, by the names that the outputs should have."""
    found: dict[str, Any] = {}

    def look(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            several = isinstance(output, tuple)
            for index, one in enumerate(output if several else [output]):
                name = f"{path}:output.{index}" if several else path
                found[f"{name}@1" if name in found else name] = one.detach().numpy()

        return hook

    hooks = [module.register_forward_hook(look(path)) for path, module in model.named_modules() if path]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def outputs_of(path: Path, x: torch.Tensor) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": x.numpy()}), strict=True))


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_exposed_outputs_are_what_hooks_see_and_stand_behind_those_of_the_model(
    model: Model, frontend: FrontEnd, tmp_path: Path
) -> None:
    x = torch.randn(3, 4)
    expose = ["blocks.*", "blocks.0.lin", "shar*"]
    result = export(
        model, {"x": x}, tmp_path / "m.onnx", frontend=frontend, expose=expose, verify=True, reference=True, check=False
    )
    assert result.verified is not None
    assert result.verified.agrees
    assert verify_reference(result).agrees
    found = outputs_of(result.path, x)
    assert set(list(found)[1:]) == EXPOSED
    right = seen(model, x)
    for name in EXPOSED:
        np.testing.assert_allclose(found[name], right[name], atol=1e-6)


@pytest.mark.parametrize("tags_as", [pytest.param("attributes", marks=pytest.mark.slow), "functions"])
def test_other_encodings_expose_them_too(model: Model, tags_as: Encoding, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    expose = ["blocks.0.lin", "shar*"]
    result = export(
        model, {"x": x}, tmp_path / "m.onnx", tags_as=tags_as, granularity="all", expose=expose, check=False
    )
    names = [output.name for output in onnx.load(result.path).graph.output]
    assert names[1:] == ["blocks.0.lin", "shared", "shared@1"]
    assert verify(model, {"x": x}, result).agrees


@pytest.mark.slow
def test_they_survive_a_tool_and_can_be_cut_out(model: Model, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    file = export(model, {"x": x}, tmp_path / "m.onnx", expose=["class:Two"], dynamic=True, check=False)
    optimize_file(file, "ort-basic", tmp_path / "o.onnx")
    assert verify(model, {"x": x}, tmp_path / "o.onnx").agrees
    assert outputs_of(tmp_path / "o.onnx", x).keys() == outputs_of(file.path, x).keys()
    proto = onnx.load(tmp_path / "o.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "plain.onnx")
    retag(tmp_path / "plain.onnx", source=file, output=tmp_path / "again.onnx")
    assert verify(model, {"x": x}, tmp_path / "again.onnx").agrees
    load(file).extract("blocks.1", tmp_path / "block.onnx")
    assert onnxruntime.InferenceSession(tmp_path / "block.onnx").run(None, {"x": x.numpy()})


def test_verify_says_that_an_output_has_the_address_of_another_call(model: Model, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    path = export(model, {"x": x}, tmp_path / "m.onnx", expose=["shar*"], check=False).path
    proto = onnx.load(path)
    first, second = proto.graph.output[1:]
    swapped = {first.name: second.name, second.name: first.name}
    for names in [*(node.input for node in proto.graph.node), *(node.output for node in proto.graph.node)]:
        names[:] = [swapped.get(name, name) for name in names]
    onnx.save(proto, path)
    path.with_suffix(".hierarchy.json").unlink()
    report = verify(model, {"x": x}, path)
    claims = {claim.where: msgspec.structs.astuple(claim)[2:] for claim in report.claims if claim.where in swapped}
    assert not report.agrees
    assert claims == {"shared": ("shared", "shared@1"), "shared@1": ("shared@1", "blocks.1")}  # which returns it, too


def test_what_cannot_be_exposed_is_one_line(model: Model, tmp_path: Path) -> None:
    x = {"x": torch.randn(3, 4)}
    with pytest.raises(UsageError, match=r"no module call of the model matches 'block.\*'; did you mean blocks.1"):
        export(model, x, tmp_path / "m.onnx", expose=["block.*"])
    with pytest.raises(UsageError, match=r"\. cannot be exposed, since it returns what the file returns"):
        export(model, x, tmp_path / "m.onnx", expose=["."])
    assert not list(tmp_path.iterdir())
