"""Exports: the pipeline and its steps."""

from __future__ import annotations

from typing import Literal

FuseFor = Literal["ort-cpu", "ort-cuda"]
"""The runtime that nodes are fused for."""
