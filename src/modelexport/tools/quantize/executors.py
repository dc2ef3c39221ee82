"""Measurements of choices in other processes or on other machines, by an executor as ``concurrent.futures`` has them.

A job names the file and what to measure, and each worker opens the file once. It measures in the same session as this
process would, so that all figures are the same to the last digit.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from modelexport.core.text import first_few
from modelexport.errors import UsageError
from modelexport.runtime.devices import CPU, find_device
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.quantize.methods import Method, Ranges, parse_method
from modelexport.tools.quantize.metrics_and_bounds import Metric, find_metric
from modelexport.tools.quantize.prepared_for_quantizers import prepared
from modelexport.tools.quantize.recipes import left_alone
from modelexport.tools.quantize.switched_model import SwitchableSession, Unit
from modelexport.traces.calibration_data import RunInputs, given_runs

Choices = Sequence[tuple[int, Method]]
Losses = list[tuple[float, str]]
"""For each choice its loss, and the reason if it did not run."""
_PARTS = 4
"""Into how many parts the choices of a run are divided for each worker: the last ones end at about the same time."""


class Future(Protocol):
    """A call that an executor runs, as ``concurrent.futures.Future``."""

    def result(self) -> Any:
        """Wait for the result."""


@runtime_checkable
class Executor(Protocol):
    """What runs functions elsewhere: a pool of processes, ``Client.get_executor()`` of Dask, or another."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Run a function of arguments that can be pickled."""


@dataclass(frozen=True)
class Job:
    """What a worker needs to measure choices: a path, and what to do with the file there."""

    path: str
    size: int
    """The bytes of the file."""
    methods: tuple[str, ...]
    units: tuple[Unit, ...]
    data: Any
    """A path, or arrays."""
    processor: str | None
    ranges: Ranges | None
    """What was measured on the data, for methods that need it."""
    output: str | None
    device: str
    metric: str


@contextmanager
def workers_for(
    executor: Executor | int | None,
    tagged: TaggedFile,
    units: Sequence[Unit],
    methods: Sequence[Method],
    data: RunInputs | str | Path,
    **what: Any,
) -> Iterator[Workers | None]:
    """Yield workers that measure with an executor; ``None`` without an executor.

    Args:
        data: As :func:`.sensitivity.sensitivity` takes them.
        what: The other fields of the :class:`Job`.
    """
    if executor is None:
        yield None
        return
    path = tagged.path.absolute()
    given = str(Path(data).absolute()) if isinstance(data, str | Path) else list(data)
    folder = None if what["processor"] is None else str(Path(what["processor"]).absolute())
    file, _, function = what["metric"].rpartition(":")
    metric = f"{Path(file).absolute()}:{function}" if file else function
    what |= {"processor": folder, "metric": metric, "data": given}
    names = tuple(map(str, methods))
    job = Job(path=str(path), size=path.stat().st_size, methods=names, units=tuple(units), **what)
    workers = Workers(executor, job)
    try:
        yield workers
    finally:
        workers.end()


def open_switched(
    tagged: TaggedFile,
    units: Sequence[Unit],
    methods: Sequence[Method],
    ranges: Ranges | None,
    output: str | None,
    device: str = CPU,
) -> SwitchableSession:
    """A session in which every unit can have every method; on a device, one for each choice.

    Args:
        ranges: What :func:`.quantize.calibrate` measured, for methods that need it.
    """
    if not units:
        left = left_alone(itertools.product(tagged.model.graph, methods)).values()
        names, why = ", ".join(map(str, methods)), first_few(left, 1) or "no node has a weight it is for"
        raise UsageError(f"{tagged.path} has no module that {names} can quantize: {why}")
    if not find_device(device).is_this_processor:
        from modelexport.tools.quantize.measured_on_device import SessionOnDevice

        return SessionOnDevice(tagged, units, methods, ranges, device, output)
    return SwitchableSession(tagged, units, methods, ranges=ranges, output=output)


_opened: dict[bytes, tuple[SwitchableSession, RunInputs, Metric]] = {}
"""The session of the last job of this process."""


def measure_choices(pickled: bytes, run: int, choices: Sequence[tuple[int, str]]) -> Losses:
    """Measure choices with the inputs of one run; what a worker executes.

    Args:
        pickled: A :class:`Job`, pickled once for all calls.
    """
    if pickled not in _opened:
        while _opened:
            _opened.popitem()[1][0].__exit__()
        job: Job = pickle.loads(pickled)
        path = Path(job.path)
        if not path.is_file() or path.stat().st_size != job.size:
            raise UsageError(f"a worker does not see {job.path} as it is here: give a folder that all workers share")
        tagged = prepared(read_tagged(path))
        feeds = given_runs(tagged, job.data, job.processor)
        switched = open_switched(tagged, job.units, _methods(job.methods), job.ranges, job.output, job.device)
        _opened[pickled] = switched, feeds, find_metric(job.metric)
    switched, feeds, metric = _opened[pickled]
    chosen = zip((index for index, _ in choices), _methods([method for _, method in choices]), strict=True)
    return losses_of(switched, feeds[run], chosen, metric)


def _methods(texts: Sequence[str]) -> list[Method]:
    return [method for method in map(parse_method, texts) if method is not None]


def losses_of(
    switched: SwitchableSession, inputs: Any, choices: Iterable[tuple[int, Method]], metric: Metric
) -> Losses:
    """The losses of choices in a session."""
    right = switched.kept(inputs)
    losses: Losses = []
    for index, method in choices:
        computed = [switched.run(inputs, {index: method}, exact=exact) for exact in switched.exactness]
        failed = any(output is None for output in computed)
        loss = float("inf") if failed else max(metric.loss(right, output) for output in computed)
        losses.append((loss, switched.failure if failed else ""))
    return losses


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, even if it was killed."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Workers:
    """Measures with an executor. The work of a worker that dies is done by others, or in this process."""

    def __init__(self, executor: Executor | int, job: Job) -> None:
        self._jobs, self._job = executor if isinstance(executor, int) else _PARTS, pickle.dumps(job)
        self._own = isinstance(executor, int)
        self._executor: Any = self._pool() if isinstance(executor, int) else executor

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"), _end_with_parent)

    def measure(self, run: int, choices: Choices, here: Callable[[Choices], Losses]) -> Losses:
        """The losses of choices in the inputs of a run.

        Args:
            here: Measures choices in this process.
        """
        count = max(1, -(-len(choices) // (self._jobs * _PARTS)))
        parts = [choices[start : start + count] for start in range(0, len(choices), count)]
        found: dict[int, Losses] = {}
        for _ in range(2):
            self._try(run, parts, found)
        for place, part in enumerate(parts):  # also what fails here, as it did there, with its own error
            if place not in found:
                found[place] = here(part)
        return [loss for place in range(len(parts)) for loss in found[place]]

    def _try(self, run: int, parts: Sequence[Choices], found: dict[int, Losses]) -> None:
        futures, broken = {}, False
        for place, part in enumerate(parts):
            if place in found:
                continue
            try:
                sent = [(index, str(method)) for index, method in part]
                futures[place] = self._executor.submit(measure_choices, self._job, run, sent)
            except Exception:  # the executor ended, in whatever way it tells
                broken = True
        for place, future in futures.items():
            try:
                found[place] = future.result()
            except Exception:  # a worker died, or what it measured failed
                broken = True
        if broken and self._own:
            self._executor.shutdown(wait=False)
            self._executor = self._pool()

    def end(self) -> None:
        """End the processes that were started for this."""
        if self._own:
            self._executor.shutdown(cancel_futures=True)
