"""Models with numbers that Python computes from sizes, one by one: which axes their files fix, and what `verify` says.

Usage: OMP_NUM_THREADS=1 python benchmarks/size_floats.py [memory]

With ``memory``: the peak memory of `verify` on files below 10 MB, each in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import parser
from torch import nn

import modelexport
from modelexport.errors import ModelExportError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/exporting"))


def fixed_and_accused() -> None:
    from test_numbers_from_sizes import BY_TRACE, FUNCTIONS, Computed

    print("| number | front end | fixed axes | verify |\n|---|---|---|---|")
    for frontend, names in (("dynamo", FUNCTIONS), ("torchscript", BY_TRACE)):
        for name in names:
            torch.manual_seed(0)
            model, x = Computed(name).eval(), torch.randn(3, 10, 20)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "m.onnx"
                try:
                    result = modelexport.export(model, {"x": x}, path, dynamic=True, frontend=frontend)  # type: ignore[arg-type]
                    verdict = modelexport.verify(model, {"x": x}, path).verdict
                    print(f"| {name} | {frontend} | {len(result.fixed)} of 3 | {verdict} |", flush=True)
                except ModelExportError:
                    print(f"| {name} | {frontend} | refused | |", flush=True)


class Block(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.conv = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(nn.functional.elu(self.norm(self.conv(x))))


def audio(folder: Path) -> None:
    """A megabyte of convolutions on 150,000 samples."""
    blocks = [Block(64, 3 ** (i % 4)) for i in range(12)]
    model = nn.Sequential(nn.Conv1d(1, 64, 7, padding=3), *blocks, nn.Conv1d(64, 1, 7, padding=3)).eval()
    inputs = (torch.randn(1, 1, 150_000),)
    modelexport.export(model, inputs, folder / "m.onnx", check=False)
    assert modelexport.verify(model, inputs, folder / "m.onnx").agrees


def int8(folder: Path) -> None:
    """A convolution of int8 weights on 64 x 900 x 160 numbers."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval()
    modelexport.export(model, (torch.randn(1, 64, 900, 160),), folder / "m.onnx", check=False)
    modelexport.quantize(folder / "m.onnx", output=folder / "q.onnx", to="int8-dynamic")
    modelexport.verify(folder / "m.onnx", against=folder / "q.onnx")


def sizes(folder: Path) -> None:
    """A file whose input is three sizes, on random numbers."""
    text = "g (int64[3] size) => (float[a, b, c] y) { y = ConstantOfShape (size) }"
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    proto.graph.node[0].name = "/a/ConstantOfShape"
    onnx.save(proto, folder / "m.onnx")
    modelexport.adopt(folder / "m.onnx", output=folder / "a.onnx")
    modelexport.verify(folder / "a.onnx", against=folder / "a.onnx")


FILES = {one.__name__: one for one in (audio, int8, sizes)}


def memory() -> None:
    print("| file | peak memory |\n|---|---|")
    for name, build in FILES.items():
        code = f"import resource, size_floats; size_floats.run('{name}'); print(resource.getrusage(0).ru_maxrss)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
        peak = f"{int(done.stdout.split()[-1]) / 1e6:.1f} GB" if done.returncode == 0 else "fails"
        print(f"| {(build.__doc__ or '').rstrip('.')} | {peak} |", flush=True)


def run(name: str) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        FILES[name](Path(folder))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    memory() if "memory" in sys.argv else fixed_and_accused()
