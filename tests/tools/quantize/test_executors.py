"""Modules measured in other processes: the same figures to the last digit, whoever measures them and in what order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import modelexport
from commands import run
from modelexport.tools.quantize.search_within_bound import search

RUNS = [{"x": np.random.default_rng(seed).standard_normal((4, 16), np.float32)} for seed in range(4)]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products and activations in turns."""
    generator, nodes, weights = np.random.default_rng(1), [], []
    for layer in range(5):
        weights.append(numpy_helper.from_array(generator.standard_normal((16, 16)).astype(np.float32) / 4, f"w{layer}"))
        name = f"/layers.{layer}/MatMul"
        nodes += [helper.make_node("MatMul", [f"v{layer}" if layer else "x", f"w{layer}"], [f"m{layer}"], name)]
        nodes += [helper.make_node("Tanh", [f"m{layer}"], [f"v{layer + 1}" if layer < 4 else "y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 16]) for name in "xy")
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    path = tmp_path_factory.mktemp("executors") / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        yield executor


class Backwards(Executor):
    """Runs the last task first, in this process; some fail, as those of a worker that dies."""

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self._fails = fails

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.sent.append(args)
        number, later = len(self.sent), Future[Any]()

        def result(timeout: float | None = None) -> Any:
            if self._fails(number):
                raise ConnectionError("the worker is gone")
            return fn(*args)

        later.result = result  # type: ignore[method-assign]
        return later


def losses(path: Path, executor: Any = None) -> dict[tuple[str, ...], float]:
    report = modelexport.sensitivity(path, to="int8-static", data=RUNS, steady=2.0, executor=executor)
    return {unit.calls: unit.loss for unit in report.units}


@pytest.fixture(scope="module")
def here(chain: Path) -> dict[tuple[str, ...], float]:
    return losses(chain)


def test_a_pool_of_processes_gives_the_same_to_the_last_digit(chain: Path, here: Any, pool: Executor) -> None:
    assert losses(chain, pool) == here


FAILING: dict[str, Callable[[int], bool]] = {
    "none": lambda number: False,
    "some": lambda number: number % 3 == 1,
    "all": lambda number: True,
}


@pytest.mark.parametrize("name", FAILING)
def test_a_worker_that_dies_loses_nothing(chain: Path, here: Any, name: str) -> None:
    assert losses(chain, Backwards(FAILING[name])) == here


def test_a_pool_whose_workers_end_loses_nothing(chain: Path, here: Any) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as ending:
        ending.submit(os._exit, 3)
        assert losses(chain, ending) == here


def test_what_is_sent_is_a_path_and_no_model(chain: Path) -> None:
    executor = Backwards()
    modelexport.sensitivity(chain, to="int8-dynamic", data=RUNS, executor=executor)
    assert len({id(sent[0]) for sent in executor.sent}) == 1 < len(executor.sent)  # pickled once
    job = pickle.loads(executor.sent[0][0])
    assert (job.path, "bytes" in {type(value).__name__ for value in vars(job).values()}) == (str(chain), False)


@pytest.mark.slow
def test_a_search_chooses_the_same(chain: Path, pool: Executor) -> None:
    how: dict[str, Any] = {"to": ["int8-static", "float16"], "data": RUNS, "within": "error<=0.02"}
    assert search(chain, executor=pool, **how).found == search(chain, **how).found


def test_jobs_of_the_command_give_the_same_document(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def pool(jobs: int, *how: Any) -> Executor:
        started.append(jobs)
        return Backwards()

    monkeypatch.setattr("modelexport.tools.quantize.executors.ProcessPoolExecutor", pool)
    np.savez(tmp_path / "data.npz", **RUNS[0])
    words = ("sensitivity", chain, "--to", "int8-dynamic", "--data", tmp_path / "data.npz", "--json")
    assert run(*words, "--jobs", "2").stdout == run(*words).stdout
    assert started == [2]


def test_jobs_without_a_search_are_refused(chain: Path, tmp_path: Path) -> None:
    assert run("quantize", chain, "-o", tmp_path / "out.onnx", "--to", "int8-dynamic", "--jobs", "2").returncode == 2


def test_workers_of_dask_give_the_same(chain: Path, here: Any) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert losses(chain, client.get_executor()) == here


@pytest.mark.slow
def test_workers_of_ray_give_the_same(chain: Path, here: Any) -> None:
    ray = pytest.importorskip("ray")

    class OnRay:
        def submit(self, function: Any, *arguments: Any) -> Any:
            return ray.remote(function).remote(*arguments).future()

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert losses(chain, OnRay()) == here
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them_even_if_it_is_killed() -> None:
    code = (
        "import os; from modelexport.tools.quantize.executors import Workers; workers = Workers(1, None); "
        "print(workers._executor.submit(os.getpid).result(), flush=True); os.kill(os.getpid(), 9)"
    )
    worker = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stdout)
    ends = time.monotonic() + 20
    while (there := Path(f"/proc/{worker}").exists()) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not there
