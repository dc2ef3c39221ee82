"""Packages whose parts a person names: methods of a model, of modules in it, functions; and their state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import modelexport
from commands import run
from modelexport import Part
from modelexport.errors import ModelExportError, UsageError
from modelexport.exporting.options import CaptureOptions, Options
from modelexport.files.manifest_file import read_manifest


class TwoTowers(nn.Module):
    """Images and texts in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), nn.Linear(4 * 4, 8))
        self.text = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))

    def encode_image(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.vision(pixel_values)

    def encode_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.text(input_ids).mean(1)

    def similarity(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return image @ text.T

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return self.similarity(self.encode_image(pixel_values), self.encode_text(input_ids))

    def count(self) -> int:
        return 3


PIXELS, IDS = torch.rand(2, 3, 8, 8), torch.randint(0, 50, (3, 7))
TOWERS: dict[str, Part | str] = {
    "image": Part(method="encode_image", inputs={"pixel_values": PIXELS}, dynamic=False),
    "text": Part(method="encode_text", inputs={"input_ids": IDS}),
    "scores": "similarity",
}


class Encoder(nn.Module):
    """One step of a streaming encoder: a chunk of frames, and what it keeps of earlier chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mix = nn.Linear(6, 8), nn.Linear(8, 8)

    def streaming_forward(self, frames: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = torch.tanh(self.mix(self.proj(frames).cumsum(1) + memory))
        return encoded, encoded[:, -1:]


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, token: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> dict[str, torch.Tensor]:
        c = self.cell(self.embed(token) + h) + c
        h = torch.tanh(c)
        return {"prediction": h, "h": h, "c": c}


class Transducer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor, self.joiner = Encoder(), Predictor(), nn.Linear(8, 12)

    def join(self, encoded: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        return self.joiner(torch.tanh(encoded + prediction))


STREAMING: dict[str, Part | str] = {
    "encoder": Part(
        method="encoder.streaming_forward",
        inputs={"frames": torch.rand(1, 5, 6), "memory": torch.zeros(1, 1, 8)},
        outputs=["encoded", "memory"],
        state=True,
    ),
    "predictor": Part(
        method="predictor",
        inputs={"token": torch.tensor([1]), "h": torch.zeros(1, 8), "c": torch.zeros(1, 8)},
        state=True,
    ),
    "joiner": Part(
        method="join",
        inputs={"encoded": torch.rand(1, 8), "prediction": torch.rand(1, 8)},
        outputs=["logits"],
        dynamic=False,
    ),
}


def made(model: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return model().eval()


def session(folder: Path, part: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(folder / f"{part}.onnx")


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers") / "clip"
    modelexport.export_package(made(TwoTowers), folder, parts=TOWERS, dynamic=True, check=False)
    return folder


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming") / "asr"
    modelexport.export_package(made(Transducer), folder, parts=STREAMING, dynamic=True, check=False)
    return folder


def test_each_part_computes_what_its_method_does(towers: Path) -> None:
    image = session(towers, "image").run(None, {"pixel_values": PIXELS.numpy()})[0]
    np.testing.assert_allclose(image, made(TwoTowers).encode_image(PIXELS).detach(), rtol=1e-5, atol=1e-6)


def test_equal_names_connect_parts(towers: Path) -> None:
    scores = next(part for part in read_manifest(towers).parts if part.name == "scores")
    assert scores.inputs == ["image", "text"]


def test_modules_have_the_addresses_and_entries_of_the_whole_model(towers: Path) -> None:
    text = modelexport.load(towers / "text.onnx")
    assert [*text["text.0"].parameters] == ["text.0.weight"]


def test_weights_are_on_disk_once(towers: Path) -> None:
    size = sum(parameter.nbytes for parameter in made(TwoTowers).parameters())
    assert sum((towers / file).stat().st_size for file in read_manifest(towers).weights) < size + 2000


@pytest.mark.slow
def test_a_part_that_is_not_dynamic_has_the_sizes_of_the_example(streaming: Path) -> None:
    assert [value.shape for value in session(streaming, "joiner").get_inputs()] == [[1, 8], [1, 8]]


def test_verify_compares_each_part_and_the_parts_in_turn(towers: Path) -> None:
    report = modelexport.verify_package(made(TwoTowers), None, towers)
    assert report.agrees
    assert [run.part for run in report.runs] == ["image", "text", "scores"]


def test_another_model_does_not_agree(towers: Path) -> None:
    torch.manual_seed(1)
    assert not modelexport.verify_package(TwoTowers().eval(), None, towers).agrees


def test_the_module_of_a_method_owns_what_the_method_runs(streaming: Path) -> None:
    encoder = modelexport.load(streaming / "encoder.onnx")
    assert {*encoder} == {".", "encoder", "encoder.proj", "encoder.mix"}


def test_a_state_is_paired_by_name(streaming: Path) -> None:
    parts = {part.name: part.state for part in read_manifest(streaming).parts}
    assert parts["predictor"] == {"next.h": "h", "next.c": "c"}


def test_verify_runs_a_state_over_steps_and_with_another_length(streaming: Path) -> None:
    report = modelexport.verify_package(made(Transducer), None, streaming)
    assert report.agrees
    steps = {(run.sequence, run.step) for run in report.runs if run.part == "encoder"}
    assert steps == {(name, step) for name in ("example", "another length") for step in range(3)}


def test_greedy_decoding_over_three_chunks_is_that_of_pytorch(streaming: Path) -> None:
    model, chunks = made(Transducer), torch.rand(3, 1, 5, 6)
    found = decoded(streaming, chunks.numpy())
    assert found == decoded_by_pytorch(model, chunks)
    assert len(set(found)) > 1


def decoded(folder: Path, chunks: np.ndarray) -> list[int]:
    encoder, predictor, joiner = (session(folder, part) for part in ("encoder", "predictor", "joiner"))
    zeros = np.zeros((1, 8), np.float32)
    memory, tokens, state = zeros[None], [1], {"h": zeros, "c": zeros}
    for frames in chunks:
        encoded, memory = encoder.run(["encoded", "next.memory"], {"frames": frames, "memory": memory})
        for frame in encoded[0]:
            feeds = {"token": np.array(tokens[-1:]), **state}
            prediction, h, c = predictor.run(["prediction", "next.h", "next.c"], feeds)
            logits = joiner.run(["logits"], {"encoded": frame[None], "prediction": prediction})[0]
            if logits.argmax():  # 0 is blank
                tokens.append(int(logits.argmax()))
                state = {"h": h, "c": c}
    return tokens


def decoded_by_pytorch(model: Any, chunks: torch.Tensor) -> list[int]:
    zeros = torch.zeros(1, 8)
    memory, tokens, h, c = zeros[None], [1], zeros, zeros
    for frames in chunks:
        encoded, memory = model.encoder.streaming_forward(frames, memory)
        for frame in encoded[0]:
            found = model.predictor(torch.tensor(tokens[-1:]), h, c)
            logits = model.join(frame[None], found["prediction"])
            if logits.argmax():
                tokens.append(int(logits.argmax()))
                h, c = found["h"], found["c"]
    return tokens


def test_a_state_without_names_is_paired_by_type_and_shape(tmp_path: Path) -> None:
    part = Part(
        method="encoder.streaming_forward",
        inputs={"frames": torch.rand(1, 5, 6), "memory": torch.zeros(1, 1, 8)},
        outputs=["encoded", "kept"],
        state=True,
        dynamic=False,
    )
    result = modelexport.export_package(made(Transducer), tmp_path / "p", parts={"encoder": part}, check=False)
    assert result.manifest.parts[0].state == {"kept": "memory"}


def test_a_function_that_calls_the_model_is_given_again_to_verify(tmp_path: Path) -> None:
    parts = {"twice": Part(method=lambda model, x: {"y": model(x) * 2}, inputs={"x": torch.rand(2, 3)})}
    model = nn.Linear(3, 2)
    modelexport.export_package(model, tmp_path / "p", parts=parts, check=False)
    with pytest.raises(UsageError, match="twice was exported from a function: give it again"):
        modelexport.verify_package(model, None, tmp_path / "p")
    assert modelexport.verify_package(model, parts, tmp_path / "p").agrees


def test_a_number_of_tokens_is_refused_for_a_package_that_does_not_generate(tmp_path: Path) -> None:
    parts = {"linear": Part(method="forward", inputs={"input": torch.rand(2, 3)})}
    model = nn.Linear(3, 2)
    modelexport.export_package(model, tmp_path / "p", parts=parts, check=False)
    with pytest.raises(UsageError, match="which is verified without new_tokens: leave it out"):
        modelexport.verify_package(model, None, tmp_path / "p", new_tokens=8)


@pytest.mark.parametrize("given", [{"dynamic": False}, {"options": Options(capture=CaptureOptions(dynamic=False))}])
def test_fixed_axes_are_asked_for_by_part(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fix those of a part that you name, Part\(dynamic=False\)"):
        modelexport.export_package(nn.Linear(3, 2), tmp_path / "p", parts={"linear": "forward"}, **given)


MODEL = """
import torch
from torch import nn


class Streaming(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def step(self, x, memory):
        y = self.linear(x) + memory
        memory = y[:, -1:]
        if x.shape[1] == 7:
            y = -y
        return {"y": y, "memory": memory}


def make():
    torch.manual_seed(0)
    return Streaming().eval()
"""


def test_the_command_names_parts_and_their_state(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    shapes = (
        '{"step": {"x": {"dtype": "float32", "shape": [1, 3, 4]}, "memory": {"dtype": "float32", "shape": [1, 1, 4]}}}'
    )
    (tmp_path / "inputs.json").write_text(shapes)
    words = ("--part", "step=step", "--state", "step", "--inputs", "inputs.json")
    done = run("export", "net.py:make", "-o", "p/", *words, cwd=tmp_path)
    assert "step takes again: next.memory as memory" in done.stdout, done.stderr
    assert "step: the file is right only for " in done.stdout
    checked = run("verify", "p/", "--model", "net.py:make", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "of the parts in turn return what PyTorch returns" in checked.stdout


WRONG: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no such method": ({"a": "encode_imag"}, r"TwoTowers has no method encode_imag; did you mean encode_image\?"),
    "no such module": ({"a": "visio.forward"}, "TwoTowers has no method visio.forward"),
    "an attribute that is not a method": ({"a": "training"}, "TwoTowers has no method training"),
    "an unknown input": (
        {"a": Part(method="encode_image", inputs={"pixels": PIXELS})},
        r"a takes no input pixels.*: it is a\(pixel_values",
    ),
    "a missing input": ({"a": Part(method="similarity", inputs={"text": IDS})}, r"a needs image, .* it is a\(image"),
    "an input that does not fit": (
        {"a": Part(method="encode_image", inputs={"pixel_values": torch.rand(2, 3)})},
        "a does not run with pixel_values",
    ),
    "no tensors": ({"a": "count"}, "a returns no tensors"),
    "names for another number of values": (
        {"a": Part(method=lambda model, x: (x, x), inputs={"x": IDS}, outputs=["y"])},
        "a returns 2 values, and 1 name is given",
    ),
    "no state": (
        {"a": Part(method="encode_text", inputs={"input_ids": IDS}, state=True, dynamic=False)},
        "a returns nothing that it takes again",
    ),
    "a state that is not there": (
        {"a": Part(method="encode_text", inputs={"input_ids": IDS}, state={"text": "input_ids"}, dynamic=False)},
        "a does not return text: it returns a",
    ),
    "a state of an input that is not there": (
        {"a": Part(method="encode_text", inputs={"input_ids": IDS}, state={"a": "memory"}, dynamic=False)},
        "a does not take memory: it returns a",
    ),
    "a name that leads out of the folder": ({"../a": "encode_image"}, r"a part cannot be named '../a'"),
    "no part": ({}, "no part is named"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_one_line(name: str, tmp_path: Path) -> None:
    parts, said = WRONG[name]
    with pytest.raises(ModelExportError, match=said) as raised:
        modelexport.export_package(made(TwoTowers), tmp_path / "p", parts=parts, check=False)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "p").exists()


def test_inputs_of_a_part_that_does_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no part picture: inputs are given by part \(image\)"):
        inputs = {"picture": {"pixel_values": PIXELS}}
        modelexport.export_package(made(TwoTowers), tmp_path / "p", parts={"image": "encode_image"}, inputs=inputs)


COMMANDS = {
    "a state of no part": (["--part", "a=encode", "--state", "b"], "--state b: no --part has this name"),
    "fixed sizes of no part": (["--part", "a=encode", "--fixed", "b"], "--fixed b: no --part has this name"),
    "a part without a method": (["--part", "a"], "--part a: write NAME=METHOD"),
    "a kind as well": (["--part", "a=encode", "--parts", "whole"], "--parts finds parts, and --part names them"),
    "two parts of one name": (["--part", "a=encode", "--part", "a=decode"], "two parts have one name"),
    "a cache of a fixed size": (["--part", "a=encode", "--static-cache", "8"], "are for a model that generates"),
    "a file": (["--part", "a=encode", "-o", "x.onnx"], "x.onnx"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_is_one_line(name: str, tmp_path: Path) -> None:
    words, said = COMMANDS[name]
    where = [] if "-o" in words else ["-o", "p/"]
    done = run("export", "bert-tiny", *where, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


class Cached(nn.Module):
    """A step whose cache is so long that its numbers are not in alphabetical order, with a number beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def step(self, x: torch.Tensor, cache: list[torch.Tensor], scale: list[Any]) -> dict[str, Any]:
        new = []
        x = x * scale[0] * scale[1] * self.scale
        for state in cache:
            x = x + state
            new.append(x)
        return {"y": x, "cache": new}


@pytest.mark.slow
def test_a_nested_state_is_paired_by_its_names(tmp_path: Path) -> None:
    model = Cached().eval()
    inputs = {"x": torch.rand(2, 4), "cache": [torch.zeros(2, 4) for _ in range(11)], "scale": [torch.ones(4), 2.0]}
    part = Part(method="step", inputs=inputs, state=True)
    result = modelexport.export_package(model, tmp_path / "p", parts={"step": part}, check=False)
    assert len(result.manifest.parts[0].state) == 11
    assert modelexport.verify_package(model, None, tmp_path / "p").agrees
