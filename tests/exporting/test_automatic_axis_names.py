"""Dynamic axes that nobody named are called what docstrings and the ONNX standard call them, else input and axis."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.cli.name_and_axis_options import NameOptions, read_interface
from modelexport.pytorch.inputs.documented_axes import documented_axes


def sizes(path: Path) -> dict[str, list[str | int]]:
    graph = onnx.load(path).graph
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor, decoder_ids: torch.Tensor) -> torch.Tensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): The tokens.
            mask (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*): Ones.
            decoder_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): Other tokens.
        """
        return self.embed(input_ids) * mask.mean() + self.embed(decoder_ids).mean()


class Inside(nn.Module):
    """Has a model inside that documents two of the arguments, a convolution, a recurrent layer, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.convolution, self.recurrent = Encoder(), nn.Conv2d(3, 2, 3), nn.RNN(4, 4, batch_first=True)

    def forward(self, input_ids, mask, decoder_ids, image, series, left, right):  # type: ignore[no-untyped-def]
        words = self.encoder(input_ids, mask, decoder_ids)
        return words, self.convolution(image), self.recurrent(series)[0], left @ right, left.nonzero()


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | int]]:
    path = tmp_path_factory.mktemp("named") / "x.onnx"
    ids = {name: torch.ones(2, length, dtype=torch.long) for name, length in (("input_ids", 5), ("decoder_ids", 7))}
    inputs = ids | {
        "mask": torch.ones(2, 5),
        "image": torch.rand(2, 3, 8, 9),
        "series": torch.rand(3, 6, 4),
        "left": torch.rand(3, 5),
        "right": torch.rand(5, 4),
    }
    interface = read_interface(NameOptions(axes=["right:1=wide,left:0=tall"]))
    export(Inside().eval(), inputs, path, dynamic=True, interface=interface, check=False)
    return sizes(path)


def test_equal_sizes_of_one_documented_word_have_one_name(named: dict[str, list[str | int]]) -> None:
    assert named["input_ids"] == ["batch", "sequence"]
    assert named["mask"] == ["batch", "sequence"]


def test_another_size_of_a_documented_word_is_named_after_its_input(named: dict[str, list[str | int]]) -> None:
    assert named["decoder_ids"] == ["batch", "decoder_ids_sequence"]


def test_axes_of_convolutions_and_recurrent_layers_have_the_words_of_the_standard(
    named: dict[str, list[str | int]],
) -> None:
    assert named["image"] == ["image_batch", 3, "height", "width"]
    assert named["output.1"] == ["image_batch", 2, "height - 2", "width - 2"]
    assert named["series"] == ["series_batch", "series_sequence", 4]


def test_other_axes_are_named_after_the_first_input_and_the_axis(named: dict[str, list[str | int]]) -> None:
    assert named["left"] == ["tall", "left_axis_1"]
    assert named["right"] == ["left_axis_1", "wide"]
    assert named["output.3"] == ["tall", "wide"]
    assert named["output.4"] == ["output_4_axis_0", 2]


def test_sizes_that_an_output_has_both_have_two_names(tmp_path: Path) -> None:
    class Similarity(nn.Module):
        def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            """text (`torch.Tensor` of shape `(batch_size, 4)`), and
            image (`torch.Tensor` of shape `(batch_size, 4)`)
            """
            return text @ image.T

    export(Similarity(), (torch.rand(3, 4), torch.rand(3, 4)), tmp_path / "x.onnx", dynamic=True, check=False)
    assert sizes(tmp_path / "x.onnx")["output"] == ["batch", "image_batch"]


def test_axes_are_read_from_docstrings_of_several_styles() -> None:
    class Documented(nn.Module):
        def forward(self, google, numpy, lines, sums, other):  # type: ignore[no-untyped-def]
            """Compute.

            google (Tensor): Audio of shape `(num_channels, seq_len, 1)`.
            numpy : Tensor, shape [batch, heights]
            lines (`torch.Tensor`):
                The noisy input with the following shape `(batch, E, height, height)`.
            sums: Tensor of shape (batch + 1, lambda_length)
            other: of shape (batch,)
            """

    words = documented_axes(Documented(), {"google": 3, "numpy": 2, "lines": 4, "sums": 2, "other": 2, "none": 1})
    assert words == {
        "google": ("channels", "seq", ""),
        "numpy": ("batch", "heights"),
        "lines": ("batch", "", "", ""),
        "sums": ("", "lambda"),
    }


def test_the_axis_of_an_output_that_is_called_by_a_number_begins_with_no_number(tmp_path: Path) -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"21": x[x > 0]}

    export(Positive(), (torch.rand(4),), tmp_path / "x.onnx", dynamic=True, check=False)
    assert sizes(tmp_path / "x.onnx")["21"] == ["_21_axis_0"]
