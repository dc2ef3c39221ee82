"""The corpus, made once for all workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from corpus import make_checkpoint, make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of small files of every kind. Cases copy the files that they change."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "corpus"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            make_corpus(folder)
            make_checkpoint(folder / "checkpoint")
            (folder / "done").touch()
    return folder
