"""What benchmarks over many models share: each model in a process of its own, slices, and the table of a page."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

END = "<!-- end -->"
T = TypeVar("T")


def isolated(work: Callable[[], Any], seconds: float) -> tuple[Any, str]:
    """What a function returns in a silent process, which is ended after some seconds; if nothing, the reason."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def child() -> None:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        warnings.simplefilter("ignore")
        sending.send(work())
        sending.close()

    process = context.Process(target=child)
    process.start()
    sending.close()
    try:
        if receiving.poll(seconds):
            return receiving.recv(), ""
        return None, f"took more than {seconds:.0f} s"
    except EOFError:
        process.join()
        return None, f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def in_slices(
    results: Path | None,
    kind: type[T],
    works: Iterable[tuple[tuple[str, ...], Callable[[], T]]],
    line: Callable[[T], str],
) -> Iterator[T]:
    """The outcomes of works, of which those in a file are not done again; others are appended to it.

    Args:
        works: The first fields of each outcome, and what makes it.
        line: An outcome as text, which is printed when it is made.
    """
    texts = results.read_text().splitlines() if results is not None and results.exists() else []
    known = [kind(**json.loads(text)) for text in texts]
    for key, work in works:
        made = next((one for one in known if dataclasses.astuple(one)[: len(key)] == key), None)  # type: ignore[call-overload]
        if made is None:
            made = work()
            print(line(made), file=sys.stderr, flush=True)
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(made)) + "\n")  # type: ignore[call-overload]
        yield made


def measured(command: Sequence[str], **options: Any) -> tuple[float, float, int, str]:
    """Wall time, processor time, peak memory in bytes, and the output of a process; ``options`` are of ``Popen``."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, **options)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        said = output.read(), errors.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {said[1][-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, said[0]


def least_seconds(*works: Callable[[], object], runs: int) -> list[float]:
    """Processor time of each, the least of some runs by turns: a machine may be a fifth slower a second later."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for work, taken in zip(works, found, strict=True):
            start = time.process_time()
            work()
            taken.append(time.process_time() - start)
    return [min(taken) for taken in found]


def write_table(page: Path, begin: str, table: str) -> None:
    """Put a table into a page, between a marker and the next end."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
