"""Weights are bound in one place, and element types and tags of nodes are decoded in one place each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors import safe_open
from torch import nn

import modelexport
from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.owners import Evidence, Owner
from modelexport.errors import FileFormatError
from modelexport.exporting.constant_folding import FoldParameters
from modelexport.files.onnx_models import load_onnx, save_model, save_with_references, write_data_file
from modelexport.format.dtypes import SAFETENSORS_NAMES, dtype_name, parse_dtype, parse_safetensors_dtype
from modelexport.format.node_tags import OwnerReader, read_addresses, read_source_tags, tag_properties
from modelexport.graph.bound_tensors import bind_tensors, detach_tensors

SOURCE = Path(modelexport.__file__).parent


def assignments_to(attribute: str) -> Iterator[str]:
    """The files of the package that assign an attribute of this name, or set it by its name."""
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if attribute in text else ():
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
                targets = [node.target]
            elif isinstance(node, ast.Delete):
                targets = node.targets
            parts = [part for target in targets for part in ast.walk(target)]
            assigned = any(isinstance(part, ast.Attribute) and part.attr == attribute for part in parts)
            by_name = (
                isinstance(node, ast.Call)
                and any(isinstance(part, ast.Name) and part.id == "setattr" for part in ast.walk(node.func))
                and any(isinstance(part, ast.Constant) and part.value == attribute for part in node.args)
            )
            if assigned or by_name:
                yield file.relative_to(SOURCE).as_posix()


def test_one_file_assigns_const_value() -> None:
    assert sorted(assignments_to("const_value")) == ["graph/bound_tensors.py"] * 2


def graph_of(array: np.ndarray, operator: str, *constants: ir.Value, users: int = 1) -> tuple[ir.Model, ir.Value]:
    """A graph of one operator on a parameter, whose result is added to an input."""
    parameter = ir.val("weight", ir.DataType.FLOAT, array.shape, const_value=ir.tensor(array, name="weight"))
    x = ir.val("x", ir.DataType.FLOAT, [1])
    node = ir.node(operator, [parameter, *constants])
    node.outputs[0].name = "computed"
    nodes = [node, *(ir.node("Add", [node.outputs[0], x]) for _ in range(users))]
    graph = ir.Graph([x], [nodes[-1].outputs[0]], nodes=nodes, initializers=[parameter, *constants],
                     opset_imports={"": 20})  # fmt: skip
    nodes[-1].outputs[0].name = "y"
    return ir.Model(graph, ir_version=10), parameter


def test_a_folded_parameter_has_no_tensor_in_the_graph_until_it_is_bound() -> None:
    array = np.arange(200 * 100, dtype=np.float32).reshape(200, 100)
    model, parameter = graph_of(array, "Transpose")
    tensors = detach_tensors([parameter])
    FoldParameters(tensors, lambda node: True)(model)
    (folded,) = model.graph.initializers.values()
    assert folded.name == "computed"
    assert folded.const_value is None
    bind_tensors(tensors)
    assert folded.const_value is not None
    assert np.array_equal(folded.const_value.numpy(), array.T)


@pytest.mark.parametrize("refuse", [True, False])
def test_large_parameters_are_folded_only_where_they_are_transposed_and_may_be(refuse: bool) -> None:
    model, parameter = graph_of(np.ones((200, 100), np.float32), "Transpose" if refuse else "Neg")
    FoldParameters(detach_tensors([parameter]), lambda node: not refuse)(model)
    assert list(model.graph.initializers.values()) == [parameter]


def test_a_model_can_be_written_with_other_tensors_and_stays_as_it_is(tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.float32)
    model, parameter = graph_of(array, "Neg")
    before = parameter.const_value
    other = ir.tensor(array * 2)
    save_model(model, tmp_path / "inside.onnx", tensors={parameter: other})
    save_model(model, tmp_path / "beside.onnx", external=True, tensors={parameter: other})
    placed = write_data_file({parameter: other}, tmp_path, "placed.data")
    save_with_references(model, tmp_path / "placed.onnx", placed)
    assert parameter.const_value is before
    for name in ("inside", "beside", "placed"):
        tensor = load_onnx(tmp_path / f"{name}.onnx").graph.initializers["weight"].const_value
        assert tensor is not None
        assert isinstance(tensor, ir.ExternalTensor) == (name != "inside")
        assert np.array_equal(tensor.numpy(), array * 2)


def test_initializers_of_nested_graphs_are_placed_too(tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.float32)
    weight = ir.val("inner", ir.DataType.FLOAT, [600], const_value=ir.tensor(array, name="inner"))
    weight.metadata_props["key"] = "value"
    passed = ir.node("Identity", [weight])
    passed.outputs[0].name = "passed"
    branch = ir.Graph([], passed.outputs, nodes=[passed], initializers=[weight], name="branch")
    condition = ir.val("condition", ir.DataType.BOOL, [])
    node = ir.Node("", "If", [condition], [ir.AttrGraph("then_branch", branch), ir.AttrGraph("else_branch", branch)])
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([600])
    model = ir.Model(ir.Graph([condition], node.outputs, nodes=[node], opset_imports={"": 20}), ir_version=10)
    save_model(model, tmp_path / "x.onnx", external=True)
    assert (tmp_path / "x.onnx.data").stat().st_size >= array.nbytes
    assert (tmp_path / "x.onnx").stat().st_size < array.nbytes
    (read, _) = [value for graph in load_onnx(tmp_path / "x.onnx").graphs() for value in graph.initializers.values()]
    assert read.const_value is not None
    assert np.array_equal(read.const_value.numpy(), array)
    assert read.metadata_props == {"key": "value"}


@pytest.mark.parametrize("external", [False, True])
def test_a_model_can_be_written_over_the_file_it_was_read_from(external: bool, tmp_path: Path) -> None:
    arrays = {"large": np.arange(60_000, dtype=np.float32), "small": np.arange(4, dtype=np.float32)}
    weights = [ir.val(k, const_value=ir.tensor(array, name=k)) for k, array in arrays.items()]
    nodes = [ir.node("Identity", [weight]) for weight in weights]
    for node, name in zip(nodes, "ab", strict=True):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([], [n.outputs[0] for n in nodes], nodes=nodes, initializers=weights, opset_imports={"": 20})
    path = tmp_path / "x.onnx"
    save_model(ir.Model(graph, ir_version=10), path, external=external)
    path.chmod(0o640)
    for factor in (2, 3):
        model = load_onnx(path)
        held = model.graph.initializers["large"]
        assert held.const_value is not None
        mapped = held.const_value.numpy()
        model.graph.initializers["small"].const_value = ir.tensor(arrays["small"] * factor, name="small")
        save_model(model, path, external=external)
        np.testing.assert_array_equal(mapped, arrays["large"])
        read = {name: value.const_value for name, value in load_onnx(path).graph.initializers.items()}
        assert read["large"] is not None
        assert read["small"] is not None
        np.testing.assert_array_equal(read["large"].numpy(), arrays["large"])
        np.testing.assert_array_equal(read["small"].numpy(), arrays["small"] * factor)
        if external:
            with pytest.raises(FileFormatError, match="read it again"):
                held.const_value.numpy()
    assert path.stat().st_mode & 0o777 == 0o640
    assert {file.name for file in tmp_path.iterdir()} <= {"x.onnx", "x.onnx.data"}


# --- element types ---


def test_names_of_element_types_are_those_of_pytorch_and_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: torch.zeros(2, dtype=getattr(torch, name)) for name in SAFETENSORS_NAMES}
    save_file(tensors, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        for name, tensor in tensors.items():
            assert file.get_slice(name).get_dtype() == SAFETENSORS_NAMES[name]
            assert parse_safetensors_dtype(SAFETENSORS_NAMES[name]).itemsize == tensor.element_size()
            assert str(tensor.dtype) == f"torch.{dtype_name(parse_dtype(name))}"
    widths = [tensor.element_size() for tensor in tensors.values()]
    assert widths == sorted(widths, reverse=True)


def test_every_element_type_is_found_by_its_name() -> None:
    assert all(parse_dtype(dtype_name(dtype)) is dtype for dtype in ir.DataType)
    with pytest.raises(ValueError, match="unknown element type 'half'"):
        parse_dtype("half")


# --- tags of a node ---


@pytest.mark.parametrize("count", [1, 3])
def test_tags_of_a_node_are_read_as_they_were_written(count: int) -> None:
    calls = tuple(ModuleCall("layer", index) for index in range(count))
    tags = [f"/Model/Layer@{index}" for index in range(count)]
    properties = tag_properties([call.address for call in calls], tags, Evidence.DERIVED)
    tree = CallTree(tuple(TracedCall(call, None, 0, None, None) for call in calls))
    assert OwnerReader(tree).read(properties) == Owner(calls, Evidence.DERIVED)
    assert read_addresses(properties) == [call.address for call in calls]
    assert read_source_tags(properties) == tags
    assert len(properties) == (3 if count == 1 else 5)


def test_a_node_without_tags_has_no_owner() -> None:
    assert OwnerReader(CallTree(())).read({"key": "value"}) is None
    assert read_addresses({}) == read_source_tags({}) == []


def test_a_linear_whose_bias_is_zero_keeps_it(tmp_path: Path) -> None:
    """Rewrites do not depend on the elements of a parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.init.zeros_(model[0].bias)
    modelexport.export(model, (torch.ones(2, 4),), tmp_path / "x.onnx", check=False)
    assert "0.bias" in load_onnx(tmp_path / "x.onnx").graph.initializers
