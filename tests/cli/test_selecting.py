"""Every command that takes modules takes the same words for them, and says what is near where they match nothing."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import modelexport
from exports import Exporter
from modelexport.cli.command_parsers import app
from modelexport.errors import UsageError
from modelexport.packages.measured_parts import cost_parts
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session
from modelexport.tagged.file import read_tagged
from modelexport.tools.compare.against_file import verify_against
from modelexport.tools.compare.change_checks import check_changes
from modelexport.tools.cut.replacing import replace
from modelexport.tools.cut.splitting import split
from modelexport.tools.cut.substitutes import Identity
from modelexport.tools.devices.placing import PlacementRule, place

UNION = ["encoder.layer.[0-1].output", "class:BertAttention", "!/BertModel/BertEncoder/BertLayer.0/**"]
"""A range, a class, and a tag glob that takes away."""
PICKED = ["encoder.layer.1.attention", "encoder.layer.1.output"]
NOTHING = "encoder.layers.0.output"
NEAR = "did you mean encoder.layer."


@functools.cache
def data_for(file: Path) -> str:
    """A file with the inputs of one run."""
    folder = Path(tempfile.mkdtemp(prefix="modelexport-test-"))
    atexit.register(shutil.rmtree, folder)
    np.savez(folder / "data.npz", **make_random_inputs(read_tagged(file).model, open_session(file)))
    return str(folder / "data.npz")


Arguments = Callable[[Path, list[str]], list[str]]
COMMANDS: dict[str, Arguments] = {
    "nodes": lambda file, words: [str(file), *words],
    "select": lambda file, words: [str(file), *words, "--as", "ort"],
    "extract": lambda file, words: [str(file), *words, "-o", "cut/"],
    "verify": lambda file, words: [str(file), "--against", str(file), *(f"--module={word}" for word in words)],
    "kit": lambda file, words: [str(file), "-o", "kit/", *(f"--module={word}" for word in words)],
    "compare": lambda file, words: [str(file), str(file), *words],
    "cost": lambda file, words: [str(file), *words],
    "values": lambda file, words: [str(file), *words],
    "profile": lambda file, words: [str(file), *words, "--runs", "1"],
    "sensitivity": lambda file, words: [str(file), *words, "--to", "int4", "--data", data_for(file)],
    "split": lambda file, words: [str(file), "-o", "stages/", *(f"--at={word}" for word in words)],
    "replace": lambda file, words: [str(file), *words, "--with-identity", "-o", "replaced.onnx"],
    "quantize": lambda file, words: [
        str(file),
        "-o",
        "int4.onnx",
        "--to",
        "int4",
        *(f"--only={word}" for word in words),
    ],
    "place": lambda file, words: [str(file), "--rule", f"gpu: {' '.join(words)}", "--no-check"],
}


def test_no_command_that_takes_selectors_is_left_out() -> None:
    found = {
        name
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
        for parameter in command.params
        if "SELECTOR" in (parameter.metavar or "")
    }
    # Modules of a model, in tests/exporting/test_expose.py, and selectors with a number, in tests/tools/to_torch.
    assert found - {"export", "to-torch"} == set(COMMANDS)


@pytest.mark.sweep
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_a_union_without_what_is_taken_away(
    exported: Exporter, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = exported("bert").path
    as_json = [] if name == "select" else ["--json"]  # which prints what another tool reads
    done = CliRunner().invoke(app, [name, *COMMANDS[name](path, UNION), *as_json])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    tagged = read_tagged(path)
    inside = {call.address for call in tagged.select(*PICKED).inside}
    assert {call.address for call in tagged.select(*UNION).inside} == inside
    document = json.loads(done.stdout)
    if name in ("cost", "profile", "sensitivity", "values"):
        assert {row["address"] for row in document["rows"]} == inside
    if name == "nodes":
        assert all(inside & {row["call"], *row["also"]} for row in document)
    if name == "quantize":
        assert document["methods"] == {"int4": 5}
    if name == "extract":
        assert len(list((tmp_path / "cut").glob("*.onnx"))) == len(PICKED)
    if name == "split":
        assert len(document["stages"]) == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_what_matches_nothing_is_an_error_with_near_names(
    exported: Exporter, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [name, *COMMANDS[name](exported("bert").path, ["pooler", NOTHING])])
    assert isinstance(done.exception, UsageError)
    assert NEAR in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_python_takes_the_same_words(exported: Exporter, tmp_path: Path) -> None:
    path = exported("bert").path
    tagged = modelexport.load(path)
    table = cost_parts(path)[""]
    takes: list[Callable[[list[str]], object]] = [
        lambda words: tagged.select(*words),
        lambda words: table.rows(only=tagged.select(*words)),
        lambda words: modelexport.compare(path, path, modules=words),
        lambda words: check_changes(path, path, modules=words),
        lambda words: verify_against(path, path, modules=words),
        lambda words: split(tagged, tmp_path / "stages", at=words),
        lambda words: replace(path, words, Identity(), tmp_path / "replaced.onnx"),
        lambda words: place(tagged, [PlacementRule("gpu", tuple(words))], check=False),
    ]
    for take in takes:
        take(UNION)
        with pytest.raises(UsageError, match=NEAR):
            take([NOTHING])
