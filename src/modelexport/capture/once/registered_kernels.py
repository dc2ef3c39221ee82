"""Kernels of operators, registered without the annotations that Python builds for each.

Before a decomposition, PyTorch registers ten kernels at each of 570 composite operators, and removes them afterwards.
The method that registers one defines a function whose annotations are generic types. Python builds these each time,
which takes a quarter of the export of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelexport.capture.patches import private

Registers = Callable[[Any, Any], Callable[[Any], Any]]
"""``OperatorBase.py_impl``: takes an operator and a key, and returns a decorator of a kernel."""


def registered_plainly(register: Registers) -> Registers:
    """The method that registers a kernel, which does so itself where the key is one of the dispatcher and is free."""
    key_type = private("dispatch keys")
    of_modes = key_type.Python

    def py_impl(operator: Any, key: Any) -> Callable[[Any], Any]:
        if type(key) is not key_type or key == of_modes or key in operator.py_kernels:
            return register(operator, key)

        def registered(kernel: Any) -> Any:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
            return kernel

        return registered

    return py_impl
