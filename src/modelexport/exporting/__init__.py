"""Exports: the pipeline and its steps."""

from __future__ import annotations

from typing import Literal

FuseFor = Literal["ort-cpu", "ort-cuda"]
"""The runtime that nodes are fused for."""

PartsMode = Literal["auto", "whole", "generate", "pipeline"]
"""One graph, the parts that ``generate`` runs, the parts of a pipeline, or the one of these that fits the model."""
