"""``torch.onnx.export`` without its messages, and faster: it translates the same, but reads only what it needs."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator

from modelexport.capture.once.registries import parsed_when_used, read_once, signed_when_used
from modelexport.capture.patches import replaced
from modelexport.core.collected_messages import collected

_READ_ONCE = {"parsed": parsed_when_used, "signatures": signed_when_used, "schemas": read_once}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside, exporters print no messages and raise no warnings, and do not read all their translations anew."""
    with (
        replaced(_READ_ONCE),
        collected(),
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield
