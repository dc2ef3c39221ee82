"""The choices of the parts of a package."""

from __future__ import annotations

from typing import Literal

PartsMode = Literal["auto", "whole", "generate", "pipeline"]
"""One graph, the parts that ``generate`` runs, the parts of a pipeline, or the one of these that fits the model."""
