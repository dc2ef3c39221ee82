"""Settings for every test: one thread for each worker, no network, and the fixtures of ``exports``."""

from __future__ import annotations

import gc
import os
from collections import defaultdict

# Before torch or huggingface_hub is imported; the commands that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from xdist import is_xdist_controller

# A folder's own settings may import it before the session begins.
pytest.register_assert_rewrite("exports")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-goldens", action="store_true", help="Rewrite tests/golden/, for review.")


def pytest_configure(config: pytest.Config) -> None:
    # torch's exporter warns about its own use of its own class, on every export that is not quiet.
    config.addinivalue_line("filterwarnings", r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what tests need, but not in the process that only deals them out: the workers start after it."""
    if is_xdist_controller(session):
        return
    # Garbage collections would look through the objects of all packages again and again, a tenth of the time of tests.
    gc.set_threshold(50_000, 20, 100)
    import torch
    from hypothesis import HealthCheck, settings

    session.config.pluginmanager.import_plugin("exports")
    # How long an example takes depends on what else the machine does.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
    # Workers of pytest-xdist share the cores; more threads would only wait for each other.
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave models of the table that are not `QUICK`, and all but two cases of a `sweep`, to `make test-slow`."""
    sweeps = defaultdict(list)
    for item in items:
        if _exports_another(item):
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            sweeps[item.nodeid.split("[")[0]].append(item)
    for sweep in sweeps.values():
        for number, item in enumerate(sweep):
            if number not in (0, len(sweep) // 2):
                item.add_marker(pytest.mark.slow)


def _exports_another(item: pytest.Item) -> bool:
    """Whether a test is about an exported model of the table that is not a quick one, by ``name`` or ``beside``."""
    import models

    if not isinstance(item, pytest.Function) or "exported" not in item.fixturenames or not hasattr(item, "callspec"):
        return False
    params = item.callspec.params
    name = params.get("name", params.get("beside"))
    return name in models.NAMES and name not in models.QUICK


def pytest_collection_finish() -> None:
    # What packages made when they were imported stays.
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test has the same random numbers whichever ran before it in its worker."""
    import torch

    torch.manual_seed(0)
