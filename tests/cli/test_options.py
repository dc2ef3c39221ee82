"""The options of `export` are those of Python: one declaration of each."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command

import modelexport
from commands import run
from modelexport.cli.command_list import COMMANDS
from modelexport.cli.command_parsers import app, load_command
from modelexport.core.declared_options import declared, heading
from modelexport.errors import UsageError
from modelexport.exporting.options import Options
from modelexport.packages.package_export import export_package

GROUPS = [getattr(Options(), field.name) for field in dataclasses.fields(Options)]
FIELDS = [(group, field) for group in GROUPS for field in dataclasses.fields(group)]
PARSER: Any = get_command(app)
PARAMETERS = {one.name: one for one in PARSER.commands["export"].params}


def test_each_declared_option_is_on_the_command_line_with_its_help_under_its_group() -> None:
    shown = run("export", "--help").stdout
    for group, field in FIELDS:
        if (option := declared(field)) is None or option.only_python:
            assert field.name not in PARAMETERS
            continue
        parameter = PARAMETERS.get(field.name) or PARAMETERS[f"no_{field.name}"]
        assert parameter.help == option.help
        assert parameter.rich_help_panel == heading(type(group))
        assert f"\n{heading(type(group))}:\n" in shown
        assert parameter.opts[-1] in shown


def test_what_the_command_line_gives_arrives_in_the_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def look(choice: object, folder: Path, options: Options, **shown: object) -> None:
        seen.append(options)

    monkeypatch.setattr("modelexport.cli.commands.export.export_folder", look)
    words = "--no-optimize --no-reuse --no-check --constant n --constant m --opset 17 --tags-as functions --reference"
    run("export", "bert-tiny", "-o", f"{tmp_path}/", *words.split(), "--static-cache", "8")
    options = seen[0]
    assert not options.graph.optimized
    assert not options.capture.reuse
    assert not options.checks.check
    assert (options.capture.constants, options.capture.opset) == (["n", "m"], 17)
    assert (options.tags.tags_as, options.checks.reference, options.package.static_cache) == ("functions", True, 8)
    run("export", "bert-tiny", "-o", f"{tmp_path}/")
    assert seen[1] == Options()


def test_options_of_a_package_are_refused_for_a_file_and_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--parts, --static-cache and --separate-prefill go with a FOLDER/"):
        modelexport.export(None, {}, tmp_path / "x.onnx", static_cache=4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--dag-dir goes with a FILE"):
        export_package(None, tmp_path / "x", dag_dir=tmp_path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'optimised'"):
        modelexport.export(None, {}, tmp_path / "x.onnx", optimised=True)  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_few_parameters_and_explains_each_of_its_options(name: str) -> None:
    function = inspect.unwrap(load_command(name))
    assert len(get_type_hints(function)) <= 9  # with the return
    for parameter in PARSER.commands[name].params:
        assert parameter.help, f"{name} {parameter.name}"
