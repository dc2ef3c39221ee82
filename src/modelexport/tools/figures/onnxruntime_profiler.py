"""Running a file in ONNX Runtime as users run it, with a profile of the nodes of its optimized graph."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnxruntime

from modelexport.core.json_decoding import decode_json
from modelexport.errors import UsageError
from modelexport.runtime.sessions import Level, open_file, run_session, session_options

_KERNEL = "_kernel_time"
_LARGE_WEIGHT = "1024"
"""The size in bytes from which ONNX Runtime saves a weight of the optimized graph in a separate file."""


class _Facts(msgspec.Struct, frozen=True):
    """The fields of a kernel in ONNX Runtime's profile that are used."""

    op_name: str = ""
    node_index: str = ""
    mem_bytes_requested_in_use: str = ""
    mem_requested_in_use_delta: str = ""


class _Event(msgspec.Struct, frozen=True):
    """One event of ONNX Runtime's profile; times are integers in microseconds."""

    cat: str
    name: str
    ts: int = 0
    dur: int = 0
    args: _Facts = _Facts()


class Kernel(msgspec.Struct, frozen=True):
    """A node of the optimized graph, as identified in the profile."""

    name: str
    op_type: str
    index: str


@dataclass(frozen=True)
class Profile:
    """ONNX Runtime's profile of several runs. All times are in nanoseconds."""

    kernels: Mapping[Kernel, Sequence[int]]
    """What each node took in each run, without the nodes of the graphs that it holds and without the profiler."""
    whole: Sequence[int]
    """What each run took, with the profiler."""
    profiler: int
    """What the profiler adds to the time of each node."""
    outside: int
    """What a run takes outside of its nodes, with the profiler: the median of the runs."""
    memory: Mapping[Kernel, int]
    """Bytes in use while a node runs, beyond those in use between the runs."""


def time_runs(
    path: Path, inputs: Mapping[str, Any], *, runs: int, warmup: int, level: Level, provider: str, rounds: Iterator[int]
) -> list[int]:
    """Nanoseconds of each run without profiling."""
    session = open_file(path, session_options(level, provider))
    return _run_times(session, inputs, itertools.islice(rounds, max(warmup, 1) + runs - 1))[max(warmup, 1) :]


def _run_times(session: onnxruntime.InferenceSession, inputs: Mapping[str, Any], rounds: Iterable[int]) -> list[int]:
    """Nanoseconds of each run: 0 of a first one, then one for each item of ``rounds``.

    Raises:
        UsageError: The inputs do not fit, or a node fails.
    """
    names, feeds = [output.name for output in session.get_outputs()], dict(inputs)
    run_session(session, feeds)  # in a thread, so that signals are handled; it is counted as a run
    taken = [0]
    for _ in rounds:
        began = time.perf_counter_ns()
        session.run(names, feeds)
        taken.append(time.perf_counter_ns() - began)
    return taken


def profile_runs(
    path: Path,
    inputs: Mapping[str, Any],
    folder: Path,
    *,
    runs: int,
    warmup: int,
    level: Level,
    provider: str,
    rounds: Iterator[int],
) -> tuple[Profile, Path]:
    """Run a file with ONNX Runtime's profiler, and once more to measure the memory of its nodes.

    Args:
        folder: The folder for the optimized graph and the profile, which are kept.

    Returns:
        The profile, and the optimized graph that was profiled.
    """
    optimized = folder / "optimized.onnx"
    options = session_options(level, provider)
    options.optimized_model_filepath = str(optimized)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.onnx.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", _LARGE_WEIGHT)
    rounds = itertools.chain(rounds, itertools.repeat(0))
    timed: list[list[_Event]] = []
    recorded = warmup + runs
    while len(timed) < runs:  # once, unless the nodes are so many that the profiler is full before the last run
        wanted = min(recorded, warmup + runs - len(timed))
        found = _profiled(path, options, inputs, folder / "time", itertools.islice(rounds, wanted - 1))
        if (recorded := len(found)) <= warmup:
            raise UsageError(
                f"ONNX Runtime's profiler is full after {recorded} of {warmup} warm-up runs and a measured one: "
                "give --warmup 0, or inputs for which loops end sooner"
            )
        timed += found[warmup:]
    profiler = _profiler_time(timed)
    kernels = _by_run(timed, profiler)
    memory: dict[Kernel, int] = {}
    options = session_options("none", provider)
    options.enable_mem_pattern = False  # otherwise a run allocates all memory as one block
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(folder / "memory.csv"))
    with contextlib.suppress(UsageError):  # a graph optimized for this machine's layout may not load again
        memory = _memory(_profiled(optimized, options, inputs, folder / "memory", itertools.islice(rounds, 1)))
    whole = [run[-1].dur * 1000 for run in timed]
    of_nodes = [1000 * sum(own_time for _, own_time in _nested(run[:-1])) for run in timed]
    outside = round(statistics.median(max(taken - part, 0) for taken, part in zip(whole, of_nodes, strict=True)))
    return Profile(kernels, whole, profiler, outside, memory), optimized


def _profiled(
    path: Path, options: onnxruntime.SessionOptions, inputs: Mapping[str, Any], prefix: Path, rounds: Iterable[int]
) -> list[list[_Event]]:
    """The events of each run: its nodes, and last the run itself."""
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    session = open_file(path, options)
    try:
        _run_times(session, inputs, rounds)
    finally:
        written = session.end_profiling()
    data = Path(written).read_bytes()
    events = decode_json(data, kind=list[_Event])
    events_by_run: list[list[_Event]] = [[]]
    for event in events:
        if event.cat == "Node" and event.name.endswith(_KERNEL):
            events_by_run[-1].append(event)
        elif event.name == "model_run":
            events_by_run[-1].append(event)
            events_by_run.append([])
    return [run for run in events_by_run if run and run[-1].name == "model_run"]


def _profiler_time(runs: Sequence[Sequence[_Event]]) -> int:
    """What the profiler adds to each node: it writes down shapes before it stops the clock.

    A node that only changes a shape takes next to nothing, so that this is nearly what the fastest node takes.
    """
    taken: dict[Kernel, list[int]] = {}
    for run in runs:
        for event in run[:-1]:
            if event.args.op_name not in _HOLD_GRAPHS:
                taken.setdefault(_kernel(event), []).append(event.dur * 1000)
    return min((round(statistics.median(durations)) for durations in taken.values()), default=0)


def _by_run(runs: Sequence[Sequence[_Event]], profiler: int) -> dict[Kernel, list[int]]:
    kernels: dict[Kernel, list[int]] = {}
    for number, run in enumerate(runs):
        for event, own_time in _nested(run[:-1]):
            taken = kernels.setdefault(_kernel(event), [0] * len(runs))
            taken[number] += max(own_time * 1000 - profiler, 0)
    return kernels


def _nested(events: Sequence[_Event]) -> Iterator[tuple[_Event, int]]:
    """Each event, and its duration without the events inside it: nodes may have nested graphs."""
    order = sorted(range(len(events)), key=lambda index: (events[index].ts, -events[index].dur, -index))
    own_times = [event.dur for event in events]
    running: list[int] = []
    for index in order:
        event = events[index]
        while running and events[running[-1]].ts + events[running[-1]].dur <= event.ts:
            running.pop()
        # Only nodes with nested graphs contain others; consecutive events may touch.
        if running and event.ts + event.dur <= events[running[-1]].ts + events[running[-1]].dur:
            own_times[running[-1]] -= event.dur
        if event.args.op_name in _HOLD_GRAPHS:
            running.append(index)
    return ((event, max(own_times[index], 0)) for index, event in enumerate(events))


_HOLD_GRAPHS = ("If", "Loop", "Scan", "SequenceMap", "BeamSearch", "GreedySearch", "Sampling")


def _kernel(event: _Event) -> Kernel:
    return Kernel(event.name.removesuffix(_KERNEL), event.args.op_name, event.args.node_index)


def _memory(runs: Sequence[Sequence[_Event]]) -> dict[Kernel, int]:
    """Bytes in use during each node of the last run, beyond those in use before the first node."""
    events = [event for run in runs[-1:] for event in run[:-1] if event.args.mem_bytes_requested_in_use]
    if not events:
        return {}
    first = events[0].args
    before = int(first.mem_bytes_requested_in_use) - int(first.mem_requested_in_use_delta)
    requested: dict[Kernel, int] = {}
    for event in events:
        kernel = Kernel(event.name.removesuffix(_KERNEL), event.args.op_name, "")
        requested[kernel] = max(requested.get(kernel, 0), int(event.args.mem_bytes_requested_in_use) - before)
    return requested
