"""On any file, a command ends with success, a failed check, or one clear message, quickly and with little memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from corpus import copied, seeded
from graph_mutators import mutate_graph
from limited import fault, run
from mutators import (
    JUNK,
    Random,
    choose,
    encoded,
    mutate_bytes,
    mutate_document,
    mutate_json,
    mutate_json_file,
    mutate_model,
    mutate_safetensors,
)
from package_mutators import mutate_package

QUICK, SLOW = 360, 2_000
"""Cases in all, spread over the kinds by their shares."""
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


def hostile_adapter(random: Random, folder: Path) -> tuple[str, list[str]]:
    file = choose(random, ["adapter_config.json", "adapter_model.safetensors", "gone", "fifo"])
    if file == "adapter_config.json":
        what = mutate_json_file(random, folder / "adapter" / file)
    elif file == "adapter_model.safetensors":
        what = mutate_safetensors(random, folder / "adapter" / file)
    else:
        what = f"{file} {choose(random, ['adapter_config.json', 'adapter_model.safetensors'])}"
        (folder / "adapter" / what.split()[1]).unlink()
        if file == "fifo":
            os.mkfifo(folder / "adapter" / what.split()[1])
    name = choose(random, ["plain.onnx", "copied.onnx", "functions.onnx", "linked.onnx"])
    if random.random() < 0.3:
        what = f"{what}, {mutate_model(random, folder / name)}"
    commands = [
        ["update-weights", name, "--adapter", "adapter", "-o", "out.onnx"],
        ["update-weights", name, "--adapter", "adapter", "-o", "other.onnx"],
        ["update-weights", name, "new.safetensors", "--adapter", "adapter", "-o", "out.onnx"],
        ["update-weights", name, "--adapter", "adapter", "--as-inputs", "-o", "out.onnx"],
        ["update-weights", name, "--adapter", "adapter", "--adapter", "adapter", "-o", "out.onnx"],
        ["update-weights", "package", "--adapter", "adapter", "-o", "out"],
    ]
    return f"{file}: {what}", choose(random, commands)


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


def hostile_model_measured(random: Random, folder: Path) -> tuple[str, list[str]]:
    """A model for the commands that count, cut and put together; none that runs it in ONNX Runtime."""
    file = f"{choose(random, ['plain', 'plain', 'functions', 'attributes', 'copied', 'linked'])}.onnx"
    what = mutate_model(random, folder / file)
    commands = [
        ["cost", file],
        ["cost", file, "--size", "batch=2", "--csv"],
        ["cost", file, "blocks.0", "--json"],
        ["cost", file, "--html", "out.html"],
        ["cost", file, "--node-data", "out.json"],
        ["split", file, "--stages", "2", "-o", "out"],
        ["split", file, "--max-mb", "0.001", "-o", "out"],
        ["split", file, "--stages", "2", "--by", "flops", "-o", "old-stages"],
        ["split", file, "--at", "head", "-o", "out"],
        ["replace", file, "blocks.1", "--with-identity", "-o", "out.onnx"],
        ["rename", file, "-o", "out.onnx"],
        ["replace", "plain.onnx", "blocks.1", "--with", file, "-o", "out.onnx"],
        ["replace", file, "blocks.0", "--with", "sub.onnx", "-o", "out.onnx"],
        ["replace", file, "head", "--with-op", "com.example:Head", "--body", "keep", "-o", "out.onnx"],
        ["place", file, "--rule", "gpu: blocks.0", "--no-check", "-o", "out.json"],
        ["compare", file, "plain.onnx", "--markdown"],
        ["compare", "plain.onnx", file, "--fail-on", "cost,structure"],
    ]
    return what, choose(random, commands)


def hostile_package(random: Random, folder: Path) -> tuple[str, list[str]]:
    name = choose(random, ["package", "old-stages"])
    what = mutate_package(random, folder / name)
    commands = [
        ["tree", name],
        ["tree", name, "--check"],
        ["nodes", name, "blocks.0"],
        ["compare", name, "package"],
        ["compare", "old-stages", name, "--json"],
        ["extract", name, "head", "-o", "out.onnx"],
        ["update-weights", name, "new.safetensors", "-o", "out"],
        ["update-weights", name, "new.safetensors", "-o", "package"],
        ["retag", name, "--from", "package", "-o", "out"],
        ["retag", "package", "--from", name, "-o", "out"],
        ["split", "plain.onnx", "--stages", "2", "-o", name],
        ["verify", name, "--against", "other.onnx"],
        ["verify", name],
        ["verify", name, "--model", "factory.py:make"],
    ]
    return f"{name}: {what}", choose(random, commands)


def hostile_arrays(random: Random, folder: Path) -> tuple[str, list[str]]:
    """Inputs to run a file with."""
    run = ["--runs", "1", "--warmup", "1"]
    match int(random.integers(3)):
        case 0:
            file = folder / "arrays.json"
            spec = {"x": {"dtype": "float32", "shape": [2, 12], "range": [0, 1]}}
            file.write_text(encoded(random, mutate_json(random, mutate_json(random, spec))), encoding="utf-8")
        case 1:
            file = folder / "arrays.npz"
            np.savez(file, x=np.zeros((2, 12), np.float32))
            file.write_bytes(mutate_bytes(random, file.read_bytes()))
        case _:
            file = folder / "arrays.safetensors"
            save_file({"x": np.zeros((2, 12), np.float32)}, file)
            mutate_safetensors(random, file)
    commands = [
        ["profile", "plain.onnx", "--inputs", file.name, *run],
        ["compare", "plain.onnx", "flat.onnx", "--fail-on", "outputs", "--inputs", file.name],
    ]
    return file.name, choose(random, commands)


def hostile_graph(random: Random, folder: Path) -> tuple[str, list[str]]:
    """A model for the commands that run it."""
    file = f"{choose(random, ['plain', 'flat'])}.onnx"
    model = onnx.load(folder / file)
    what = mutate_graph(random, model)
    (folder / "run.onnx").write_bytes(model.SerializeToString())
    commands = [
        ["profile", "run.onnx", "--runs", "1", "--warmup", "1"],
        ["profile", "plain.onnx", "--against", "run.onnx", "--runs", "1", "--warmup", "1"],
        ["compare", "run.onnx", "plain.onnx", "--fail-on", "outputs"],
        ["verify", "run.onnx", "--against", "plain.onnx"],
        ["verify", "plain.onnx", "--against", "run.onnx"],
        ["place", "run.onnx", "--rule", "cpu: blocks.0", "-o", "out.json"],
        ["split", "run.onnx", "--stages", "2", "--by", "time", "-o", "out"],
        ["optimize", "run.onnx", "--with", "ort-extended", "-o", "out.onnx"],
    ]
    return f"{file}: {what}", choose(random, commands)


def hostile_words(random: Random, folder: Path) -> tuple[str, list[str]]:
    """What a person, or a script of somebody else's, writes on the command line."""
    word = str(choose(random, WORDS))
    file = choose(random, ["plain.onnx", "functions.onnx"])
    commands = [
        ["nodes", file, word],
        ["extract", file, word, "-o", "out.onnx"],
        ["extract", file, "--each", word, "-o", "out"],
        ["replace", file, word, "--with-identity", "-o", "out.onnx"],
        ["cost", file, word],
        ["cost", file, "--sort", word],
        ["cost", file, "--size", f"batch={word}"],
        ["cost", file, "--depth", word],
        ["tree", file, "--depth", word],
        ["split", file, "--at", word, "-o", "out"],
        ["split", file, "--max-mb", word, "-o", "out"],
        ["split", file, "--stages", word, "-o", "out"],
        ["place", file, "--no-check", "--rule", f"gpu: {word}"],
        ["place", file, "--no-check", "--rule", f"{word}: blocks.0"],
        ["place", file, "--no-check", "--rule", word],
        ["replace", file, "head", "--with", "sub.onnx", "--map", word, "-o", "out.onnx"],
        ["replace", file, "head", "--with", "sub.onnx", "--map", f"x={word}", "-o", "out.onnx"],
        ["replace", file, "head", "--with-op", word, "-o", "out.onnx"],
        ["replace", file, "head", "--with-op", "a:B", "--attribute", f"x={word}", "-o", "out.onnx"],
        ["replace", file, "head", "--with-op", "a:B", "--attribute", f"{word}=1", "--body", "keep", "-o", "out.onnx"],
        ["replace", file, "head", "--with-op", "a:B", "--input", word, "-o", "out.onnx"],
        ["compare", file, "flat.onnx", "--fail-on", word],
        ["optimize", file, "--with", word, "-o", "out.onnx"],
        ["verify", "old-stages", "--against", word],
        ["tree", word],
        ["adopt", word, "-o", "out.onnx"],
        ["adopt", "flat.onnx", "-o", word],
        ["export", word, "-o", "out.onnx"],
        ["report", file, "--size", word, "-o", "out.html"],
        ["export", "factory.py:make", "--axes", word, "-o", "out.onnx"],
        ["split", file, "--stages", "2", "-o", word],
        ["export", "factory.py:make", "--input-names", word, "-o", "out.onnx"],
        ["hierarchy", f"factory.py:{word}"],
    ]
    return repr(word[:60]), choose(random, commands)


WORDS = [
    *(text for text in JUNK if isinstance(text, str) and "\0" not in text and text != "../../../etc/passwd"),
    "*",
    "**",
    "!*",
    "!",
    "class:",
    "class:*",
    "class:[",
    "[",
    "[a-",
    "[9-0]",
    "[0-99999999999]",
    "*" * 200,
    "**." * 60 + "x",
    "*a" * 60,
    "[0-9999]" * 40,
    "blocks.[0-",
    "{",
    "}",
    "x=",
    "=",
    "=x",
    ":",
    "a:",
    ":b",
    "a:b:c",
    "nan",
    "inf",
    "-inf",
    "-1",
    "1e400",
    "99999999999999999999",
    "0",
    "0x10",
    "1_0",
    "٣",
    "[" * 5000,
    '{"a": 1}',
    "[1, 'a']",
    '[[1], [2, "x"]]',
    "null",
    "true",
    '"x"',
    "1e999",
    "--",
    "-x",
    "\udcff",
    "x" * 300,
    "fifo",
    ".",
    "plain.hierarchy.json",
    "new.safetensors",
    "package",
    "gpu(a)",
    "a; cpu(=b",
    "blocks.0 !blocks.0",
    "modelexport",
    "os:getcwd",
    "0:x",
    "x:0=y",
    "json",
    "a,b",
    ",,",
    "a=b,a=c",
]


Kind = Callable[[Random, Path], tuple[str, list[str]]]
KINDS: dict[Kind, float] = {
    hostile_model: 0.4,
    hostile_model_measured: 0.2,
    hostile_document: 0.1,
    hostile_weights: 0.07,
    hostile_data: 0.03,
    hostile_adapter: 0.06,
    hostile_checkpoint: 0.03,
    hostile_inputs: 0.03,
    hostile_package: 0.07,
    hostile_arrays: 0.02,
    hostile_words: 0.05,
    hostile_graph: 0.03,
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
    if ended.status == 2:
        left += [name for name in ("out", "out.onnx", "out.html", "out.json") if Path(name).exists()]
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


@pytest.mark.sweep
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
