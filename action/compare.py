"""Export a model from the working tree and from another commit, and write as Markdown what differs.

    python compare.py MODEL --base COMMIT --folder FOLDER [--fail-on ASPECTS] [--options='--dynamic ...']

Writes `FOLDER/comparison.md`. In a GitHub Action also adds it to the summary of the job, and sets the outputs `differs`
and `comparison`. The exit status is 1 if one of ASPECTS differs or the model cannot be exported. Needs git and an
installed `modelexport`; the code of the other commit runs with the packages that are installed for this one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def modelexport(*words: object, tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelexport", *map(str, words)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def export(model: str, tree: Path, output: Path, options: list[str]) -> str:
    """Export a model from a tree of the repository; returns why it failed, or nothing."""
    done = modelexport("export", model, "-o", output, "--reference", *options, tree=tree)
    return "" if done.returncode == 0 else done.stderr.strip() or done.stdout.strip()


def quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def compared(model: str, base: str, folder: Path, fail_on: str, options: list[str]) -> tuple[str, bool]:
    """The comparison as Markdown, and whether it says no."""
    here, head, before = Path.cwd(), folder / "head" / "model.onnx", folder / "base" / "model.onnx"
    if failure := export(model, here, head, options):
        return f"### {model} cannot be exported\n\n{quoted(failure)}", True
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "base")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, base], check=True)
        try:
            failure = export(model, tree, before, options)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)
    if failure:
        shown = modelexport("tree", head, tree=here).stdout
        return (
            f"### {model} is exported for the first time\n\nThe base does not:\n\n{quoted(failure)}\n\n{quoted(shown)}",
            False,
        )
    done = modelexport("compare", before, head, "--markdown", "--fail-on", fail_on, tree=here)
    text = done.stdout or f"### {model} cannot be compared\n\n{quoted(done.stderr)}"
    return text.replace("model.onnx and model.onnx", f"{model}, base and pull request", 1), done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--base", required=True, metavar="COMMIT")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--fail-on", default="", metavar="ASPECTS")
    parser.add_argument("--options", default="", metavar="WORDS", help="further options of `modelexport export`")
    given = parser.parse_args()
    folder = given.folder.absolute()
    text, differs = compared(given.model, given.base, folder, given.fail_on, shlex.split(given.options))
    folder.mkdir(parents=True, exist_ok=True)
    comparison = folder / "comparison.md"
    mark = f"<!-- modelexport {given.model.replace('-->', '')} -->"  # the action finds its earlier comment by it
    comparison.write_text(f"{mark}\n{text.rstrip()}\n", encoding="utf-8")
    print(text)
    outputs = f"differs={str(differs).lower()}\ncomparison={comparison}\n"
    for variable, lines in (("GITHUB_STEP_SUMMARY", f"{text}\n"), ("GITHUB_OUTPUT", outputs)):
        if name := os.environ.get(variable):
            with Path(name).open("a", encoding="utf-8") as file:
                file.write(lines)
    raise SystemExit(int(differs))


if __name__ == "__main__":
    main()
