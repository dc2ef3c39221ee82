"""Regions: sets of nodes with their inputs, outputs and weights, cut out as models and put in the place of others."""

from __future__ import annotations

from typing import Literal

Sharing = Literal["auto", "link", "copy"]
"""External weights: ``link`` the files into the folder of the output, ``copy`` the used weights, or ``auto``: the files
of a checkpoint are linked, others cloned if the file system supports it, and copied otherwise."""
