"""Shapes that values have in a run are known before it, also where the model does not state them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from modelexport.runtime.shapes import shapes_in_run

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
graph (float[rows, length, 6] x) => (float[rows, 3, length, length] y)
<int64[4] heads = {0, 0, 3, 2}>
{
  split = Reshape(x, heads)
  first = Transpose<perm = [0, 2, 1, 3]>(split)
  other = Transpose<perm = [0, 2, 3, 1]>(split)
  scores = MatMul(first, other)
  y = Softmax<axis = -1>(scores)
}"""


def test_shapes_are_those_of_the_run() -> None:
    proto = onnx.parser.parse_model(TEXT)
    x = np.ones((2, 64, 6), np.float32)
    found = shapes_in_run(ir.from_proto(proto), {"x": x.shape})
    names = list(found)
    assert set(names) == {"split", "first", "other", "scores", "y"}
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.helper.make_value_info(name, onnx.TypeProto()) for name in names)
    for info in proto.graph.output:
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    arrays = onnxruntime.InferenceSession(proto.SerializeToString()).run(names, {"x": x})
    assert found == {name: array.shape for name, array in zip(names, arrays, strict=True)}


def test_sizes_that_depend_on_the_data_are_unknown() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    graph (float[n] x) => (int64[1, m] y) { y = NonZero(x) }"""
    assert shapes_in_run(ir.from_proto(onnx.parser.parse_model(text)), {"x": (5,)}) == {"y": (1, None)}
