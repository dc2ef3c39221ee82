"""What a package can be asked to consist of."""

from __future__ import annotations

from typing import Literal

PartsMode = Literal["auto", "whole", "generate", "pipeline"]
"""One graph, what ``generate`` runs, the parts of a pipeline, or whichever the model is."""
