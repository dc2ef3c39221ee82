"""Files that ONNX Runtime computes otherwise than the standard, by its kernels or by its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = Mapping[str, Any]
HALF = np.float16(0.5)


class RuntimeFile(NamedTuple):
    """A file that is right, and inputs for which ONNX Runtime's outputs are wrong."""

    name: str
    model: onnx.ModelProto
    inputs: Arrays
    right: Any
    """What the nodes compute, in float64 or rounded as they say."""


def runtime_files() -> Iterator[RuntimeFile]:
    """All of them; which of them are wrong in ONNX Runtime depends on its version."""
    for before, after in _PAIRS:
        yield _nearest(before, after)
    for name, (nodes, right) in _HALF.items():
        for start in (1000, 2000):
            yield _half(name, nodes, right, start)
    for axes in [*permutations(range(3))][1:] + [*permutations(range(4))][1:23:2]:
        yield _transposed(axes)
    for rows in (3, 5, 8, 12):
        for axis in (0, 1):
            yield _reversed(rows, axis)


_PAIRS = (
    (20, 12), (20, 24), (14, 16), (14, 32), (28, 32), (40, 24), (56, 64), (100, 60), (224, 256), (112, 128), (40, 48),
    (25, 30), (35, 40), (50, 30), (50, 60), (80, 48), (80, 96), (100, 120), (200, 120), (25, 15), (75, 45),
    (70, 80), (28, 64), (56, 128),
)  # fmt: skip


def _file(
    name: str, nodes: Sequence[Any], inputs: Arrays, right: Any, constants: Arrays, opset: int, *, dynamic: bool = False
) -> RuntimeFile:
    def info(key: str, array: Any) -> onnx.ValueInfoProto:
        shape = [f"{key}{axis}" for axis in range(array.ndim)] if dynamic else array.shape
        return helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(array.dtype), shape)

    infos, output = [info(key, array) for key, array in inputs.items()], info("y", right)
    tensors = [numpy_helper.from_array(np.asarray(array), key) for key, array in constants.items()]
    graph = helper.make_graph(nodes, "g", infos, [output], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return RuntimeFile(name, model, inputs, right)


def _node(op_type: str, module: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(" "), [output], name=f"/{module}/{op_type}", **attributes)


def _random(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def _nearest(before: int, after: int) -> RuntimeFile:
    x, w = _random(1, 2, before, 1), _random(1)
    nodes = [
        _node("Mul", "scale", "x w", "h"),
        _node("Resize", "resize", "h   sizes", "y", mode="nearest", nearest_mode="floor",
              coordinate_transformation_mode="asymmetric"),
    ]  # fmt: skip
    right = (x * w)[:, :, np.arange(after) * before // after]
    sizes = np.array([1, 2, after, 1])
    return _file(f"nearest {before} to {after}", nodes, {"x": x}, right, {"w": w, "sizes": sizes}, 18)


def _cast(inputs: str, output: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [inputs], [output], name=f"/narrow/Cast_{output}", to=to)


_HALF: Mapping[str, tuple[Sequence[Any], Callable[[Any, Any], Any]]] = {
    "added": ([_node("Add", "narrow", "a k", "b")], lambda a, k: a + k),
    "subtracted": ([_node("Sub", "narrow", "a k", "b")], lambda a, k: a - k),
    "negated": ([_node("Add", "narrow", "a k", "p"), _node("Neg", "narrow", "p", "b")], lambda a, k: -(a + k)),
    "halved": (
        [_node("Add", "narrow", "a k", "p"), _node("Mul", "narrow", "p point", "b")],
        lambda a, k: (a + k) * HALF,
    ),
    "moved": ([_node("Add", "narrow", "a k", "p"), _node("Abs", "narrow", "p", "b")], lambda a, k: abs(a + k)),
    "doubled": (
        [_node("Add", "narrow", "a k", "p"), _node("Add", "twice", "p p", "b")],
        lambda a, k: (a + k) + (a + k),
    ),
}


def _half(name: str, nodes: Sequence[Any], right: Callable[[Any, Any], Any], start: int) -> RuntimeFile:
    x, k = np.abs(_random(4, 6)) + np.float32(0.1), np.float16(start)
    shift = np.float32(right(np.float16(1), k))
    around = [_cast("x", "a", TensorProto.FLOAT16), *nodes, _cast("b", "c", TensorProto.FLOAT)]
    last = _node("Sub", "out", "c shift", "y")
    result = right(x.astype(np.float16), k).astype(np.float32) - shift
    return _file(
        f"float16 {name}, {start}", [*around, last], {"x": x}, result, {"k": k, "shift": shift, "point": HALF}, 18
    )


def _transposed(axes: Sequence[int]) -> RuntimeFile:
    shape = (4,) * len(axes)
    x, w, scale = np.random.default_rng(1).integers(-128, 127, shape).astype(np.int8), _random(4, 4), np.float32(0.05)
    back = [*map(int, np.argsort(axes))]
    nodes = [
        _node("Transpose", "a", "x", "t", perm=axes),
        _node("DequantizeLinear", "a", "t scale", "d"),
        helper.make_node("Transpose", ["d"], ["u"], name="/a/Transpose_1", perm=back),
        _node("MatMul", "b", "u w", "y"),
    ]
    right = ((x * np.float64(scale)) @ w.astype(np.float64)).astype(np.float32)
    return _file(f"transposed by {axes}", nodes, {"x": x}, right, {"scale": scale, "w": w}, 19)


def _reversed(rows: int, axis: int) -> RuntimeFile:
    x, w = _random(rows, rows), _random(rows)
    nodes = [
        _node("Mul", "a", "x w", "h"),
        _node("Shape", "b", "h", "shape"),
        helper.make_node("Gather", ["shape", "axis"], ["size"], name="/b/Gather"),
        _node("Add", "b", "size back", "last"),
        _node("Range", "b", "last back back", "places"),
        helper.make_node("Gather", ["h", "places"], ["y"], name="/c/Gather", axis=axis),
    ]
    constants = {"w": w, "axis": np.int64(axis), "back": np.int64(-1)}
    right = np.flip(x * w, axis).copy()
    return _file(f"{rows} places of axis {axis} reversed", nodes, {"x": x}, right, constants, 18, dynamic=True)
