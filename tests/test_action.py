"""The GitHub Action compares a pull request's export with that of its base, and says so in Markdown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ACTION = Path(__file__).parents[1] / "action"
MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, {width}), nn.{activation}(), nn.Linear({width}, 2)), (torch.ones(2, 4),)
"""


def git(*words: str, folder: Path) -> None:
    who = {f"GIT_{role}_{what}": "tests@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env=os.environ | who)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose model has a ReLU in the only commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git("init", "--quiet", folder=folder)
    (folder / "nets.py").write_text(MODEL.format(width=4, activation="ReLU"))
    git("add", ".", folder=folder)
    git("commit", "--quiet", "-m", "a model", folder=folder)
    return folder


def compare(repository: Path, *words: str, model: str = "nets.py:make") -> tuple[str, dict[str, str]]:
    """The Markdown in the summary of the job, and the outputs of the action."""
    summary, outputs, folder = (repository.parent / name for name in ("summary.md", "outputs", "out"))
    command = [sys.executable, ACTION / "compare.py", model, "--base", "HEAD", "--folder", folder, *words]
    environment = os.environ | {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(outputs)}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    mark, text = Path(folder / "comparison.md").read_text().split("\n", 1)
    assert (mark, text.strip()) == (f"<!-- modelexport {model} -->", summary.read_text().strip())
    written = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    assert done.returncode == {"true": 1, "false": 0}[written["differs"]], done.stderr
    return summary.read_text(), written


@pytest.mark.slow  # two exports, each in a process
def test_what_a_pull_request_changes_is_said_by_module(repository: Path) -> None:
    (repository / "nets.py").write_text(MODEL.format(width=4, activation="Tanh"))
    text, outputs = compare(repository, "--fail-on", "structure,outputs", "--options=--dynamic")
    assert text.startswith("### nets.py:make, base and pull request: differs\n")
    assert "| structure | **differs** |" in text
    assert "| outputs | **differs** |" in text
    assert re.search(r"- `1`: .*\+1 Tanh", text)
    assert outputs["differs"] == "true"
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=repository, check=True, capture_output=True, text=True)
    assert len(worktrees.stdout.splitlines()) == 1


@pytest.mark.slow  # two exports, each in a process
def test_a_model_that_the_base_does_not_have_is_shown(repository: Path) -> None:
    (repository / "more.py").write_text(MODEL.format(width=8, activation="ReLU"))
    text, outputs = compare(repository, model="more.py:make")
    assert text.startswith("### more.py:make is exported for the first time")
    assert "no such file: more.py" in text
    assert "Sequential" in text
    assert outputs["differs"] == "false"


def test_a_model_that_cannot_be_exported_fails(repository: Path) -> None:
    text, outputs = compare(repository, model="other.py:make")
    assert text.startswith("### other.py:make cannot be exported\n\n    modelexport: ")
    assert "no such file: other.py" in text
    assert outputs["differs"] == "true"


GH = """#!/bin/sh
echo "$@" >> calls
case "$*" in *--jq*) [ "$MARK" = "<!-- modelexport m -->" ] && cat earlier;; esac
"""


@pytest.mark.parametrize("earlier", ["", "7\n9\n"])
def test_the_action_changes_its_earlier_comment_and_no_other(tmp_path: Path, earlier: str) -> None:
    """With a `gh` that says which comments have the mark."""
    steps = (ACTION / "action.yml").read_text().split("run: |\n")
    (script,) = [step.split("\n    - ")[0] for step in steps if "MARK=" in step]
    for name, text in (("gh", GH), ("earlier", earlier), ("comparison.md", "<!-- modelexport m -->\n### m\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "gh").chmod(0o755)
    variables = {"GITHUB_REPOSITORY": "o/r", "NUMBER": "3", "COMPARISON": "comparison.md"}
    environment = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True)
    written = (tmp_path / "calls").read_text().splitlines()[1]
    where = "--method PATCH repos/o/r/issues/comments/7" if earlier else "repos/o/r/issues/3/comments"
    assert written == f"api --silent {where} --field body=@comparison.md"


@pytest.mark.parametrize(
    ("status", "differs", "step"), [(0, "differs=false", 0), (1, "differs=true", 0), (1, "", 1), (2, "", 2)]
)
def test_a_model_that_differs_is_commented_before_the_action_fails(
    tmp_path: Path, status: int, differs: str, step: int
) -> None:
    """Status 1 of the script is left to the last step if it has compared; any other error ends the action."""
    for name, text in (("git", "exit 0"), ("python", f"echo {differs} >> $GITHUB_OUTPUT; exit {status}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (script,) = [
        each.split("\n    - ")[0]
        for each in (ACTION / "action.yml").read_text().split("run: |\n")
        if "compare.py" in each
    ]
    variables = {"GITHUB_OUTPUT": str(tmp_path / "outputs"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=os.environ | variables, check=False)
    assert done.returncode == step


def test_the_action_passes_its_inputs_by_the_environment_alone() -> None:
    """An expression in a script would run what a pull request gives as its branch's name."""
    lines = (ACTION / "action.yml").read_text().splitlines()
    scripts = [line for line in lines if re.match(r"\s+(run:|git |python )", line)]
    assert len(scripts) >= 5
    assert not any("${{" in line for line in scripts)
