"""Code of a model under ``torch.autocast`` or with gradients set on or off, whose nodes keep their annotations.

``torch.export`` puts such code into graphs of their own, which decomposition runs as Python functions, so that it
forgets everything that is known of their nodes. As interpreted graphs they are decomposed node by node, as the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.fx

# Not public; tests/capture/test_private_names.py is the canary.
from torch._higher_order_ops.wrap import WrapWithAutocast, WrapWithSetGradEnabled

from modelexport.core.attributes import attribute_set


@contextmanager
def regions_interpreted() -> Iterator[None]:
    """Inside, those operators interpret their graphs."""
    with ExitStack() as stack:
        for operator in (WrapWithAutocast, WrapWithSetGradEnabled):
            stack.enter_context(attribute_set(operator, "__call__", _interpreting(operator.__call__)))
        yield


def _interpreting(call: Callable[..., Any]) -> Callable[..., Any]:
    def with_interpreters(operator: Any, *args: Any) -> Any:
        graph = torch.fx.GraphModule
        return call(operator, *(torch.fx.Interpreter(one).run if isinstance(one, graph) else one for one in args))

    return with_interpreters
