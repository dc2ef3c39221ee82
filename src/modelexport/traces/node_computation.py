"""Computes single nodes as the standard defines them: by onnx's reference implementations in NumPy and
:mod:`.numpy_kernels`. ONNX Runtime computes what these cannot: its own operators, and arguments that they do not take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from modelexport.core.calls import ModuleCall
from modelexport.core.text import reason_of
from modelexport.errors import UsageError
from modelexport.graph.node_owners import owner_of, place_of
from modelexport.runtime.single_nodes import NoKernelError, run_node
from modelexport.traces.numpy_kernels import KERNELS
from modelexport.traces.tolerances import INFINITE, UNITS

_KERNEL_ROUNDINGS = 8
"""How many units of roundoff a kernel of a runtime is off by."""
_WIDENED = {
    "float64": (ir.DataType.FLOAT,),
    "float32": (ir.DataType.FLOAT,),
    "float16": (ir.DataType.FLOAT, ir.DataType.FLOAT16),
    "bfloat16": (ir.DataType.FLOAT, ir.DataType.BFLOAT16),
}
"""Types to those that are float64 in a wide run of a model of that type."""
_TYPES = ("to", "dtype", "output_dtype")
"""Attributes that name an element type."""
_QUANTIZED = (np.int8, np.uint8)


class NodeError(UsageError):
    """A node cannot be computed."""

    def __init__(self, node: ir.Node, error: Exception) -> None:
        reason = reason_of(error.__cause__ or error)
        self.of_evaluator = isinstance(error, NoKernelError | NotImplementedError | MemoryError)
        """Whether only this evaluator cannot compute it, which says nothing about the file."""
        place = place_of(node)
        named = f"{node.op_type} {node.name or ''}{f' of {place}' if place else ''}"
        super().__init__(
            f"nothing here computes {named} ({reason}): what follows is not compared"
            if self.of_evaluator
            else f"{named} fails: {reason}; check the inputs, or export the file again"
        )
        self.node = node
        owner = owner_of(node)
        self.call: ModuleCall | None = owner.call if owner is not None else None


def nudge(array: Any, share: float, generator: np.random.Generator, *, smallest: float = 0.0) -> Any:
    """An array with numbers a little larger or smaller, by half of a share or more: equal changes would cancel in a
    product or a quotient. Numbers of few digits, as 3 or 0.5, are exact, and stay.

    Args:
        smallest: The smallest number that their type has with all its digits: 1e-5 is rounded more in float16.
    """
    digits = np.frexp(array)[0] * max(_FEW_DIGITS * 2.0**-24 / share, 4.0)
    steps = generator.choice([-1.0, 1.0], array.shape) * generator.uniform(0.5, 1.0, array.shape)
    size = np.abs(array)
    exact = ((digits == np.rint(digits)) & ((size >= smallest) | (size == 0))) | ~(size < INFINITE)
    return array + np.where(exact, 0.0, share * steps * np.maximum(size, smallest))


def _is_rounded(number: float) -> bool:
    """Whether a number of an attribute, which is a float32, has more digits than are taken to be exact."""
    return bool(nudge(np.float64(number), UNITS["float32"], _generator()) != number)


_FEW_DIGITS = 2.0**18
"""A float32 whose mantissa is a multiple of 2**-18 counts as exact (3, 0.5): no rounding noise is added to it."""


def _generator() -> np.random.Generator:
    return np.random.default_rng(12)


def _computable(array: Any) -> Any:
    """Numbers in half precision as float32, in which kernels of such types compute as well."""
    narrow = isinstance(array, np.ndarray) and (array.dtype == np.float16 or array.dtype.name == "bfloat16")
    return array.astype(np.float32) if narrow else array


def _with_scale_in_float32(kernel: Any) -> Any:
    """An implementation of ``Attention`` that rounds its scale to float32, as the standard does for a model in float32.
    Queries and keys are multiplied with the root of the scale.
    """

    class Attention(kernel):
        def _run(self, q: Any, *others: Any, scale: Any = None, q_num_heads: Any = None, **how: Any) -> Any:
            head_size = q.shape[-1] // (q_num_heads if q.ndim == 3 else 1)
            root = float(np.float32(np.sqrt(head_size**-0.5 if scale is None else scale)))
            return super()._run(q, *others, scale=root * root, q_num_heads=q_num_heads, **how)

    return Attention


class NodeComputation:
    """Computes the nodes of one model.

    Args:
        opsets: The versions of the operators by domain.
        in_float64_for: The type of the model if all floating-point numbers are float64; ``None`` for its own types.
        kernels: Further implementations of standard operators, by name, as onnx's ``OpRun``.
        nudged: Round what is rounded to float32 otherwise: the numbers in attributes and those computed from sizes,
            and the results of nodes that only a runtime computes.
    """

    def __init__(
        self, opsets: Mapping[str, int], in_float64_for: str | None, kernels: Mapping[str, Any], *, nudged: bool = False
    ) -> None:
        self._opsets, self._in_float64_for, self._kernels = dict(opsets), in_float64_for, {**KERNELS, **kernels}
        self._widened_types = _WIDENED.get(in_float64_for or "", ())
        self._nudge = UNITS["float32"] if nudged else 0.0
        self._implementations: dict[ir.Node, Callable[..., tuple[Any, ...]]] = {}
        self.by_runtime: set[str] = set()
        """The operators that a runtime computed in float32, or with numbers inside that are rounded to it."""

    def widened(self, array: Any) -> Any:
        """An array in the types of this run."""
        narrow = self._in_float64_for and (array.dtype in (np.float32, np.float16) or array.dtype.name == "bfloat16")
        return array.astype(np.float64) if narrow else array

    def rounded(self, number: Any) -> Any:
        """A number in float64, rounded to float32."""
        return nudge(number, self._nudge, _generator()) if self._nudge else number.astype(np.float32).astype(np.float64)

    def compute(self, node: ir.Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of a node without nested graphs.

        Raises:
            NodeError: It cannot be computed.
        """
        if node not in self._implementations:
            self._implementations[node] = self._implementation(node)
        inputs = [*map(_computable, inputs)]
        if node.op_type == "Cast" and self._rounds(node.outputs[0]) and inputs[0].dtype == np.float64:
            inputs = [inputs[0].astype(np.float32)]  # as PyTorch converts float64
        try:
            with np.errstate(all="ignore"):
                results = self._implementations[node](*inputs)
        except Exception as error:  # any implementation, given any arrays
            raise NodeError(node, error) from error
        return tuple(self._typed(value, result) for value, result in zip(node.outputs, results, strict=False))

    def _typed(self, value: ir.Value, array: Any) -> Any:
        """A result in the type that it has in this run."""
        if not isinstance(array, np.ndarray):
            return array
        if self._rounds(value) and value.dtype is not None and array.dtype in (np.float32, np.float64):
            array = array.astype(np.float32).astype(value.dtype.numpy())
        return self.widened(array)

    def _rounds(self, value: ir.Value) -> bool:
        """Whether a value is rounded to half precision in this run."""
        return value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) and value.dtype not in self._widened_types

    def _implementation(self, node: ir.Node) -> Callable[..., tuple[Any, ...]]:
        proto = ir.serde.serialize_node(node)
        reference = self._reference(proto) if node.domain in ("", "ai.onnx") else None

        def run(*inputs: Any) -> tuple[Any, ...]:
            error: Exception | None = None
            types = [getattr(item, "dtype", None) for item in inputs]
            if reference is not None and not (any(item in _QUANTIZED for item in types) and np.float64 not in types):
                try:
                    return reference(*inputs)
                except Exception as its:  # of any implementation, given any arrays
                    error = its
            try:
                return self._in_runtime(proto, inputs)
            except Exception as its:  # as above
                if error is None and reference is not None:
                    return reference(*inputs)
                if isinstance(its, NoKernelError):
                    raise NoKernelError(str(error or its)) from its
                raise error or its from its

        return run

    def _in_runtime(self, proto: onnx.NodeProto, inputs: Sequence[Any]) -> tuple[Any, ...]:
        results, exact = run_node(proto, self._opsets, inputs)
        if not exact:
            self.by_runtime.add(proto.op_type)
        elif not any(_is_rounded(attribute.f) for attribute in proto.attribute):
            return results
        return tuple(map(self._nudged_result, results))

    def _reference(self, proto: onnx.NodeProto) -> Callable[..., tuple[Any, ...]] | None:
        """The NumPy implementation of a standard operator; ``None`` if there is none."""
        from onnx.reference.ops import load_op  # slow to import

        for attribute in proto.attribute if self._in_float64_for else ():
            if attribute.name in _TYPES and attribute.i in self._widened_types:
                attribute.i = ir.DataType.DOUBLE
        version = self._opsets.get(proto.domain, self._opsets.get("", 1))
        try:
            schema = onnx.defs.get_schema(proto.op_type, version, "")
            kernel = self._kernels.get(proto.op_type)
        except onnx.defs.SchemaError:
            return None
        if proto.op_type == "Hardmax" and schema.since_version < 13:
            return None  # onnx looks at one axis
        for newer in range(version, onnx.defs.onnx_opset_version() + 1) if kernel is None else ():
            try:
                kernel = load_op("", proto.op_type, newer)
                break
            except Exception:  # onnx lacks some old versions, and raises various errors
                continue
        if kernel is None:
            return None
        if proto.op_type == "Attention" and self._in_float64_for not in (None, "float64"):
            kernel = _with_scale_in_float32(kernel)
        nothing = {"log": lambda *words: None, "opsets": self._opsets, "verbose": 0, "new_ops": None}
        try:
            implementation = kernel(proto, nothing, schema)
        except TypeError:  # some constructors do not take a schema
            implementation = kernel(proto, nothing)
        widen_attributes(
            implementation, lambda numbers: nudge(numbers, self._nudge, _generator()) if self._nudge else numbers
        )
        return implementation.run

    def _nudged_result(self, array: Any) -> Any:
        if not self._nudge or array is None or array.dtype.kind != "f":
            return array
        return nudge(array.astype(np.float64), _KERNEL_ROUNDINGS * self._nudge, _generator())


def widen_attributes(kernel: Any, change: Callable[[Any], Any] = lambda numbers: numbers) -> None:
    """Make the attributes of a kernel float64: what a kernel computes of them alone would be in float32."""
    for name, number in [*vars(kernel).items()]:
        numbers = np.array(number) if isinstance(number, list | np.float32) else np.array(0)
        if numbers.dtype == np.float32:
            setattr(kernel, name, change(numbers.astype(np.float64)).tolist())
