"""The cost of the documents: all of them together, with DAG files, as a share of their export.

    python benchmarks/documents.py [--nodes N ...]

The model is a chain of stages of ten blocks each, with about N nodes. The ratio is that of one run: the time to make,
encode and write the documents divided by the time of the whole export. Ends with status 1 if it is above 10 % at any
size. The time of the capture grows faster than the model: 10,000 nodes take minutes.

Needs only the project; about six minutes, most of them for 10,000 nodes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from modelexport.exporting.export_result import ExportResult
from modelexport.exporting.pipeline import export
from modelexport.files.atomic_writing import Replacement
from modelexport.tagged.documents import reader
from modelexport.tagged.documents.dag import write_dag_files

LIMIT = 0.10


class Block(nn.Module):
    """Five nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def chain(nodes: int) -> nn.Module:
    blocks = nodes // 5
    stages = [nn.Sequential(*(Block() for _ in range(min(10, blocks - start)))) for start in range(0, blocks, 10)]
    return nn.Sequential(*stages).eval()


def measure(nodes: int, directory: Path) -> tuple[ExportResult, float, float]:
    """An export, the seconds for its documents, and the additional seconds for the DAG files."""
    path = directory / f"chain-{nodes}.onnx"
    result = export(chain(nodes), {"input": torch.ones(2, 8)}, path)
    files = [path.with_suffix(f".{name}.json") for name in ("hierarchy", "dag", "operations")]
    written = [file.read_bytes() for file in files]
    dags = reader.load_dag(files[1])
    began = time.perf_counter()
    for file, content in zip(files, written, strict=True):  # the export writes them together with the model
        file.write_bytes(content)
    merged = time.perf_counter()
    with Replacement() as replacement:
        write_dag_files(replacement, directory / f"dags-{nodes}", dags)
    return result, result.seconds["documents"] + merged - began, time.perf_counter() - merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1_000, 10_000])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        measure(5, Path(directory))  # warm up
        print("| nodes | calls | export | documents | a node | DAG files | a file | ratio |")
        print("|---|---|---|---|---|---|---|---|")
        for nodes in arguments.nodes:
            result, merged, single = measure(nodes, Path(directory))
            total = sum(result.seconds.values()) + single
            ratio = (merged + single) / total
            worst = max(worst, ratio)
            made, calls = len(result.hierarchy.nodes), len(result.hierarchy.calls)
            print(
                f"| {made:,} | {calls:,} | {total:.2f} s | {merged:.3f} s | {merged / made * 1e6:.0f} us "
                f"| {single:.3f} s | {single / calls * 1e6:.0f} us | {ratio:.1%} |",
                flush=True,
            )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
