"""Processor seconds of commands, each in a fresh process with its imports: python benchmarks/seconds.py"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from outcomes import measured

COMMANDS = {
    "tree bert-tiny.onnx": 4,
    "nodes bert-tiny.onnx encoder.layer.0": 4,
    "cost bert-tiny.onnx": 4,
    "export bert-tiny -o b.onnx": 2,
    "export bert-tiny --dynamic -o d.onnx": 2,
}
"""Each command with the number of runs, of which the least counts."""


def seconds_of(words: str, folder: Path) -> float:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a user has bytecode after the first run
    return measured([sys.executable, "-m", "modelexport", *words.split()], cwd=folder, env=environment)[1]


def main() -> None:
    print("| command | processor seconds |\n|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds_of("export bert-tiny -o bert-tiny.onnx", folder)
        for words, runs in COMMANDS.items():
            print(f"| `{words}` | {min(seconds_of(words, folder) for _ in range(runs)):.2f} |")


if __name__ == "__main__":
    main()
