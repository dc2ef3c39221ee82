"""Prints one line when compiled code, such as the runtime of a device, ends the process of a command."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys

_FAULT = re.compile(r"Fatal Python error: (.+)")


def watch_for_crash() -> None:
    """Start a process that waits for the end of this one, and prints why if that was a fault of compiled code.

    Python's handler of such faults can only write a traceback; it goes into a pipe that the other process reads. This
    process still ends with the signal, as its shell expects.
    """
    reads, writes = os.pipe()
    if os.fork():
        os.close(reads)
        faulthandler.enable(writes, all_threads=False)
        return
    os.close(writes)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # that end the other process, and with it this one
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with os.fdopen(reads, errors="replace") as pipe:
        traceback = pipe.read()
    if fault := _FAULT.match(traceback):
        text = "ONNX Runtime cannot take this file or these inputs; what was not finished was not written"
        print(f"modelexport: compiled code ended the process ({fault[1]}): {text}", file=sys.stderr, flush=True)
    os._exit(0)
