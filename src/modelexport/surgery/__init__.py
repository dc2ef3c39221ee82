"""A new file made out of modules of another."""

from __future__ import annotations

from typing import Literal

Sharing = Literal["auto", "link", "copy"]
"""Weights in files of their own: ``link`` them into the folder of the output, ``copy`` what is used, or ``auto``: the
files of a checkpoint are linked, others cloned where the file system can, and copied elsewhere."""
