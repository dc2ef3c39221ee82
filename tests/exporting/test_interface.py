"""Names of inputs, outputs and dynamic axes, and outputs that are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.cli.name_and_axis_options import NameOptions, read_interface, spelled_out
from modelexport.errors import CheckError, UsageError
from modelexport.exporting.graph_passes import finish
from modelexport.exporting.requested_names import RequestedNames


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.linear(x) + bias
        return {"hidden": hidden, "wide": self.wide(hidden), "pooled": hidden.mean(1)}


INPUTS = {"x": torch.ones(1, 3, 4), "bias": torch.ones(1, 3, 4)}


def shapes(path: Path) -> dict[str, list[str | int]]:
    graph = onnx.load(path).graph
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


def test_inputs_outputs_and_axes_have_the_names_that_were_asked_for(tmp_path: Path) -> None:
    interface = read_interface(
        NameOptions(
            input_names="tokens,offset",
            output_names="pooled=embedding",
            outputs="embedding,hid*",
            axes=["batch,sequence"],
        )
    )
    result = export(Net(), INPUTS, tmp_path / "x.onnx", dynamic=True, interface=interface, check=False)
    assert shapes(tmp_path / "x.onnx") == {
        "tokens": ["batch", "sequence", 4],
        "offset": ["batch", "sequence", 4],
        "hidden": ["batch", "sequence", 4],
        "embedding": ["batch", 4],
    }
    assert {call.address for call in result.hierarchy.calls if call.nodes} == {"", "linear"}


def test_inputs_given_in_another_order_than_that_of_forward_are_matched(tmp_path: Path) -> None:
    model = Net().eval()
    given = {"bias": torch.full((2, 3, 4), 5.0), "x": torch.ones(2, 3, 4)}
    export(
        model,
        given,
        tmp_path / "x.onnx",
        interface=read_interface(NameOptions(input_names="tokens,offset")),
        check=False,
    )
    assert list(shapes(tmp_path / "x.onnx"))[:2] == ["tokens", "offset"]
    assert verify(model, given, tmp_path / "x.onnx").agrees


@pytest.mark.slow
def test_a_file_with_other_names_is_verified(tmp_path: Path) -> None:
    model, interface = (
        Net().eval(),
        read_interface(NameOptions(input_names="tokens,offset", output_names="a,b,c")),
    )
    export(model, INPUTS, tmp_path / "x.onnx", interface=interface, check=False)
    assert verify(model, INPUTS, tmp_path / "x.onnx").agrees


def test_a_suggested_name_of_an_axis_is_taken_where_it_fits(tmp_path: Path) -> None:
    wide = {name: value.repeat(2, 1, 1) for name, value in INPUTS.items()}
    names = RequestedNames(
        axes={("x", 0): "batch"},
        suggested={
            ("bias", 0): "images",
            ("x", 1): "frames",
            ("x", 2): "width",
            ("x", 7): "more",
            ("other", 0): "more",
        },
    )
    export(Net(), wide, tmp_path / "x.onnx", dynamic=True, interface=names, check=False)
    # `bias` has the batch of `x`, and the width is that of the weights.
    assert shapes(tmp_path / "x.onnx")["x"] == ["batch", "frames", 4]
    assert shapes(tmp_path / "x.onnx")["bias"] == ["batch", "frames", 4]


def test_an_axis_that_the_capture_fixes_is_refused(tmp_path: Path) -> None:
    interface = read_interface(NameOptions(axes=["x:2=width"]))
    with pytest.raises(
        UsageError, match=r"axis 2 of x cannot be dynamic as width: .* fixes it at 4 .*; do not name this axis"
    ):
        export(Net(), INPUTS, tmp_path / "x.onnx", dynamic=True, interface=interface)
    assert not list(tmp_path.iterdir())


WRONG = [
    (NameOptions(output_names="hidden=x,wide=x"), "two outputs would have the name x"),
    (NameOptions(input_names="a,b,c"), "3 names for 2 inputs"),
    (NameOptions(input_names="z=a"), "no input z"),
    (NameOptions(outputs="nothing"), "no output nothing"),
    (NameOptions(axes=["x:7=batch"]), "no axis 7"),
    (NameOptions(axes=["batch,sequence,width"]), "axis 2 of x cannot be dynamic as width"),
    (NameOptions(axes=["batch,sequence,width,more"]), "no input has an axis 3, which would be more"),
]


@pytest.mark.parametrize(
    ("asked", "told"), [WRONG[0], *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in WRONG[1:])]
)
def test_what_is_not_there_is_said(asked: NameOptions, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        export(Net(), INPUTS, tmp_path / "x.onnx", dynamic=True, interface=read_interface(asked))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Flat()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(int(x.shape[0]), int(x.shape[1]) * int(x.shape[2]))


def test_an_axis_that_only_a_reshape_fixes_is_refused(tmp_path: Path) -> None:
    """Tracing turns the size into a constant of the Reshape; the axis of the input stays dynamic."""
    interface = read_interface(NameOptions(axes=["batch"]))
    with pytest.raises(CheckError, match=r"inner fixes a size that was to be dynamic, batch .*: Reshape"):
        export(
            Fixed(),
            {"x": torch.ones(2, 5, 4)},
            tmp_path / "x.onnx",
            frontend="torchscript",
            dynamic=True,
            interface=interface,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_axis_that_is_dynamic_throughout_passes(tmp_path: Path) -> None:
    interface = read_interface(NameOptions(axes=["batch,sequence"]))
    inputs = {"input": INPUTS["x"]}
    result = export(nn.Linear(4, 4), inputs, tmp_path / "x.onnx", dynamic=True, interface=interface, sizes=True)
    assert result.check is not None
    assert result.check.status == "passed"


def test_dynamic_takes_names_and_stays_a_flag() -> None:
    assert spelled_out(["--dynamic", "batch,sequence", "m"]) == ["--axes", "batch,sequence", "m"]
    assert spelled_out(["m", "--dynamic", "x:0=batch"]) == ["m", "--axes", "x:0=batch"]
    assert spelled_out(["--dynamic", "x:-1=width"]) == ["--axes", "x:-1=width"]
    assert spelled_out(["--dynamic=batch"]) == ["--axes", "batch"]
    for words in (["--dynamic", "bert-tiny"], ["--dynamic", "nets.py:make"], ["m", "--dynamic"]):
        assert spelled_out(words) == words


@pytest.mark.parametrize(("parameters", "name"), [([], "places"), (["places"], "output.places")])
def test_an_output_has_the_name_of_a_constant_but_not_that_of_a_parameter(parameters: list[str], name: str) -> None:
    places = ir.Value(name="places", const_value=ir.tensor(np.ones(2, np.float32), name="places"))
    model = ir.Model(ir.Graph([], [places], nodes=[], initializers=[places]), ir_version=10)
    finish(model, ["places"], parameters)
    assert [value.name for value in model.graph.outputs] == [name]
