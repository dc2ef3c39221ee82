"""Running code inside a ``torch.jit`` trace without recording it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modelexport.pytorch.private_torch import set_tracing_state, tracing_state


@contextmanager
def in_trace(state: Any) -> Iterator[Any]:
    """Record the code in the block in this trace, or, with ``None``, in no trace. Yields the trace that was running."""
    before = tracing_state()
    set_tracing_state(state)
    try:
        yield before
    finally:
        set_tracing_state(before)
