"""A file run in ONNX Runtime as users run it, with its profile: what each node of its optimised graph took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import onnxruntime

from modelexport.errors import UsageError
from modelexport.runtime.sessions import CPU, run_session

Level = Literal["all", "extended", "basic", "none"]
_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_KERNEL = "_kernel_time"
_LARGE_WEIGHT = "1024"
"""Bytes from which ONNX Runtime writes a weight of the graph that it saves beside and not into it."""


class _Facts(msgspec.Struct, frozen=True):
    """What ONNX Runtime says of one kernel, as far as it is used here."""

    op_name: str = ""
    node_index: str = ""
    mem_bytes_requested_in_use: str = ""
    mem_requested_in_use_delta: str = ""


class _Event(msgspec.Struct, frozen=True):
    """One event of ONNX Runtime's profile; times are whole microseconds."""

    cat: str
    name: str
    ts: int = 0
    dur: int = 0
    args: _Facts = _Facts()


class Kernel(msgspec.Struct, frozen=True):
    """A node of the optimised graph, as the profile knows it."""

    name: str
    op_type: str
    index: str


@dataclass(frozen=True)
class Profile:
    """What ONNX Runtime's profile says of several runs. All times are nanoseconds."""

    kernels: Mapping[Kernel, Sequence[int]]
    """What each node took in each run, without the nodes of the graphs that it holds."""
    overhead: Sequence[int]
    """What each run took beside its nodes."""
    memory: Mapping[Kernel, int]
    """Bytes that are in use while a node runs, beyond those that are in use between the runs."""


def session_options(level: Level, provider: str) -> onnxruntime.SessionOptions:
    """The options of a session as users open it, at an optimisation level.

    Raises:
        UsageError: ONNX Runtime does not have this provider.
    """
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise UsageError(f"ONNX Runtime has no {provider} here: it has {', '.join(available)}")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = _LEVELS[level]
    options.log_severity_level = 4
    return options


def open_file(path: Path, options: onnxruntime.SessionOptions, provider: str) -> onnxruntime.InferenceSession:
    """A session for a file.

    Raises:
        UsageError: ONNX Runtime refuses it.
    """
    try:
        return onnxruntime.InferenceSession(path, options, providers=[provider])
    except Exception as error:  # its exception types are not public
        raise UsageError(f"ONNX Runtime does not load {path}: {' '.join(str(error).split())[:600]}") from error


def time_runs(
    path: Path, inputs: Mapping[str, Any], *, runs: int, warmup: int, level: Level = "all", provider: str = CPU
) -> list[int]:
    """Nanoseconds of each run without profiling."""
    session = open_file(path, session_options(level, provider), provider)
    names = [output.name for output in session.get_outputs()]
    feeds = dict(inputs)
    run_session(session, feeds)
    for _ in range(max(warmup - 1, 0)):
        session.run(names, feeds)
    taken = []
    for _ in range(runs):
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
    level: Level = "all",
    provider: str = CPU,
) -> tuple[Profile, Path]:
    """Run a file with ONNX Runtime's profiler, and once more for what memory its nodes need.

    Args:
        folder: Where the optimised graph and the profile are written; they are left there.

    Returns:
        The profile, and the optimised graph that it is of.
    """
    optimized = folder / "optimized.onnx"
    options = session_options(level, provider)
    options.optimized_model_filepath = str(optimized)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.onnx.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", _LARGE_WEIGHT)
    timed = _profiled(path, options, provider, inputs, folder / "time", warmup + runs)
    kernels, overhead = _by_run(timed, warmup)
    memory: dict[Kernel, int] = {}
    options = session_options("none", provider)
    options.enable_mem_pattern = False  # or the memory of a run is one block
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", str(folder / "memory.csv"))
    with contextlib.suppress(UsageError):  # a graph that is laid out for the machine may not load again
        memory = _memory(_profiled(optimized, options, provider, inputs, folder / "memory", 2))
    return Profile(kernels, overhead, memory), optimized


def _profiled(
    path: Path,
    options: onnxruntime.SessionOptions,
    provider: str,
    inputs: Mapping[str, Any],
    prefix: Path,
    runs: int,
) -> list[list[_Event]]:
    """The events of each run: its nodes, and last the run itself."""
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    session = open_file(path, options, provider)
    names = [output.name for output in session.get_outputs()]
    feeds = dict(inputs)
    try:
        run_session(session, feeds)
        for _ in range(runs - 1):
            session.run(names, feeds)
    finally:
        written = session.end_profiling()
    data = Path(written).read_bytes()
    events = msgspec.json.decode(data, type=list[_Event])
    found: list[list[_Event]] = [[]]
    for event in events:
        if event.cat == "Node" and event.name.endswith(_KERNEL):
            found[-1].append(event)
        elif event.name == "model_run":
            found[-1].append(event)
            found.append([])
    return [run for run in found if run and run[-1].name == "model_run"]


def _by_run(runs: Sequence[Sequence[_Event]], warmup: int) -> tuple[dict[Kernel, list[int]], list[int]]:
    kernels: dict[Kernel, list[int]] = {}
    overhead: list[int] = []
    counted = runs[warmup:]
    for number, run in enumerate(counted):
        top = 0
        for event, own, depth in _nested(run[:-1]):
            taken = kernels.setdefault(_kernel(event), [0] * len(counted))
            taken[number] += own * 1000
            top += event.dur if depth == 0 else 0
        overhead.append(max(run[-1].dur - top, 0) * 1000)
    return kernels, overhead


def _nested(events: Sequence[_Event]) -> Iterator[tuple[_Event, int, int]]:
    """Each event, its duration without the events inside it, and how deep it lies: nodes hold graphs."""
    order = sorted(range(len(events)), key=lambda index: (events[index].ts, -events[index].dur, -index))
    own = [event.dur for event in events]
    depth = [0] * len(events)
    running: list[int] = []
    for index in order:
        event = events[index]
        while running and events[running[-1]].ts + events[running[-1]].dur <= event.ts:
            running.pop()
        # Only nodes that hold graphs have others inside them; two that follow each other may touch.
        if running and _inside(event, events[running[-1]]):
            own[running[-1]] -= event.dur
            depth[index] = depth[running[-1]] + 1
        if event.args.op_name in _HOLD_GRAPHS:
            running.append(index)
    return ((event, max(own[index], 0), depth[index]) for index, event in enumerate(events))


_HOLD_GRAPHS = ("If", "Loop", "Scan", "SequenceMap", "BeamSearch", "GreedySearch", "Sampling")


def _inside(event: _Event, other: _Event) -> bool:
    return event.ts >= other.ts and event.ts + event.dur <= other.ts + other.dur


def _kernel(event: _Event) -> Kernel:
    return Kernel(event.name.removesuffix(_KERNEL), event.args.op_name, event.args.node_index)


def _memory(runs: Sequence[Sequence[_Event]]) -> dict[Kernel, int]:
    """Bytes in use while each node of the last run runs, beyond what is in use before the first."""
    events = [event for event in runs[-1][:-1] if event.args.mem_bytes_requested_in_use]
    if not events:
        return {}
    first = events[0].args
    before = int(first.mem_bytes_requested_in_use) - int(first.mem_requested_in_use_delta)
    found: dict[Kernel, int] = {}
    for event in events:
        kernel = Kernel(event.name.removesuffix(_KERNEL), event.args.op_name, "")
        found[kernel] = max(found.get(kernel, 0), int(event.args.mem_bytes_requested_in_use) - before)
    return found
