"""The tensors of plain models: bytes that are parsed when someone asks for the elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.files.deserializing import Form, OfForm, SerializedTensor
from modelexport.graph.plain import NOTHING

if TYPE_CHECKING:
    _Tensor = SerializedTensor
else:  # its attributes would take more memory and time than those below
    _Tensor = OfForm


class PlainTensor(_Tensor):
    """A serialized tensor: an ``ir.TensorProtocol``. It has no properties: these are the value's."""

    __slots__ = ("_form", "doc_string", "name", "serialized")

    if TYPE_CHECKING:  # attributes in place of properties
        doc_string: str
        metadata_props: dict[str, str]
        meta: Any
    else:
        metadata_props, meta = NOTHING, NOTHING

    def __init__(self, name: str, doc_string: str, serialized: bytes, form: Form) -> None:
        self.name = name
        self.doc_string = doc_string
        self.serialized = serialized
        """What was read, without properties."""
        self._form = form

    @property
    def raw(self) -> onnx.TensorProto:
        proto: onnx.TensorProto = onnx.TensorProto.FromString(self.serialized)
        return proto

    def numpy(self) -> np.ndarray:
        return SerializedTensor(self.raw, self._form).numpy()

    def tobytes(self) -> bytes:
        return SerializedTensor(self.raw, self._form).tobytes()

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().__array__(dtype)

    def __dlpack__(self, *, stream: object = None) -> object:
        return self.numpy().__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()


def are_serialized_alike(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    """Whether two tensors are known to be equal, without parsing them."""
    return type(one) is PlainTensor and type(other) is PlainTensor and one.serialized == other.serialized
