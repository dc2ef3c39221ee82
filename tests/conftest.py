"""What holds for every test: one thread a worker, no network, and the fixtures of ``exports``."""

from __future__ import annotations

import os

# Before anything imports torch or huggingface_hub; the commands that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

pytest_plugins = ["exports"]

# Workers of pytest-xdist share the cores; threads of their own would only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-goldens", action="store_true", help="Write tests/golden/ anew, to be reviewed.")


def pytest_configure(config: pytest.Config) -> None:
    # torch's exporter warns of its own use of its own class, on every export that is not quiet.
    config.addinivalue_line("filterwarnings", r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
