"""Types of equal nodes are inferred once, and are those that are inferred each time."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnxscript.optimizer._constant_folding import FoldConstantsPass

from modelexport.capture.once import shape_inference
from modelexport.exporting.constant_folding import FoldConstants

LAYERS = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[N, 6] x) => (y)
    <int64[2] a = {3, 4}, int64[2] b = {-1, 12}, int64[1] one = {1}> {
        s0 = Shape(x)
        t0 = Reshape(x, b)
        u0 = Transpose <perm = [1, 0]> (t0)
        t1 = Reshape(u0, b)
        u1 = Transpose <perm = [1, 0]> (t1)
        t2 = Reshape(u1, a)
        u2 = Transpose <perm = [0, 1]> (t2)
        v = Gather <axis = 0> (s0, one)
        w = Cast <to = 1> (v)
        y = Mul(u2, w)
    }"""


def folded(text: str, known: shape_inference.Known | None = None) -> list[str]:
    model = ir.from_proto(onnx.parser.parse_model(text))
    step = FoldConstants(lambda node: True)
    if known is not None:
        step._inferred = known
    step(model)
    return [str(node) for node in model.graph]


def test_the_types_are_those_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    known: shape_inference.Known = {}
    once = folded(LAYERS, known)
    again = folded(LAYERS, known)
    monkeypatch.setattr(shape_inference, "_key", lambda node, opsets: None)
    assert once == again == folded(LAYERS)


def test_equal_nodes_are_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    infer = FoldConstantsPass._do_inference

    def counted(self: FoldConstantsPass, node: ir.Node) -> None:
        seen.append(node.outputs[0].name)
        infer(self, node)

    monkeypatch.setattr(FoldConstantsPass, "_do_inference", counted)
    known: shape_inference.Known = {}
    folded(LAYERS, known)
    assert "t2" in seen
    count = len(seen)
    folded(LAYERS, known)
    assert len(seen) == count


def node(op_type: str, value: ir.Value, **attributes: float) -> ir.Node:
    return ir.node(op_type, [value], attributes)


@pytest.mark.parametrize(
    "differs",
    [
        lambda x, y: (node("Elu", x, alpha=0.0), node("Elu", x, alpha=-0.0)),
        lambda x, y: (node("Elu", x), node("Selu", x)),
        lambda x, y: (node("Relu", x), node("Relu", y)),
    ],
    ids=["attribute", "operator", "shape"],
)
def test_nodes_that_differ_are_told_apart(differs: object) -> None:
    x, y = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in (("x", [2, "N"]), ("y", [2, "M"]))
    )
    one, other = differs(x, y)  # type: ignore[operator]
    assert shape_inference._key(one, {"": 20}) != shape_inference._key(other, {"": 20})
    assert shape_inference._key(one, {"": 20}) == shape_inference._key(one, {"": 20}) is not None


def test_what_the_inference_reads_of_an_input_is_still_at_most_twenty_elements() -> None:
    import inspect

    assert f"size_limit={shape_inference._READ}" in inspect.getsource(FoldConstantsPass._do_inference)
