"""Work inside a ``torch.jit`` trace that is not to be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def in_trace(state: Any) -> Iterator[Any]:
    """Inside, what runs is recorded in this trace, or, with ``None``, in none. Gives the trace that was running."""
    before = torch._C._get_tracing_state()
    torch._C._set_tracing_state(state)
    try:
        yield before
    finally:
        torch._C._set_tracing_state(before)
