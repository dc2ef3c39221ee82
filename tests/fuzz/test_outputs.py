"""No command writes over what it reads, or over what is not a regular file: every command, every output, every name."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import onnx
import onnx_ir as ir
import pytest
import torch

import modelexport
from corpus import copied
from limited import run
from modelexport import load, rename, update_weights
from modelexport.cli.command_list import COMMANDS
from modelexport.cli.command_parsers import load_command
from modelexport.cli.overwrite_guard import ReadMark, WrittenMark
from modelexport.errors import OutputError
from modelexport.files import folder_locks, onnx_models
from modelexport.files.folder_locks import only_writer
from modelexport.files.linked_weights import data_files, names_other_files, weights_faults
from modelexport.files.ordered_moves import Move
from modelexport.files.protobuf_writing import to_proto
from modelexport.format.package_manifest import MANIFEST
from modelexport.runtime.checked_writing import checked_and_written
from modelexport.tools.cut.splitting import split


@dataclass(frozen=True)
class Case:
    """A command that would succeed, without its outputs; the options that name these; what it reads."""

    words: list[str]
    outputs: list[str]
    reads: list[str]
    needed: list[str] = field(default_factory=list)
    """An output that is needed where another one is tried."""


EXPORT = ["export", "factory.py:make", "-o", "x.onnx", "--frontend", "torchscript", "--no-check"]
DATA = ["copied.onnx", "copied.onnx.data", "copied.operations.json"]
CASES = {
    "strip": Case(["attributes.onnx"], ["-o"], ["attributes.onnx", "attributes.dag.json"]),
    "inline": Case(["functions.onnx"], ["-o"], ["functions.onnx", "functions.hierarchy.json"]),
    "adopt": Case(["copied.onnx"], ["-o"], DATA),
    "retag": Case(["copied.onnx", "--from", "plain.onnx"], ["-o"], [*DATA, "plain.onnx"]),
    "optimize": Case(["copied.onnx", "--with", "onnxscript"], ["-o"], DATA),
    "quantize": Case(["copied.onnx", "--to", "int8-weights"], ["-o"], DATA),
    "update-weights": Case(["copied.onnx", "new.safetensors"], ["-o"], [*DATA, "new.safetensors"]),
    "extract": Case(["copied.onnx", "blocks.0"], ["-o"], DATA),
    "replace": Case(["copied.onnx", "head", "--with", "sub.onnx"], ["-o"], [*DATA, "sub.onnx"]),
    "rename": Case(["copied.onnx"], ["-o"], DATA),
    "split": Case(["copied.onnx", "--stages", "2"], ["-o"], DATA),
    "place": Case(
        ["copied.onnx", "--rule", "gpu: blocks.0", "--no-check", "--library", "x=library.so"],
        ["-o"],
        [*DATA, "library.so"],
    ),
    "cost": Case(["copied.onnx"], ["--html", "--node-data"], DATA),
    "values": Case(["copied.onnx"], ["--html", "--node-data"], DATA),
    "profile": Case(
        ["copied.onnx", "--inputs", "arrays.npz", "--against", "plain.onnx", "--runs", "1", "--warmup", "1"],
        ["--html", "--node-data"],
        [*DATA, "arrays.npz", "plain.onnx"],
    ),
    "sensitivity": Case(
        ["copied.onnx", "--to", "int8-dynamic", "--data", "arrays.npz"],
        ["--html", "--node-data"],
        [*DATA, "arrays.npz"],
    ),
    "report": Case(["copied.onnx"], ["-o"], DATA),
    "compare": Case(["copied.onnx", "plain.onnx"], ["--html"], [*DATA, "plain.onnx"]),
    "verify": Case(["copied.onnx", "--against", "plain.onnx"], ["--html"], [*DATA, "plain.onnx"]),
    "kit": Case(["copied.onnx"], ["-o"], DATA),
    "to-torch": Case(["copied.onnx"], ["-o"], DATA),
    "example": Case(["sentences.txt"], ["-o"], []),
    "inputs": Case(["factory.py:make", "--inputs", "inputs.json"], ["-o"], ["factory.py", "inputs.json"]),
    "export": Case(
        ["factory.py:make", "--inputs", "inputs.json", "--frontend", "torchscript"],
        ["-o", "--dag-dir"],
        ["factory.py", "inputs.json"],
        ["-o", "fine.onnx"],
    ),
}


SUFFIXES = {"inputs": ".npz", "to-torch": ".py", "report": ".html", "example": ".txt", "place": ".json"}
"""Of commands whose ``-o`` is one file that is not ONNX."""


@pytest.fixture
def place(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = copied(corpus, tmp_path / "place")
    monkeypatch.chdir(folder)
    (folder / "inputs.json").write_text('{"x": {"dtype": "float32", "shape": [2, 4], "range": [0, 1]}}')
    (folder / "library.so").write_bytes(b"library")
    (folder / "arrays.npz").write_bytes(b"arrays")
    (folder / "below").mkdir()
    return folder


def marks(command: Callable[..., None]) -> Iterator[tuple[str, Any, list[Any]]]:
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind, *rest = get_args(parameter.annotation) or (parameter.annotation,)
        yield name, kind, [mark for mark in rest if isinstance(mark, ReadMark | WrittenMark)]


def writers() -> dict[str, Callable[..., None]]:
    commands = {name: load_command(name) for name in COMMANDS}
    return {
        name: command
        for name, command in commands.items()
        if any(isinstance(mark, WrittenMark) for *_, kinds in marks(command) for mark in kinds)
    }


def test_the_table_has_every_command_that_writes() -> None:
    assert set(CASES) == set(writers())


@pytest.mark.parametrize("name", writers())
def test_each_parameter_of_a_writer_that_is_a_path_says_whether_it_is_read_or_written(name: str) -> None:
    for parameter, kind, kinds in marks(writers()[name]):
        if Path in (kind, *get_args(kind)) or parameter in ("model", "output"):
            assert len(kinds) == 1, f"{parameter} of {name}"


def everything(folder: Path) -> dict[str, Any]:
    """What is in a folder, bytes and links and all."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        name = str(path.relative_to(folder))
        if "__pycache__" not in name:
            found[name] = (stat.S_IFMT(mode), path.read_bytes() if stat.S_ISREG(mode) else b"", path.is_symlink())
    return found


def refused(name: str, option: str, output: str, *more: str) -> str:
    case = CASES[name]
    needed = case.needed if option not in case.needed else []
    ended = run(name, *case.words, *needed, option, output, *more)
    shown = f"{name} {option} {output}: {ended.status} {ended.err}{ended.out[-200:]}"
    assert ended.status == 2, shown
    assert ended.err.startswith("modelexport: "), shown
    assert ended.err.count("\n") == 1, shown
    assert "cannot be" not in ended.err or "written" in ended.err, shown
    return ended.err


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_an_output_that_is_an_input_is_refused_however_it_is_spelt(name: str, place: Path) -> None:
    case = CASES[name]
    for number, read in enumerate(case.reads):
        os.link(read, f"hard-{number}.x")
        Path(f"soft-{number}.x").symlink_to(read)
    before = everything(place)
    for option in case.outputs:
        for number, read in enumerate(case.reads):
            for spelt in (read, f"./below/../{read}", str(place / read), f"hard-{number}.x", f"soft-{number}.x"):
                refused(name, option, spelt)
            refused(name, option, f"soft-{number}.x", "--follow-symlinks")
    assert everything(place) == before


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_an_output_that_is_no_regular_file_is_refused(name: str, place: Path) -> None:
    os.mkfifo("fifo")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    before = everything(place)
    for option in CASES[name].outputs:
        for output in ("/dev/null", "fifo", "dangling", "loop", "factory.py/x"):
            refused(name, option, output)
        refused(name, option, "loop", "--follow-symlinks")
        refused(name, option, "fifo", "--follow-symlinks")
    assert everything(place) == before
    assert Path("/dev/null").is_char_device()


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"split", "kit", "profile", "sensitivity", "optimize"}))
def test_a_link_is_followed_where_that_is_asked_for(name: str, place: Path) -> None:
    case = CASES[name]
    store = place.parent / "store"
    store.mkdir()
    suffix = SUFFIXES.get(name) or (".onnx" if case.outputs[0] == "-o" else f".{case.outputs[0].strip('-')}")
    real, link = store / f"target{suffix}", Path(f"link{suffix}")
    real.write_bytes(b"" if name in SUFFIXES or case.outputs[0] != "-o" else b"old")
    link.symlink_to(real)
    option = case.outputs[0]
    assert "--follow-symlinks" in refused(name, option, str(link))
    before = real.read_bytes()
    ended = run(name, *case.words, option, link, "--follow-symlinks")
    assert ended.status == 0, ended.err
    assert link.is_symlink()
    assert real.read_bytes() != before
    assert not [
        file for file in place.iterdir() if file.name.startswith(("link.", ".modelexport-")) and file != place / link
    ]


WORDS = {
    **{name: case.words for name, case in CASES.items() if case.outputs[0] == "-o"},
    "a package with tags": ["retag", "stages", "--from", "stages"],
    "a quantized package": ["quantize", "stages", "--to", "int8-weights"],
    "calls in a folder": ["extract", "plain.onnx", "--each", "Linear"],
}
MODELS = sorted(WORDS.keys() - {"inputs", "report", "place", "kit", "to-torch", "example"})


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_a_result_that_does_not_load_is_not_written(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = WORDS[name] if " " in name else [name, *WORDS[name]]
    out = Path("out" if " " in name or name == "split" else "out.onnx")
    if "stages" in words:
        split(load("plain.onnx"), "stages", stages=2, weights="copy")
        split(load("plain.onnx"), out, stages=2)
    elif out.suffix:
        out.write_bytes(b"an earlier model")
    before = everything(place)

    def broken(model: ir.Model, placed: Any) -> onnx.ModelProto:
        proto = to_proto(model, placed)
        proto.graph.node.add(op_type="Nonsense", output=["nothing"])
        return proto

    monkeypatch.setattr(onnx_models, "to_proto", broken)
    ended = run(*words, "-o", out)
    assert ended.status == 4, ended
    assert ended.err.startswith("modelexport: "), ended
    assert ended.err.count("\n") == 1, ended
    assert "Nonsense" in ended.err
    assert everything(place) == before


def test_a_second_writer_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_locks, "LOCK_SECONDS", 0.1)
    before = everything(place)
    with only_writer(place):
        ended = run("rename", "plain.onnx", "-o", "out.onnx")
    assert ended.status == 4
    assert "another command is writing" in ended.err
    assert ended.err.count("\n") == 1
    assert everything(place) == before
    assert run("rename", "plain.onnx", "-o", "out.onnx").status == 0  # the lock is gone with its owner


def test_of_two_writers_one_wins_and_its_files_are_whole(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_move = Move.run

    def slow(move: Move) -> None:
        run_move(move)
        time.sleep(0.005)

    monkeypatch.setattr(Move, "run", slow)
    writers = [
        lambda: rename("plain.onnx", "out.onnx"),
        lambda: update_weights("copied.onnx", "new.safetensors", "out.onnx"),
    ]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            for writing in [pool.submit(write) for write in writers]:
                writing.result()
            tagged = load("out.onnx")
            assert tagged.hierarchy is not None  # its digest is that in the model
            assert not weights_faults(tagged.model)
            assert Path("out.onnx.data").exists() == any(names_other_files(Path(name)) for name in ["out.onnx"])


def test_weights_beside_an_output_are_named_after_it_and_replace_nothing(place: Path) -> None:
    mine = [Path("below", name) for name in ("linked.safetensors", "out.linked.safetensors")]
    for file in mine:
        file.write_bytes(b"weights of another model")
    for _ in range(2):  # the second run replaces what the first one wrote
        assert run("rename", "linked.onnx", "-o", "below/out.onnx").status == 0
        assert {file.read_bytes() for file in mine} == {b"weights of another model"}
        assert data_files(Path("below/out.onnx")) == [Path("below/out.2.linked.safetensors")]
        assert len(list(Path("below").glob("*.safetensors"))) == 3


def test_what_a_command_was_not_asked_to_write_is_not_replaced(place: Path) -> None:
    Path("below/weights.bin").write_bytes(b"mine")
    with (
        pytest.raises(OutputError, match="does not belong to what is written"),
        checked_and_written(Path("below")) as new,
    ):
        shutil.copy("plain.onnx", new / "model.onnx")
        (new / "weights.bin").write_bytes(b"other")
    assert [file.name for file in Path("below").iterdir()] == ["weights.bin"]


def test_no_writer_of_models_goes_around_the_check() -> None:
    source = Path(modelexport.__file__).parent
    around = re.compile(r"files.atomic_writing import [^\n]*(written|replaced)_together|atomic_writing\.(written|repl)")
    users = {str(file.relative_to(source)) for file in source.rglob("*.py") if around.search(file.read_text())}
    # The others write no models: code with weights, and tables.
    assert users == {"runtime/checked_writing.py", "tools/to_torch/to_torch.py", "tagged/table_writing.py"}


def test_a_folder_that_is_a_link_is_followed_where_that_is_asked_for(place: Path) -> None:
    store = place.parent / "store"
    store.mkdir()
    Path("link").symlink_to(store)
    assert "--follow-symlinks" in refused("split", "-o", "link")
    assert "--follow-symlinks" in refused("export", "--dag-dir", "link")
    ended = run("extract", "plain.onnx", "--each", "Linear", "-o", "link")
    assert ended.status == 2
    assert "--follow-symlinks" in ended.err
    assert not list(store.iterdir())
    assert run("split", "plain.onnx", "--stages", "2", "-o", "link", "--follow-symlinks").status == 0
    assert (store / MANIFEST).is_file()


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "input"])
def test_each_file_that_goes_into_a_folder_is_looked_at(kind: str, place: Path) -> None:
    out = place / "out"
    assert run("split", "plain.onnx", "--stages", "2", "-o", "out").status == 0
    assert run("extract", "plain.onnx", "--each", "Linear", "-o", "cut").status == 0
    export = [*EXPORT, "--dag-dir", "dags"]
    assert run(*export).status == 0
    targets = [out / "stage_1.onnx", next((place / "cut").iterdir()), next((place / "dags").iterdir())]
    for target in targets:
        target.unlink()
        match kind:
            case "fifo":
                os.mkfifo(target)
            case "link":
                target.symlink_to(place / "plain.onnx")
            case "folder":
                target.mkdir()
            case "input":
                shutil.copy(place / "plain.onnx", target)
    source = "out/stage_1.onnx" if kind == "input" else "plain.onnx"
    cut = str(targets[1].relative_to(place)) if kind == "input" else "plain.onnx"
    commands = [
        ["split", source, "--stages", "2", "-o", "out"],
        ["extract", cut, "--each", "Linear", "-o", "cut"],
        [*export, "--inputs", str(targets[2].relative_to(place))] if kind == "input" else export,
    ]
    if kind == "input":
        targets[2].write_text('{"x": {"dtype": "float32", "shape": [2, 4], "range": [0, 1]}}')
    before = everything(place)
    for command in commands:
        ended = run(*command)
        assert ended.status == 2, f"{command}: {ended}"
        assert ended.err.count("\n") == 1, f"{command}: {ended}"
        assert everything(place) == before, command


def test_only_what_modelexport_wrote_is_replaced_by_a_text(place: Path) -> None:
    """And a file has the suffix of what is in it."""
    writers = {
        "page.html": ["report", "plain.onnx", "-o"],
        "cost.html": ["cost", "plain.onnx", "--html"],
        "data.json": ["cost", "plain.onnx", "--node-data"],
        "session.json": ["place", "plain.onnx", "--rule", "gpu: blocks.0", "--no-check", "-o"],
        "code.py": ["to-torch", "plain.onnx", "-o"],
        "sentences.txt": ["example", "sentences.txt", "-o"],
    }
    for name, words in writers.items():
        first = run(*words, name)
        assert first.status == 0, first.err
        if name != "sentences.txt":
            assert run(*words, name).status == 0, name
        for other in (name, "notes.md"):
            Path(other).write_text("# mine\n")
            ended = run(*words, other)
            assert ended.status == 2, ended
            assert ended.err.count("\n") == 1, ended
            assert "not written by modelexport" in ended.err or other == "notes.md"
            assert Path(other).read_text() == "# mine\n"
    Path("code.py").unlink()
    Path("code.safetensors").write_bytes(b"weights of somebody else")
    assert "code.safetensors exists" in run(*writers["code.py"], "code.py").err


def test_the_report_and_the_dag_files_of_an_export_replace_only_those_of_another_export(place: Path) -> None:
    export = [*EXPORT, "--dag-dir", "dags"]
    for _ in range(2):
        assert run(*export).status == 0
    for file in (Path("x.report.md"), next(Path("dags").iterdir())):
        written = file.read_bytes()
        file.write_text("mine\n")
        before = everything(place)
        ended = run(*export)
        assert ended.status == 2
        assert f"{file} exists and was not written by modelexport" in ended.err
        assert everything(place) == before
        file.write_bytes(written.replace(b"\n", b"\r\n"))  # as git may check it out
    assert run(*export).status == 0


@pytest.mark.slow
def test_the_report_of_a_model_with_a_line_break_in_its_name_is_replaced(tmp_path: Path) -> None:
    how = {"name": "two\nlines", "check": False, "frontend": "torchscript"}
    for _ in range(2):
        modelexport.export(torch.nn.ReLU(), [torch.ones(2)], tmp_path / "x.onnx", **how)
    assert (tmp_path / "x.report.md").read_text().startswith("# two\\nlines\n\n`torch.nn.")


def test_in_python_too_a_model_has_the_suffix_of_an_onnx_file(place: Path) -> None:
    with pytest.raises(OutputError, match=r"net.txt is not the name of an ONNX file: give net.onnx$"):
        modelexport.export(torch.nn.ReLU(), [torch.ones(2)], "net.txt")
    with pytest.raises(OutputError, match=r"head.pt is not the name of an ONNX file"):
        load("plain.onnx").extract("head", "head.pt")
    for name in ("net.onnx.tmp", "net.pb", "v1.0"):  # to be renamed, say
        for _ in range(2):
            load("plain.onnx").extract("head", name)
        onnx.checker.check_model(onnx.load(name, format="protobuf"))
    Path("paper.tex").write_text("mine")
    with pytest.raises(OutputError, match=r"paper.tex exists and was not written by modelexport"):
        load("plain.onnx").extract("head", "paper.tex")


def test_two_outputs_cannot_be_one_file(place: Path) -> None:
    ended = run("cost", "plain.onnx", "--html", "a.html", "--node-data", "below/../a.html")
    assert ended.status == 2
    assert "are one file" in ended.err
    assert not Path("a.html").exists()


def test_a_model_is_exported_into_the_folder_of_its_checkpoint_but_over_none_of_its_files(place: Path) -> None:
    os.link("checkpoint/config.json", "second-name.onnx")
    for output in (
        "checkpoint/config.json",
        "checkpoint/model.safetensors.index.json",
        "second-name.onnx",
        "checkpoint/",
    ):
        ended = run("export", "checkpoint", "-o", output)
        assert ended.status == 2, ended
        assert ended.err.count("\n") == 1, ended
    assert "folder of the model" in run("export", "checkpoint", "-o", "checkpoint/").err
    (place / "checkpoint" / "model.onnx").write_bytes(b"an earlier export")
    ended = run("export", "checkpoint", "-o", "checkpoint/model.onnx", "--opset", "5")
    assert "no front end writes opset 5" in ended.err  # it got as far as that


def test_files_of_somebody_else_in_the_folder_of_a_package_stay(place: Path) -> None:
    assert run("split", "plain.onnx", "--stages", "3", "-o", "out").status == 0
    (place / "out" / "notes.txt").write_text("mine")
    assert run("split", "plain.onnx", "--stages", "2", "-o", "out").status == 0
    assert (place / "out" / "notes.txt").read_text() == "mine"
    assert sorted(file.name for file in (place / "out").glob("*.onnx")) == ["stage_0.onnx", "stage_1.onnx"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["../plain.onnx", "/etc/hostname", "below/../../plain.onnx", "", ".", "a\0b", "x" * 5000]
)
def test_a_manifest_names_files_of_its_folder_only(name: str, place: Path) -> None:
    assert run("split", "plain.onnx", "--stages", "2", "-o", "out").status == 0
    for key in ("files", "weights", "parts"):
        manifest = json.loads((place / "out" / MANIFEST).read_text())
        if key == "parts":
            manifest["parts"][0]["file"] = name
        else:
            manifest[key] = [name]
        (place / "out" / MANIFEST).write_text(json.dumps(manifest))
        before = everything(place)
        if key != "files":
            ended = run("tree", "out")
            assert ended.status == 2, ended
            assert ended.err.count("\n") == 1, ended
        assert run("split", "plain.onnx", "--stages", "2", "-o", "out").status == 0
        now = everything(place)
        assert {key: now[key] for key in before if not key.startswith("out/")} == {
            key: before[key] for key in before if not key.startswith("out/")
        }
