"""Running a file in ONNX Runtime as users run it, with a profile of the nodes of its optimized graph."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnxruntime

from modelexport.core.json_decoding import decode_json
from modelexport.errors import UsageError
from modelexport.runtime.sessions import Level, open_file, run_session, session_options
from modelexport.tables.turns import run_in_turns

_KERNEL = "_kernel_time"
_LARGE_WEIGHT = "1024"
"""The size in bytes from which ONNX Runtime saves a weight of the optimized graph in a separate file."""


class _Facts(msgspec.Struct, frozen=True):
    """The fields of a kernel in ONNX Runtime's profile that are used."""

    op_name: str = ""
    node_index: str = ""
    mem_bytes_requested_in_use: str = ""
    mem_requested_in_use_delta: str = ""


class Event(msgspec.Struct, frozen=True):
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
    """The time of each node in each run, without its nested nodes and without the profiler's own time."""
    whole: Sequence[int]
    """The time of each run, with the profiler."""
    profiler: int
    """The time that the profiler adds to each node."""
    outside: int
    """The median time of a run that is spent outside of its nodes, with the profiler."""
    memory: Mapping[Kernel, int]
    """Bytes in use while a node runs, beyond those in use between the runs."""


class Run(NamedTuple):
    """A file that runs on some inputs."""

    path: Path
    inputs: Mapping[str, Any]
    folder: Path
    """The folder in which the optimized graph and the profile are written."""

    @property
    def optimized(self) -> Path:
        """The graph that was profiled."""
        return self.folder / "optimized.onnx"


def time_runs(
    files: Sequence[Run], *, runs: int, warmup: int, level: Level, provider: str, rounds: Iterator[int]
) -> list[list[int]]:
    """Nanoseconds of each run of each file without profiling; several files run in turns."""
    sessions = [open_file(file.path, _options(level, provider, len(files))) for file in files]
    taken = _run_times(sessions, files, itertools.islice(rounds, max(warmup, 1) + runs - 1))
    return [times[max(warmup, 1) - 1 :] for times in taken]


def _options(level: Level, provider: str, files: int) -> onnxruntime.SessionOptions:
    """The options of a session that users open. If several run in turns, its threads stop spinning after each run."""
    options = session_options(level, provider)
    if files > 1:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _run_times(
    sessions: Sequence[onnxruntime.InferenceSession], files: Sequence[Run], rounds: Iterable[int]
) -> list[list[int]]:
    """Nanoseconds of each run of each session, one for each item of ``rounds``, after a run that is not timed."""
    calls = []
    for session, file in zip(sessions, files, strict=True):
        feeds = dict(file.inputs)
        run_session(session, feeds)  # in a thread, so that signals are handled
        calls.append(partial(session.run, [output.name for output in session.get_outputs()], feeds))
    return run_in_turns(calls, rounds)


def profile_runs(
    files: Sequence[Run], *, runs: int, warmup: int, level: Level, provider: str, rounds: Iterator[int]
) -> list[Profile]:
    """Run files in turns with ONNX Runtime's profiler, and once more to measure the memory of their nodes."""
    rounds = itertools.chain(rounds, itertools.repeat(0))
    timed: list[list[list[Event]]] = [[] for _ in files]
    recorded = warmup + runs
    while len(timed[0]) < runs:  # once, unless the nodes are so many that the profiler is full before the last run
        wanted = min(recorded, warmup + runs - len(timed[0]))
        all_options = [_options(level, provider, len(files)) for _ in files]
        for options, file in zip(all_options, files, strict=True):
            options.optimized_model_filepath = str(file.optimized)
            for key, value in (("file_name", "optimized.onnx.data"), ("min_size_in_bytes", _LARGE_WEIGHT)):
                options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", value)
        found = profiled(files, all_options, "time", itertools.islice(rounds, wanted - 1))
        if (recorded := min(map(len, found))) <= warmup:
            raise UsageError(
                f"ONNX Runtime's profiler is full after {recorded} of {warmup} warm-up runs and a measured one: "
                "give --warmup 0, or inputs for which loops end sooner"
            )
        for runs_of_file, events in zip(timed, found, strict=True):
            runs_of_file.extend(events[warmup:recorded])
    return [_profile(file, events, provider, rounds) for file, events in zip(files, timed, strict=True)]


def _profile(file: Run, timed: Sequence[Sequence[Event]], provider: str, rounds: Iterator[int]) -> Profile:
    """The profile of the recorded runs of a file."""
    profiler = _profiler_time(timed)
    kernels = _by_run(timed, profiler)
    memory: dict[Kernel, int] = {}
    options = session_options("none", provider)
    options.enable_mem_pattern = False  # otherwise a run allocates all memory as one block
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(file.folder / "memory.csv"))
    with contextlib.suppress(UsageError):  # a graph optimized for this machine's layout may not load again
        (found,) = profiled([file._replace(path=file.optimized)], [options], "memory", itertools.islice(rounds, 1))
        memory = _memory(found)
    whole = [run[-1].dur * 1000 for run in timed]
    of_nodes = [1000 * sum(own_time for _, own_time in nested(run[:-1])) for run in timed]
    outside = round(statistics.median(max(taken - part, 0) for taken, part in zip(whole, of_nodes, strict=True)))
    return Profile(kernels, whole, profiler, outside, memory)


def profiled(
    files: Sequence[Run], all_options: Sequence[onnxruntime.SessionOptions], prefix: str, rounds: Iterable[int]
) -> list[list[list[Event]]]:
    """The events of each run of each file, which run in turns."""
    sessions: list[onnxruntime.InferenceSession] = []
    try:
        for file, options in zip(files, all_options, strict=True):
            options.enable_profiling = True
            options.profile_file_prefix = str(file.folder / prefix)
            sessions.append(open_file(file.path, options))
        _run_times(sessions, files, rounds)
    finally:
        written = [Path(session.end_profiling()) for session in sessions]
    return [_events_by_run(decode_json(path.read_bytes(), kind=list[Event])) for path in written]


def _events_by_run(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each run: its nodes, and last the run itself."""
    events_by_run: list[list[Event]] = [[]]
    for event in events:
        if event.cat == "Node" and event.name.endswith(_KERNEL):
            events_by_run[-1].append(event)
        elif event.name == "model_run":
            events_by_run[-1].append(event)
            events_by_run.append([])
    return [run for run in events_by_run if run and run[-1].name == "model_run"]


def _profiler_time(runs: Sequence[Sequence[Event]]) -> int:
    """The time that the profiler adds to each node, because it records shapes before it stops the clock.

    A node that only changes a shape takes next to nothing, so that this is nearly what the fastest node takes.
    """
    taken: dict[Kernel, list[int]] = {}
    for run in runs:
        for event in run[:-1]:
            if event.args.op_name not in _HOLD_GRAPHS:
                taken.setdefault(_kernel(event), []).append(event.dur * 1000)
    return min((round(statistics.median(durations)) for durations in taken.values()), default=0)


def _by_run(runs: Sequence[Sequence[Event]], profiler: int) -> dict[Kernel, list[int]]:
    kernels: dict[Kernel, list[int]] = {}
    for number, run in enumerate(runs):
        for event, own_time in nested(run[:-1]):
            taken = kernels.setdefault(_kernel(event), [0] * len(runs))
            taken[number] += max(own_time * 1000 - profiler, 0)
    return kernels


def nested(events: Sequence[Event]) -> Iterator[tuple[Event, int]]:
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
"""Operators with nested graphs: a profile has no more of a node than its operator."""


def _kernel(event: Event) -> Kernel:
    return Kernel(event.name.removesuffix(_KERNEL), event.args.op_name, event.args.node_index)


def _memory(runs: Sequence[Sequence[Event]]) -> dict[Kernel, int]:
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
