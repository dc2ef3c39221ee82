"""The parameters of the translations of ``torch.onnx``, read once in a process.

Every export makes a registry of all translations anew: it parses the source of each of five hundred functions, and
infers its signature. Both depend on the function alone.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

_PARSED: MutableMapping[Any, Any] = WeakKeyDictionary()
"""What was parsed, by function."""


def parsed_once(parse: property) -> property:
    """The property of a function that parses its source."""

    def function_ir(function: Any) -> Any:
        if function not in _PARSED:
            _PARSED[function] = parse.__get__(function)
        return _PARSED[function]

    return property(function_ir)


def signed_once(sign: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method that infers the signature of an entry of the registry; it leaves what it finds at the function."""

    def sign_once(entry: Any) -> None:
        if not entry.is_custom and entry.signature is None:
            entry.signature = getattr(entry.onnx_function, "_pt_onnx_signature", None)
        sign(entry)

    return sign_once
