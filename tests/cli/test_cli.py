"""The real command, its output, its exit status, and what it leaves on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from commands import run
from exports import Exporter

FACTORIES = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(16, 16)
    def forward(self, x):
        return self.block(self.block(x))

def good():
    return Twice(), {"x": torch.ones(2, 16)}

def misfit():
    return Twice(), {"x": torch.ones(2, 5)}

def raising():
    raise ValueError("no luck")

class Solve(nn.Module):
    def forward(self, x):
        return torch.linalg.lstsq(x, x).solution

def unsupported():
    return nn.Sequential(nn.Linear(4, 4), Solve()), (torch.ones(4, 4),)
"""


def run_alone(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as people run it."""
    command = [sys.executable, "-m", "modelexport", *map(str, arguments)]
    variables = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(FACTORIES)
    return tmp_path


def test_export_prints_one_json_document_with_tree_coverage_and_difference(folder: Path) -> None:
    done = run("export", "nets.py:good", "-o", "x.onnx", "--verify", "--json", cwd=folder)
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert document["coverage"] == {"exact": 2, "derived": 0, "inferred": 0, "untagged": 0}
    assert [(row["address"], row["tag"], row["nodes"]) for row in document["tree"]] == [
        ("", "/Twice", 2),
        ("block", "/Twice/Linear", 1),
        ("block@1", "/Twice/Linear@1", 1),
    ]
    assert document["verify"]["agrees"]
    assert document["verify"]["largest_difference"] < 1e-5
    assert sorted(path.name for path in folder.glob("x.*")) == sorted(Path(file).name for file in document["files"])


def test_export_shows_what_was_written_and_proven_and_what_to_do_next(folder: Path) -> None:
    done = run("export", "nets.py:good", "-o", "x.onnx", "--verify", "--report", cwd=folder)
    assert done.returncode == 0
    assert done.stdout.startswith("wrote x.onnx: 2 nodes of 3 calls\n")
    assert "\nnext: modelexport tree x.onnx; " in done.stdout
    assert len(done.stdout.splitlines()) < 10
    assert "were generated" not in done.stdout
    assert "  Linear@1  block@1      1  Gemm" in run("tree", "x.onnx", cwd=folder).stdout
    assert "nodes: 2 exact, 0 derived, 0 inferred, 0 untagged" in done.stdout
    assert "1 output agrees with PyTorch, largest difference" in done.stdout
    assert '"Verification: agrees"' in (folder / "x.html").read_text()


@pytest.mark.slow  # the goldens of the table were written in other processes
def test_two_runs_write_the_same_bytes_whatever_the_seed_of_hashes(folder: Path) -> None:
    alone, here = folder / "alone", folder / "here"
    done = run_alone("export", "-o", alone / "x.onnx", "--json", cwd=folder, PYTHONHASHSEED="1")
    assert (done.returncode, done.stderr, json.loads(done.stdout)["coverage"]["untagged"]) == (0, "", 0)
    done = run("export", "-o", here / "x.onnx", cwd=folder)  # with a random seed
    assert done.returncode == 0
    assert "  inputs were generated: input_ids int64[2, 16], " in done.stdout
    assert "\n\ninputs were generated: input_ids int64[2, 16], " in (here / "x.report.md").read_text()
    for file in ("x.onnx", "x.hierarchy.json"):
        assert (alone / file).read_bytes() == (here / file).read_bytes()


def test_no_string_in_the_file_is_a_path_of_this_machine(folder: Path) -> None:
    assert run("export", "nets.py:good", "-o", "x.onnx", cwd=folder).returncode == 0
    content = (folder / "x.onnx").read_bytes() + (folder / "x.hierarchy.json").read_bytes()
    for path in (folder, Path(sys.prefix), Path(__file__).parent):
        assert str(path).encode() not in content
    assert b".py" not in content


def test_torch_metadata_stays_when_asked_for(folder: Path) -> None:
    assert run("export", "nets.py:good", "-o", "x.onnx", "--keep-torch-metadata", cwd=folder).returncode == 0
    assert b"pkg.torch.onnx.stack_trace" in (folder / "x.onnx").read_bytes()


def test_weights_go_to_a_file_of_their_own_when_asked_for(folder: Path) -> None:
    assert run("export", "nets.py:good", "-o", "x.onnx", "--weights", "copy", cwd=folder).returncode == 0
    assert (folder / "x.onnx.data").stat().st_size > 0
    assert run("tree", "x.onnx", cwd=folder).returncode == 0


def test_tree_and_nodes_read_the_file_back(folder: Path, exported: Exporter) -> None:
    path = exported("blocks").path
    rows = json.loads(run("tree", path, "--json", cwd=folder).stdout)["tree"]
    assert rows == exported("blocks").document["tree"]
    root = json.loads(run("nodes", path, ".", "--json", cwd=folder).stdout)
    assert len(root) == rows[0]["nodes"]
    by_tag = json.loads(run("nodes", path, rows[1]["tag"], "--json", cwd=folder).stdout)
    by_address = json.loads(run("nodes", path, rows[1]["address"], "--json", cwd=folder).stdout)
    assert by_tag == by_address
    assert len(by_tag) == rows[1]["nodes"]
    node = root[-1]
    for kind, name in (("node", node["name"]), ("value", node["outputs"][0])):
        asked = run("nodes", path, name, cwd=folder)
        call = node["call"] or "."
        assert asked.returncode == 2
        assert asked.stderr == f"modelexport: '{name}' is a {kind} of the call '{call}' of {path}: give this address\n"


def test_a_command_that_runs_a_model_iterates_over_sets_in_one_order(tmp_path: Path) -> None:
    """The order in which some models of transformers call their modules."""
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(lambda: print(*set('abcdefgh')))\n")
    variables = {key: text for key, text in os.environ.items() if key != "PYTHONHASHSEED"}
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "modelexport", "hierarchy", "none.py:make"]
    done = subprocess.run(command, capture_output=True, env=variables, check=False)
    fixed = subprocess.run(
        [sys.executable, "-c", ""], capture_output=True, env=variables | {"PYTHONHASHSEED": "0"}, check=True
    )
    assert done.stdout == fixed.stdout


def test_tree_cost_and_compare_do_not_import_what_they_do_not_need(exported: Exporter) -> None:
    path = str(exported("blocks").path)
    code = f"""
import sys
from modelexport.cli.app import main
for command in (["tree"], ["cost"], ["compare", {path!r}, "--values"]):
    sys.argv = ["modelexport", *command, {path!r}]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
assert not {{"torch", "transformers", "rich", "onnx.reference"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_command_ends_without_a_search_for_garbage(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000, gc.get_count()[0] < 10_000))\n"
    )
    command = [sys.executable, "-m", "modelexport", "--version"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)
    assert done.stdout.decode().split()[1:] == ["True", "True"]


def test_importing_the_package_imports_neither_torch_nor_rich() -> None:
    code = "import modelexport, sys; assert not {'torch', 'rich', 'onnx', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("mode", ["static", "traced", "compare"])
def test_hierarchy_shows_the_module_tree_without_an_export(mode: str, folder: Path) -> None:
    done = run("hierarchy", "nets.py:good", "--mode", mode, cwd=folder)
    assert done.returncode == 0
    assert "block" in done.stdout
    document = json.loads(run("hierarchy", "nets.py:good", "--mode", mode, "--json", cwd=folder).stdout)
    assert [module["path"] for module in document["modules"]] == ["", "block"]
    assert ("calls" in document) == (mode != "static")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "nets.py:raising", "-o", "x.onnx"], "nets.py:raising failed: ValueError: no luck"),
        (["export", "nets.py:missing", "-o", "x.onnx"], "nets.py has no missing"),
        (["export", "nets.py:misfit", "-o", "x.onnx"], "Twice does not run with x float32[2, 5]"),
        (["export", "nowhere/model", "-o", "x.onnx"], "nowhere/model"),
        (["export", "nets.py:good", "-o", "nets.py/x.onnx"], "cannot write nets.py/x.onnx: there is no folder nets.py"),
        (["export", "nets.py:missing", "-o", "new/folder/x.onnx"], "nets.py has no missing"),
        (["export", "nets.py:good", "-o", "."], "holds other files"),
        (["export", "nets.py:good", "-o", "x.onnx", "--include", "Conv9"], "the model has no class Conv9"),
        (["export", "nets.py:good", "-o", "x.onnx", "--inputs", "none.json"], "none.json"),
        (["export", "nets.py:good"], "Missing option '-o'"),
        (["tree", "missing.onnx"], "there is no file missing.onnx"),
        (["strip", ".", "-o", "x.onnx"], ". is a folder: give one of the .onnx files in it"),
        (["tree", "empty.onnx"], "empty.onnx is empty"),
        (["tree", "nets.py"], "nets.py is not an ONNX file"),
        (["tree", "future.onnx"], "has format version 2999-01-01"),
        (["nodes", "x.onnx", "block@7"], "did you mean block"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_bad_input_is_one_message_and_status_2_and_nothing_is_overwritten(
    arguments: list[str], message: str, folder: Path
) -> None:
    write_files(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = run(*arguments, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.slow
def test_a_model_that_no_front_end_captures_is_one_message_and_status_3(folder: Path) -> None:
    write_files(folder)
    done = run("export", "nets.py:unsupported", "-o", "x.onnx", cwd=folder)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert done.stderr.startswith("modelexport: the model cannot be exported: DynamicOutputShapeException in 1")
    assert done.stderr.count("\n") == 1


def write_files(folder: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    plain = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out]))
    onnx.save(plain, folder / "plain.onnx")
    helper.set_model_props(plain, {"modelexport.format_version": "2999-01-01"})
    onnx.save(plain, folder / "future.onnx")
    (folder / "empty.onnx").touch()
    from modelexport import export

    namespace: dict[str, object] = {}
    exec(FACTORIES, namespace)
    model, inputs = namespace["good"]()  # type: ignore[operator]
    export(model, inputs, folder / "x.onnx", check=False)


def test_the_folder_of_an_output_is_made_and_goes_again_if_nothing_is_written(folder: Path) -> None:
    write_files(folder)
    assert run("rename", "x.onnx", "-o", "new/folder/y.onnx", cwd=folder).returncode == 0
    assert (folder / "new" / "folder" / "y.onnx").is_file()
    assert run("rename", "future.onnx", "-o", "other/folder/y.onnx", cwd=folder).returncode == 2
    assert not (folder / "other").exists()


def test_debug_shows_the_traceback(folder: Path) -> None:
    done = run("--debug", "export", "nets.py:raising", "-o", "x.onnx", cwd=folder)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "modelexport: nets.py:raising failed" in done.stderr


def test_an_internal_error_says_the_whole_command_that_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*names: object) -> str:
        raise AssertionError("not expected")

    monkeypatch.setattr("modelexport.cli.commands.example.suggest", fault)
    assert "report it with what `modelexport --debug example 'no such'` prints" in run("example", "no such").stderr


def test_importing_the_commands_leaves_warnings_as_python_shows_them() -> None:
    assert warnings.formatwarning.__module__ == "warnings"
