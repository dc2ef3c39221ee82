"""On any file, a command ends with success, a failed check, or one clear message, quickly and with little memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import fault, run
from corpus import copied, seeded
from mutators import (
    Random,
    choose,
    mutate_bytes,
    mutate_document,
    mutate_json,
    mutate_json_file,
    mutate_model,
    mutate_safetensors,
)

QUICK, SLOW = 330, 10_000
"""The number of cases, divided among the kinds by their shares."""
BATCH = 11


def hostile_model(random: Random, folder: Path) -> tuple[str, list[str]]:
    name = choose(random, ["plain", "plain", "functions", "functions", "attributes", "copied", "linked"])
    what = mutate_model(random, folder / f"{name}.onnx")
    file = f"{name}.onnx"
    command = choose(
        random,
        [
            ["tree", file], ["tree", file, "--check"], ["tree", file, "--json"], ["nodes", file, "."],
            ["nodes", file, "blocks.0"], ["compare", file, "flat.onnx"], ["compare", "flat.onnx", file, "--values"],
            ["extract", file, "blocks.1", "-o", "out.onnx"], ["extract", file, "--each", "Linear", "-o", "out"],
            ["update-weights", file, "new.safetensors", "-o", "out.onnx"], ["adopt", file, "-o", "out.onnx"],
            ["retag", file, "--from", "plain.onnx", "-o", "out.onnx"], ["strip", file, "-o", "out.onnx"],
            ["retag", "flat.onnx", "--from", file, "-o", "out.onnx"], ["inline", file, "-o", "out.onnx"],
        ],
    )  # fmt: skip
    return what, command


def hostile_document(random: Random, folder: Path) -> tuple[str, list[str]]:
    suffix = choose(random, [".hierarchy.json", ".hierarchy.json", ".dag.json", ".operations.json"])
    what = mutate_document(random, folder / "plain.onnx", suffix)
    commands = [
        ["tree", "plain.onnx"], ["nodes", "plain.onnx", "."], ["compare", "plain.onnx", "flat.onnx"],
        ["extract", "plain.onnx", "blocks.0", "-o", "out.onnx"], ["verify", "plain.onnx"],
        ["update-weights", "plain.onnx", "new.safetensors", "-o", "out.onnx"],
        ["retag", "flat.onnx", "--from", "plain.onnx", "-o", "out.onnx"],
    ]  # fmt: skip
    return what, choose(random, commands)


def hostile_weights(random: Random, folder: Path) -> tuple[str, list[str]]:
    name, commands = choose(
        random,
        [
            ("new.safetensors", [["update-weights", "plain.onnx", "new.safetensors", "-o", "out.onnx"]]),
            ("plain.reference.safetensors", [["verify", "plain.onnx"]]),
            ("linked.safetensors", [["extract", "linked.onnx", "blocks.0", "-o", "out.onnx"],
                                    ["compare", "linked.onnx", "plain.onnx", "--values"],
                                    ["tree", "linked.onnx", "--check"]]),
        ],
    )  # fmt: skip
    return f"{name}: {mutate_safetensors(random, folder / name)}", choose(random, commands)


def hostile_data(random: Random, folder: Path) -> tuple[str, list[str]]:
    data = folder / "copied.onnx.data"
    data.write_bytes(mutate_bytes(random, data.read_bytes()))
    commands = [["extract", "copied.onnx", "head", "-o", "out.onnx"], ["compare", "copied.onnx", "plain.onnx"]]
    return "data", choose(random, commands)


def hostile_checkpoint(random: Random, folder: Path) -> tuple[str, list[str]]:
    checkpoint = folder / "checkpoint"
    file = choose(random, ["config.json", "config.json", "model.safetensors.index.json", "shard"])
    if file == "shard":
        what = mutate_safetensors(random, sorted(checkpoint.glob("*.safetensors"))[0])
    elif file == "config.json" and random.random() < 0.5:
        config = json.loads((checkpoint / file).read_text())
        key = choose(random, [key for key, value in config.items() if isinstance(value, int)])
        config[key] = choose(random, [10_000_000, 10**12, -1, 0, 2**62, "x"])
        (checkpoint / file).write_text(json.dumps(config))
        what = f"{key} = {config[key]}"
    else:
        what = mutate_json_file(random, checkpoint / file)
    return what, ["hierarchy", "checkpoint"]


def hostile_inputs(random: Random, folder: Path) -> tuple[str, list[str]]:
    spec = {"x": {"dtype": "float32", "shape": [2, 4], "range": [0, 1]}}
    changed = mutate_json(random, mutate_json(random, spec) if random.random() < 0.3 else spec)
    (folder / "inputs.json").write_text(json.dumps(changed))
    return json.dumps(changed)[:200], ["hierarchy", "factory.py:make", "--mode", "traced", "--inputs", "inputs.json"]


Kind = Callable[[Random, Path], tuple[str, list[str]]]
KINDS: dict[Kind, float] = {
    hostile_model: 0.6,
    hostile_document: 0.14,
    hostile_weights: 0.1,
    hostile_data: 0.04,
    hostile_checkpoint: 0.06,
    hostile_inputs: 0.06,
}


def check(kind: Kind, seed: int, corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run one case; returns what was wrong with its result."""
    random = seeded(kind.__name__, seed)
    copied(corpus, folder)
    monkeypatch.chdir(folder)
    what, command = kind(random, folder)
    ended = run(*command)
    wrong = fault(ended)
    left = [path.name for path in folder.iterdir() if path.name.startswith(".modelexport-")]
    if ended.status == 2 and Path("out.onnx").exists():
        left.append("out.onnx")
    return [f"seed {seed}, {what}, {' '.join(command)}: {wrong or left}"] if wrong or left else []


def batches(cases: int) -> list[object]:
    return [
        pytest.param(kind, first, id=f"{kind.__name__}-{first}")
        for kind, share in KINDS.items()
        for first in range(0, round(cases * share), BATCH)
    ]


def run_batch(kind: Kind, first: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    for seed in range(first, first + BATCH):
        wrong += check(kind, seed, corpus, tmp_path / str(seed), monkeypatch)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("kind", "first"), batches(QUICK))
def test_no_file_makes_a_command_fail_without_a_reason(
    kind: Kind, first: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batch(kind, first, corpus, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), batches(SLOW))
def test_none_of_many_files_does(
    kind: Kind, first: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batch(kind, first + 10**6, corpus, tmp_path, monkeypatch)
