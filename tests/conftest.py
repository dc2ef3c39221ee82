"""What holds for every test: one thread a worker, no network, and the fixtures of ``exports``."""

from __future__ import annotations

import os

# Before anything imports torch or huggingface_hub; the commands that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

pytest_plugins = ["exports"]

# Workers of pytest-xdist share the cores; threads of their own would only wait for each other.
torch.set_num_threads(1)
