"""Which layer is slow? The time of each module in ONNX Runtime, with its optimizer.

`modelexport profile net.onnx --html net.html` writes the same as a page to click through.
"""

import os
from pathlib import Path

import torch
from torch import nn

import modelexport

Path("slow_layer").mkdir(exist_ok=True)
os.chdir("slow_layer")  # the files below are written here


class Block(nn.Module):
    def __init__(self, width, kernel):
        super().__init__()
        self.mix = nn.Conv2d(width, width, kernel, padding="same")
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm(self.mix(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(32, kernel) for kernel in (3, 3, 9, 3)))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


modelexport.export(Net(), (torch.randn(1, 3, 128, 128),), "net.onnx")
found = modelexport.profile("net.onnx", runs=10)
rows = [row for row in found.table.rows() if row.depth == 2 and row.address.startswith("blocks.")]
slowest = max(rows, key=lambda row: row.total["seconds"])
print(f"a run takes {found.facts.wall_seconds * 1e3:.1f} ms")
for row in rows:
    print(f"  {row.address}  {row.total['share']:.0%}{'  <- slowest' if row is slowest else ''}")
print(f"{slowest.total['seconds'] / 1e6:.1f} ms in {slowest.address}")
