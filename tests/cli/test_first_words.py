"""What somebody sees who types the command for the first time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from typer.main import get_command

import modelexport
from commands import run
from exports import Exporter
from modelexport.cli.command_list import COMMANDS
from modelexport.cli.command_parsers import app
from modelexport.core.version import __version__
from modelexport.errors import UsageError


def modules_after(*arguments: str) -> set[str]:
    """The modules that the command has imported when it ends."""
    code = (
        f"import sys; sys.argv = ['modelexport', *{list(arguments)}]\n"
        "from modelexport.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split())


INTERRUPTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *rest):
        if name == "modelexport.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def test_ctrl_c_while_the_command_is_imported_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    places = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "modelexport", "--version"]
    done = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "modelexport: interrupted; nothing was written\n")


def test_the_command_alone_shows_three_examples_and_every_command() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("  modelexport ") == 3
    assert all(name in done.stdout for name in COMMANDS)
    assert len(done.stdout.splitlines()) < 20


def test_help_says_in_a_few_words_what_each_command_does_in_groups() -> None:
    done = run("--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")][1:] == [
        *("Export", "Look into a file", "Check", "Change a file", "Stages and devices", "Options")
    ]
    for name, one in COMMANDS.items():
        assert f"  {name:<16}{one.help}" in lines
    assert max(map(len, lines)) <= 110


def test_the_version_is_the_only_thing_that_version_prints() -> None:
    assert run("--version").stdout == f"{__version__}\n"
    assert run("--debug", "--version").stdout == f"{__version__}\n"


def test_help_and_version_import_no_parser_and_nothing_slow() -> None:
    slow = {"typer", "inspect", "dataclasses", "msgspec", "numpy", "onnx", "onnx_ir", "torch", "rich"}
    code = "import importlib.metadata, sys, traceback; print(*sys.modules)"  # newer Pythons import some for these
    slow -= {*subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()}
    for arguments in ([], ["--help"], ["--version"]):
        assert not modules_after(*arguments) & slow


@pytest.mark.parametrize("name", COMMANDS)
def test_the_listing_agrees_with_the_commands(name: str) -> None:
    parser: Any = get_command(app)
    assert COMMANDS[name].runs_model == any(one.metavar == "MODEL" for one in parser.commands[name].params)
    assert run(name, "--help").returncode == 0


def test_what_is_nearly_right_is_offered(tmp_path: Path) -> None:
    assert "did you mean --verify?" in run("export", "--verfy").stderr
    assert "; did you mean 'export', 'report'? see" in run("exprt").stderr
    assert "; did you mean generate? there are" in run("export", "--parts", "generat", "-o", "x/").stderr
    assert "; did you mean --opset" in run("export", "--oppset", 3).stderr
    (tmp_path / "bert.onnx").touch()
    compared = "compare", "bert.onnx", "bert.onnx", "--fail-on", "strcture"
    assert "did you mean structure?" in run(*compared, cwd=tmp_path).stderr
    assert run("tree", "berd.onnx", cwd=tmp_path).stderr == (
        "modelexport: there is no file berd.onnx; did you mean bert.onnx?\n"
    )
    assert run("replace", "x.onnx", "a").stderr == (
        "modelexport: Missing option '-o' / '--output' OUT.onnx; see `modelexport replace --help`\n"
    )
    assert "(pooler): give a module with --module; see" in run("kit", "x.onnx", "pooler", "-o", "kit/").stderr
    assert "; did you mean sentences.txt? the examples are" in run("example", "sentence.txt").stderr
    assert "'auto', 'dynamo', 'torchscript'" in run("export", "--frontend", "dynam", "-o", "x.onnx").stderr


def test_a_page_may_have_the_name_of_its_model(exported: Exporter, tmp_path: Path) -> None:
    import shutil

    source = exported("blocks").path
    for file in source.parent.glob(f"{source.stem}.*"):
        shutil.copy(file, tmp_path / file.name.replace(source.stem, "cap"))
    done = run("report", "cap.onnx", "-o", "cap.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cap.html").read_text().startswith("<!doctype html>")
    assert run("report", "cap.onnx", "-o", "cap.hierarchy.json", cwd=tmp_path).returncode == 2


def completions(*words: str) -> set[str]:
    """What a shell offers for the last word."""
    variables = {
        "_MODELEXPORT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("modelexport", *words)),
        "COMP_CWORD": str(len(words)),
    }
    with mock.patch.dict(os.environ, variables):
        return set(run().stdout.split())


def test_a_shell_completes_commands_options_and_choices() -> None:
    assert completions("ver") == {"verify"}
    assert completions("") == set(COMMANDS)
    assert completions("export", "--front") == {"--frontend"}
    assert completions("export", "--frontend", "") == {"auto", "dynamo", "torchscript"}
    with mock.patch.dict(os.environ, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"):
        assert "_MODELEXPORT_COMPLETE" in run("--show-completion", "bash").stdout


def test_the_program_of_typer_is_the_same_one() -> None:
    from typer.testing import CliRunner

    assert CliRunner().invoke(app, []).stdout == run().stdout


def test_a_file_is_not_written_under_the_name_of_a_folder_nor_a_folder_under_that_of_a_file(
    exported: Exporter, tmp_path: Path
) -> None:
    source = exported("blocks").path
    for arguments, told in (
        (["quantize", source, "-o", "q/", "--to", "int8-dynamic"], "q has no suffix: give q.onnx"),
        (["extract", source, "head", "-o", "part/"], "part has no suffix, and one call is one file: give part.onnx"),
        (["extract", source, "head", "stem", "-o", "p.onnx"], "p.onnx would be a folder of several files: give p/"),
        (["split", source, "-o", "s.onnx", "--stages", 2], "s.onnx would be a folder of several files: give s/"),
        (["kit", source, "-o", "kit.zip"], "kit.zip would be a folder of several files: give kit/"),
        (["split", source, "-o", "s.zip", "--stages", 2], "s.zip would be a folder of several files: give s/"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"modelexport: {told}\n"), arguments
    assert list(tmp_path.iterdir()) == []
    (folder := tmp_path / "package").mkdir()
    for changing in (
        ["quantize", folder, "--to", "int8-dynamic"],
        ["update-weights", folder, source],
        ["retag", folder, "--from", folder],
    ):
        done = run(*changing, "-o", "q.onnx", cwd=tmp_path)
        told = "modelexport: q.onnx would be a folder of several files: give q/\n"
        assert (done.returncode, done.stderr) == (2, told), changing
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["opus-mt-en.tr", "llama-3.2", "stages.zip/"])
def test_a_folder_may_have_a_point_in_its_name_or_any_name_with_a_slash(
    name: str, exported: Exporter, tmp_path: Path
) -> None:
    done = run("split", exported("blocks").path, "-o", name, "--stages", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name / "stage_0.onnx").is_file()


def test_an_option_of_another_command_or_with_a_value_too_many_is_explained(tmp_path: Path) -> None:
    others = "`modelexport verify` and `modelexport values` have it"
    assert f"No such option: --model; {others}; see" in run("report", "x.onnx", "--model", "m").stderr
    told = run("export", "m.py:f", "-o", "x.onnx", "--report", "x.html").stderr
    assert "--report takes no value" in told
    assert "OUT.html beside OUT.onnx" in told
    assert told.endswith("leave out x.html\n")


def test_a_model_instead_of_a_file_and_a_class_instead_of_a_function_are_explained(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("import torch\n\nclass Net(torch.nn.Linear):\n    pass\n")
    assert run("cost", "nets.py:make", cwd=tmp_path).stderr == (
        "modelexport: nets.py:make is a model, not a file: export it first: "
        "modelexport export nets.py:make -o OUT.onnx\n"
    )
    told = run("export", f"{tmp_path}/nets.py:Net", "-o", "x.onnx", cwd=tmp_path).stderr
    assert "needs arguments (missing a required argument: 'in_features'): give a function that returns" in told


def test_verify_says_where_a_model_is_given() -> None:
    assert "give a model with --model, a module with --module" in run("verify", "a.onnx", "bert-tiny").stderr


def test_a_wrong_weight_is_counted_among_all_parameters(exported: Exporter, tmp_path: Path) -> None:
    from modelexport.terminal.show_verification import format_verify
    from modelexport.verify.verify_report import ParameterReport

    found = exported("blocks").verified
    some = ParameterReport(used=22, transformed=0, unaccounted=[], differing=["head.weight"], untraced=["a", "b"])
    text = format_verify(msgspec.structs.replace(found, parameters=some)).splitlines()[-1]
    assert "; 1 of 20 parameters missing or different: head.weight; 2 parameters not compared: " in text
    assert text.endswith("; with the inputs that were tried, no output is off by more than the tolerance")


def test_a_page_that_export_wrote_is_listed_and_not_offered_again(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 3), torch.ones(1, 2)\n")
    spaced = run("export", f"{tmp_path}/nets.py:make", "-o", "my x.onnx", cwd=tmp_path)
    assert spaced.stdout.splitlines()[-1].startswith("next: modelexport tree 'my x.onnx'; ")
    done = run("export", f"{tmp_path}/nets.py:make", "-o", "x.onnx", "--report", cwd=tmp_path)
    assert "x.report.md, x.html\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("; open x.html in a browser")


def test_why_nothing_was_quantized_is_said_as_it_is(exported: Exporter, tmp_path: Path) -> None:
    done = run("quantize", exported("blocks").path, "-o", tmp_path / "q.onnx", "--to", "int8-dynamic", "--keep", ".")
    assert done.returncode == 1
    assert "no node was quantized: all modules are kept" in done.stdout


def test_arguments_in_the_wrong_order_are_given_in_the_right_one(exported: Exporter, tmp_path: Path) -> None:
    source = exported("blocks").path
    (weights := tmp_path / "w.safetensors").write_bytes(b"")
    for arguments, told in (
        (["update-weights", weights, source, "-o", "o.onnx"], f"give update-weights {source} {weights}"),
        (["tree", source, "block.0"], "modules are taken by `modelexport nodes`"),
        (["compare", source, source, "--bound", "2%"], "it is not a number, as 0.02 is, which is 2 %"),
        (["extract", source, "--to", "nosuch", "-o", "o.onnx"], f"`modelexport nodes {source} . --json` lists them"),
    ):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stderr)
        assert told in done.stderr, (arguments, done.stderr)
    with pytest.raises(UsageError, match=r"run_chain: folder takes str | Path, not {}"):
        modelexport.run_chain({}, tmp_path)
