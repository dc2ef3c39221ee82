"""What every export registers anew, done when it is needed: signatures of translations, and kernels of operators.

The registry of all translations parses the source of each of five hundred functions, and infers its signature. Both
depend on the function alone, and a model needs few of them. Before a decomposition, PyTorch registers ten kernels at
each of 570 composite operators, and removes them afterwards. The method that registers one defines a function whose
annotations are generic types. Python builds these each time, which takes a quarter of the export of a small model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx

from modelexport.capture.patches import private

Registers = Callable[[Any, Any], Callable[[Any], Any]]
"""``OperatorBase.py_impl``: takes an operator and a key, and returns a decorator of a kernel."""


class _Parsed:
    """What the source of a function says; it is parsed for anything but the domain, which the function has."""

    def __init__(self, function: Any, parse: property) -> None:
        self._function, self._parse = function, parse
        self.domain = function.opset.domain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parse.__get__(self._function), name)


def parsed_when_used(parse: property) -> property:
    """The property of a function that parses its source."""
    return property(lambda function: _Parsed(function, parse))


def signed_when_used(sign: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method that infers the signature of a new entry of the registry, and leaves it at the function."""

    def signature(entry: Any) -> Any:
        entry.__class__ = type(entry).__base__
        entry.signature = getattr(entry.onnx_function, "_pt_onnx_signature", None)
        sign(entry)
        return entry.signature

    def sign_later(entry: Any) -> None:
        if entry.is_custom:
            entry.signature = entry.signature or getattr(entry.onnx_function, "_pt_onnx_signature", None)
        if entry.is_custom or entry.signature is not None or entry.skip_signature_inference:
            sign(entry)
            return
        if not unsigned:
            unsigned.append(type("Unsigned", (type(entry),), {"signature": property(signature)}))
        entry.__class__ = unsigned[0]

    unsigned: list[type] = []
    return sign_later


def read_once(read: Callable[[onnx.defs.OpSchema], Any]) -> Callable[[onnx.defs.OpSchema], Any]:
    """The function that makes a signature of an operator's schema; for operators of the standard it makes each once."""
    standard = functools.cache(lambda name, version: read(onnx.defs.get_schema(name, version)))
    return lambda schema: read(schema) if schema.domain else standard(schema.name, schema.since_version)


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
