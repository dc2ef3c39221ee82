"""The corpus, made once for all workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corpus import make_checkpoint, make_corpus

if TYPE_CHECKING:
    from exports import Shared  # a plugin, whose assertions pytest could not rewrite if it were imported here


@pytest.fixture(scope="session")
def corpus(shared: Shared) -> Path:
    """A folder of small files of every kind. Cases copy the files that they change."""

    def make(folder: Path) -> None:
        make_corpus(folder)
        make_checkpoint(folder / "checkpoint")

    return shared("corpus", make)
