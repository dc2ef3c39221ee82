"""Rewrite the tables of figures in the documentation: run the scripts that print them, and put their output in place.

    python benchmarks/tables.py [NAME ...]

A page has a table between `<!-- figures: survival.py --cost -->` and `<!-- end -->`: what the script of this folder
prints with these arguments. NAME is a script, with or without `.py`; without one, all that the pages name are run. A
page is rewritten when all of its scripts are done; one that fails leaves the page as it was.

Needs what the scripts need, and the time of all of them: about an hour. Each says at its top how long it takes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/evidence/*.md")])
MARKED = re.compile(r"(?P<begin><!-- figures: (?P<command>[^>]+?) -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.S)


def commands_of(text: str) -> list[list[str]]:
    """The scripts that a page's markers name, with their arguments."""
    return [shlex.split(found["command"]) for found in MARKED.finditer(text)]


def output_of(command: list[str]) -> str:
    """What a script prints; its progress goes to the standard error of this process."""
    script, *arguments = command
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    call = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    table = done.stdout.strip()
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with status {done.returncode}: its page stays as it was")
    if not table.startswith("|"):
        raise SystemExit(f"{shlex.join(command)} printed no table: its page stays as it was")
    return table


def rewritten(text: str, names: Collection[str]) -> str:
    """A page with new tables, where scripts of these names make them."""

    def renewed(found: re.Match[str]) -> str:
        command = shlex.split(found["command"])
        if names and Path(command[0]).stem not in names:
            return found.group()
        print(f"{shlex.join(command)} ...", file=sys.stderr, flush=True)
        return f"{found['begin']}\n{output_of(command)}\n\n{found['end']}"

    return MARKED.sub(renewed, text)


def main() -> None:
    names = {Path(argument).stem for argument in sys.argv[1:]}
    known = {Path(command[0]).stem for page in PAGES for command in commands_of(page.read_text())}
    if unknown := sorted(names - known):
        raise SystemExit(f"no page has a table of {', '.join(unknown)}: there are {', '.join(sorted(known))}")
    for page in PAGES:
        before = page.read_text()
        after = rewritten(before, names)
        if after != before:
            page.write_text(after)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
