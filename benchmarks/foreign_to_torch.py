"""Files that others made, as PyTorch modules: does `to_torch` compute what ONNX Runtime computes?

    OMP_NUM_THREADS=1 python benchmarks/foreign_to_torch.py FOLDER

FOLDER is that of `foreign_files.py`. The three smallest files of each package are tried on random inputs that ONNX
Runtime takes. *Agree* means that no output is more than 1e-4 of its largest element off, and NaN where ONNX Runtime has
it.
"""

from __future__ import annotations

import collections
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import modelexport
from modelexport.errors import ModelExportError
from modelexport.tagged.file import read_tagged
from modelexport.traces.inputs_and_example_sizes import make_feeds

FILES, ALLOWED = 3, 1e-4


def distance(right: Any, array: Any) -> float:
    """The largest difference as a share of the largest element."""
    right, array = np.asarray(right, np.float64), np.asarray(array, np.float64)
    if right.shape != array.shape or (np.isnan(right) != np.isnan(array)).any():
        return float("inf")
    known = right[~np.isnan(right)]
    return float(np.abs(known - array[~np.isnan(array)]).max() / max(np.abs(known).max(), 1e-30)) if known.size else 0.0


def outcome(file: Path) -> str:
    """What became of a file, in a few words."""
    try:
        feeds, _ = make_feeds(read_tagged(file), file, None, {}, provider="CPUExecutionProvider", seed=0)
        right = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, feeds)
        module = modelexport.to_torch(file).eval()
        with torch.no_grad():
            results = module(*map(torch.as_tensor, feeds.values()))
        results = results.values() if isinstance(results, dict) else results
        results = list(results) if not isinstance(results, torch.Tensor) else [results]
        off = max(map(distance, right, results), default=0.0)
        return "agree" if len(right) == len(results) and off <= ALLOWED else f"off by {off:.1e}"
    except ModelExportError as error:
        return f"refused: {' '.join(str(error).split())[:90]}"
    except Exception as error:  # whatever torch says of a module with such inputs
        return f"fails: {' '.join(str(error).split())[:90]}"


def main(folder: Path) -> None:
    """Print a row for each file, and the counts."""
    warnings.filterwarnings("ignore")
    onnxruntime.set_default_logger_severity(4)
    counts = collections.Counter[str]()
    print("| file | outcome |\n|---|---|")
    for package in sorted((folder / "models").iterdir()):
        for file in sorted(package.glob("*.onnx"), key=lambda file: file.stat().st_size)[:FILES]:
            result = outcome(file)
            counts[result.split()[0].strip(":")] += 1
            print(f"| {package.name.replace('_', '/', 1) if package.name[0] == '@' else package.name}: {file.name} "
                  f"| {result.replace('|', '/')} |", flush=True)  # fmt: skip
    print(f"\n{sum(counts.values())} files: {', '.join(f'{count} {what}' for what, count in counts.most_common())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
