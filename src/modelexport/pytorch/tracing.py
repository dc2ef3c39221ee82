"""Running code inside a ``torch.jit`` trace without recording it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def in_trace(state: Any) -> Iterator[Any]:
    """Record the code in the block in this trace, or, with ``None``, in no trace. Yields the trace that was running."""
    before = torch._C._get_tracing_state()
    torch._C._set_tracing_state(state)
    try:
        yield before
    finally:
        torch._C._set_tracing_state(before)
