"""Modules get the method that a recipe says; what is kept is bit for bit what it was; every node has its tag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import modelexport
from exports import ExportedCase, Exporter
from graph_texts import written
from modelexport.errors import OutputError, UsageError
from modelexport.files.recipe_files import Recipe, Rule, read_recipe
from modelexport.graph.node_owners import owner_of
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.tools.quantize.equal_method_groups import find_groups
from modelexport.tools.quantize.methods import METHODS, parse_method
from modelexport.tools.quantize.quantize import quantize_model
from modelexport.tools.quantize.recipes import resolve


def feeds_of(case: ExportedCase) -> dict[str, Any]:
    return make_random_inputs(read_tagged(case.path).model, open_session(case.path))


def error(one: Path, other: Path, feeds: dict[str, Any]) -> float:
    """The largest difference of the outputs, as a share of the norm of one."""
    expected, found = (run_session(open_session(path, optimized=True), feeds) for path in (one, other))
    return max(float(np.linalg.norm(expected[k] - found[k]) / np.linalg.norm(expected[k])) for k in expected)


def fingerprints(tagged: TaggedFile, inside: str) -> Iterator[tuple[Any, ...]]:
    """All that the nodes of a call and of those inside it compute from: operator, attributes, bytes of weights."""
    for node in tagged.nodes_of(tagged.find(inside)):
        attributes = sorted((name, str(attr.value)) for name, attr in node.attributes.items())
        weights = [
            (value.const_value.dtype, value.const_value.tobytes())
            for value in node.inputs
            if value is not None and value.is_initializer() and value.const_value is not None
        ]
        yield node.name, node.op_identifier(), attributes, weights


def operators(tagged: TaggedFile, inside: str) -> list[str]:
    return [node.op_type for node in tagged.nodes_of(tagged.find(inside))]


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bert", "resnet", "tied-weights"])
def test_every_node_is_tagged_after_every_method(exported: Exporter, tmp_path: Path, name: str, method: str) -> None:
    case = exported(name)
    feeds = feeds_of(case)
    result = modelexport.quantize(case.path, tmp_path / "out.onnx", to=method, data=[feeds])
    tagged = read_tagged(tmp_path / "out.onnx")
    assert result.coverage == tagged.coverage
    assert not tagged.coverage.untagged
    assert not tagged.coverage.inferred
    assert error(case.path, tmp_path / "out.onnx", feeds) < 0.3
    convolutional = name == "resnet" and method in ("int4", "int8-weights")
    assert bool(result.methods) != convolutional, "a method for matrices alone finds none in a ResNet"
    before, own = read_tagged(case.path), {}
    for node in before.nodes:
        owner = owner_of(node)
        assert owner is not None
        own[node.name] = {call for one in owner.calls for call in before.calls.stack(one)}
    for node in tagged.nodes:
        owner = owner_of(node)
        assert owner is not None
        assert all(call in before.calls for call in owner.calls)


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
def test_a_kept_module_is_bit_for_bit_what_it_was(exported: Exporter, tmp_path: Path, method: str) -> None:
    case, keep = exported("bert"), ["encoder.layer.1", "class:LayerNorm"]
    result = modelexport.quantize(case.path, tmp_path / "out.onnx", to=method, keep=keep, data=[feeds_of(case)])
    before, after = read_tagged(case.path), read_tagged(tmp_path / "out.onnx")
    assert "encoder.layer.1" in result.kept
    assert "embeddings.LayerNorm" in result.kept
    for call in result.kept:
        kept = list(fingerprints(before, call))
        assert kept
        assert kept == list(fingerprints(after, call))
    assert list(fingerprints(before, "encoder.layer.0")) != list(fingerprints(after, "encoder.layer.0"))


def test_between_kept_modules_nothing_is_rounded_to_half_precision(exported: Exporter, tmp_path: Path) -> None:
    case = exported("bert")
    modelexport.quantize(case.path, tmp_path / "out.onnx", to="float16", keep=["encoder.layer.1"])
    tagged = read_tagged(tmp_path / "out.onnx")
    inside = set(tagged.nodes_of(tagged.find("encoder.layer.1")))
    casts = [
        node for node in inside if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT16
    ]
    users = {user for node in casts for user in node.outputs[0].consumers()}
    assert not users & {node for node in inside if node.op_type != "Cast"}
    before = read_tagged(case.path)
    assert sum(op == "MatMul" for op in operators(tagged, "encoder.layer.1")) == sum(
        op == "MatMul" for op in operators(before, "encoder.layer.1")
    )


def test_only_names_what_is_quantized(exported: Exporter, tmp_path: Path) -> None:
    case = exported("bert")
    result = modelexport.quantize(case.path, tmp_path / "out.onnx", to="int4", only=["encoder.layer.0.output"])
    tagged = read_tagged(tmp_path / "out.onnx")
    assert result.methods == {"int4": 1}
    assert operators(tagged, ".").count("MatMulNBits") == operators(tagged, "encoder.layer.0.output").count(
        "MatMulNBits"
    )


def test_query_key_and_value_get_one_method_and_gate_and_up_need_not(exported: Exporter, tmp_path: Path) -> None:
    groups = {frozenset(group.calls): group.why for group in find_groups(read_tagged(exported("llama").path))}
    attention = "model.layers.0.self_attn"
    assert groups[frozenset(f"{attention}.{name}_proj" for name in "qkv")] == "attention"
    assert groups[frozenset({f"{attention}.o_proj"})] == "alone"
    assert groups[frozenset({"model.layers.0.mlp.gate_proj"})] == "alone"
    weights = ", ".join(f"float[2,2] {name} = {{1, 2, 3, 4}}" for name in ("q", "k", "v"))
    text = f"""g (float[3,2] x, float[5,2] encoded) => (float[3,2] y) <{weights}> {{
        ["/a/q/MatMul"] query = MatMul (x, q)  ["/a/k/MatMul"] key = MatMul (encoded, k)
        ["/a/v/MatMul"] value = MatMul (encoded, v)  ["/a/Transpose"] keys = Transpose (key)
        ["/a/MatMul"] scores = MatMul (query, keys)  ["/a/Softmax"] shares = Softmax (scores)
        ["/a/MatMul_1"] y = MatMul (shares, value) }}"""
    across = {group.calls for group in find_groups(read_tagged(written(tmp_path / "across.onnx", text)))}
    assert across == {("a.q",), ("a.k", "a.v")}, "the query of a cross attention takes another value"


def test_a_kept_query_keeps_key_and_value_and_the_result_says_so(exported: Exporter, tmp_path: Path) -> None:
    query = "encoder.layer.0.attention.self.query"
    result = modelexport.quantize(exported("bert").path, tmp_path / "out.onnx", to="int4", keep=[query])
    (line,) = result.joined
    assert query in line
    assert "encoder.layer.0.attention.self.value" in line
    assert line.endswith("all kept")
    assert operators(read_tagged(tmp_path / "out.onnx"), "encoder.layer.0.attention.self").count("MatMulNBits") == 0


def test_a_tied_weight_is_kept_in_all_its_places_or_in_none(exported: Exporter, tmp_path: Path) -> None:
    case = exported("tied-weights")
    kept = modelexport.quantize(case.path, tmp_path / "kept.onnx", to="int8-dynamic", keep=["embedding"])
    assert kept.joined == ["embedding, lm_head use one parameter: all kept"]
    assert "MatMulInteger" not in operators(read_tagged(tmp_path / "kept.onnx"), "lm_head")
    modelexport.quantize(case.path, tmp_path / "all.onnx", to="int8-dynamic")
    tagged = read_tagged(tmp_path / "all.onnx")
    assert "MatMulInteger" in operators(tagged, "lm_head")
    assert "DequantizeLinear" in operators(tagged, "embedding")


def test_the_calls_of_a_module_that_is_called_twice_get_one_method(exported: Exporter, tmp_path: Path) -> None:
    case = exported("blocks")
    result = modelexport.quantize(case.path, tmp_path / "out.onnx", to="int8-dynamic", keep=["shared@1"])
    assert "shared.linear, shared.linear@1 use one parameter: all kept" in result.joined
    tagged = read_tagged(tmp_path / "out.onnx")
    assert list(fingerprints(tagged, "shared")) == list(fingerprints(read_tagged(case.path), "shared"))
    groups = [group for group in find_groups(read_tagged(case.path)) if group.why == "weight"]
    assert any(len(set(group.nodes)) == 2 and len(group.weights) == 1 for group in groups)


def test_a_node_of_several_calls_is_kept_if_one_of_them_is(exported: Exporter) -> None:
    tagged = read_tagged(exported("bert").path)
    shared = [
        (node.name, owner.calls)
        for node in tagged.nodes
        if (owner := owner_of(node)) is not None
        and len({call.path.split(".layer.")[-1][:1] for call in owner.calls}) > 1
    ]
    assert shared, "the attention mask is computed once for all layers"
    recipe = Recipe((Rule("encoder.layer.0", "keep"), Rule(".", "float16")))
    assignment = resolve(recipe, tagged).assignment
    for name, calls in shared:
        kept = any(call.path.startswith("encoder.layer.0") for call in calls)
        assert (name not in assignment) == kept


def test_the_first_rule_that_picks_a_call_counts(exported: Exporter, tmp_path: Path) -> None:
    rules = (
        Rule("encoder.layer.0.attention", "keep"),
        Rule("encoder.layer.0", "int4:block=16"),
        Rule("class:LayerNorm", "keep"),
        Rule("encoder", "int8-dynamic"),
    )
    result = modelexport.quantize(exported("bert").path, tmp_path / "out.onnx", recipe=Recipe(rules))
    tagged = read_tagged(tmp_path / "out.onnx")
    assert result.methods == {"int4:block=16": 2, "int8-dynamic": 6}
    assert "MatMulNBits" not in operators(tagged, "encoder.layer.0.attention")
    assert operators(tagged, "encoder.layer.0").count("MatMulNBits") == 2
    assert operators(tagged, "encoder.layer.1").count("MatMulInteger") == 6
    norms = {call for call in result.kept if call.endswith("LayerNorm")}
    assert set(result.kept) == {"embeddings", "encoder.layer.0.attention", "pooler", *norms}
    assert len(norms) == 2


@pytest.mark.slow
def test_the_recipe_beside_a_result_gives_it_again(exported: Exporter, tmp_path: Path) -> None:
    case = exported("bert")
    modelexport.quantize(case.path, tmp_path / "one.onnx", to="int4:symmetric", keep=["pooler"])
    recipe = tmp_path / "one.recipe.yaml"
    _, _, rules = recipe.read_text().partition("\n")
    assert rules == "rules:\n- select: pooler\n  method: keep\n- select: .\n  method: int4:symmetric\n"
    modelexport.quantize(case.path, tmp_path / "two.onnx", recipe=recipe)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    modelexport.quantize(case.path, tmp_path / "one.onnx", to="int4")  # its own recipe is replaced
    edited = recipe.read_text().replace("int4", "int8-weights")
    recipe.write_text(edited)
    with pytest.raises(OutputError, match=r"one\.recipe\.yaml exists and was not .*, or was changed"):
        modelexport.quantize(case.path, tmp_path / "one.onnx", to="int4")
    assert recipe.read_text() == edited
    (tmp_path / "as.json").write_text('{"rules": [{"select": "pooler", "method": "keep"}], "notes": ["by hand"]}')
    assert read_recipe(tmp_path / "as.json").rules == (Rule("pooler", "keep"),)


def test_a_rule_that_picks_nothing_is_refused_in_python_too(exported: Exporter, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its list of selectors is empty"):
        Rule((), "int4")
    for keep in ([""], ["", "pooler"]):
        with pytest.raises(UsageError, match="a selector is empty"):
            modelexport.quantize(exported("bert").path, tmp_path / "q.onnx", to="int4", keep=keep)


def test_quantizing_leaves_the_model_alone(exported: Exporter) -> None:
    tagged = read_tagged(exported("bert").path)
    before = [node.name for node in tagged.model.graph]
    assignment = resolve(Recipe((Rule(".", "int8-weights"),)), tagged).assignment
    made = quantize_model(tagged.model, assignment)
    assert [node.name for node in tagged.model.graph] == before
    assert sum(node.op_type == "MatMulNBits" for node in made.graph) > 5


@pytest.mark.slow
def test_what_is_quantized_already_is_left_alone(exported: Exporter, tmp_path: Path) -> None:
    case = exported("bert")
    modelexport.quantize(case.path, tmp_path / "int4.onnx", to="int4", only=["encoder.layer.0"])
    modelexport.quantize(tmp_path / "int4.onnx", tmp_path / "half.onnx", to="float16")
    packed = [
        [
            [
                value.const_value.tobytes()
                for value in node.inputs
                if value is not None and value.const_value is not None
            ]
            for node in read_tagged(tmp_path / file).nodes
            if node.op_type == "MatMulNBits"
        ]
        for file in ("int4.onnx", "half.onnx")
    ]
    assert len(packed[0]) == 6
    assert packed[0] == packed[1]
    again = modelexport.quantize(tmp_path / "half.onnx", tmp_path / "again.onnx", to="float16")
    assert not again.methods


def test_branches_are_kept(exported: Exporter, tmp_path: Path) -> None:
    case = exported("condition")  # without VNNI, kernels saturate unless the range is reduced
    result = modelexport.quantize(case.path, tmp_path / "out.onnx", to="int8-dynamic:reduce_range=true")
    branches = [node for node in read_tagged(tmp_path / "out.onnx").nodes if node.op_type == "If"]
    assert branches
    assert not result.coverage.untagged
    assert error(case.path, tmp_path / "out.onnx", feeds_of(case)) < 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int4", "keep": ["poler"]}, "has no module call 'poler'; did you mean pooler"),
        ({"to": "int4", "only": ["*.nothing"]}, "no module call of .* matches '\\*.nothing'"),
        ({"to": "int8"}, "did you mean int8-dynamic or int8-static or int8-weights"),
        ({"to": "int5"}, "there is no method 'int5'; did you mean int4"),
        ({"to": "int4:algorithm=hqq,symmetric=true"}, "int4:algorithm=hqq has no option 'symmetric'"),
        ({"to": "int4:accuracy_level=99"}, "int4:accuracy_level is 0 or 1 or 2 or 3 or 4, not '99'"),
        ({"to": "int8-weights:algorithm=hqq"}, "int8-weights:algorithm is rtn or k_quant, not 'hqq'"),
        ({"to": "int4:blok=16"}, "int4 has no option 'blok'; did you mean block"),
        ({"to": "int4:block=17"}, "int4:block is 16 or 32 or 64 or 128 or 256, not '17'"),
        ({"to": "int8-dynamic:per_channel=yes"}, "int8-dynamic:per_channel is true or false, not 'yes'"),
        ({}, r"give a method with --to \(int8-dynamic, int8-static"),
        ({"to": "int4", "recipe": Recipe(())}, "give --recipe, or --to with --keep and --only"),
        ({"to": "int8-static"}, "int8-static measures ranges on inputs .*: give --data"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(
    exported: Exporter, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        modelexport.quantize(exported("bert").path, tmp_path / "out.onnx", **options)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_method_is_written_as_it_is_read() -> None:
    for text in ("int4", "int4:algorithm=hqq,block=64", "int8-dynamic:per_channel=false", "float16"):
        assert str(parse_method(text)) == text
    assert str(parse_method("int4:block=32")) == "int4"
    assert parse_method("keep") is None


def test_a_file_of_old_operators_is_converted_before_it_is_quantized(tmp_path: Path) -> None:
    import onnx

    weight = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["h"], name="/fc/MatMul")
    last = onnx.helper.make_node("Softmax", ["h"], ["y"], name="/head/Softmax")
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 8]) for name in "xy"]
    graph = onnx.helper.make_graph([node, last], "g", ports[:1], ports[1:], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 9)], ir_version=4)
    result = modelexport.quantize(model, tmp_path / "q.onnx", to="int8-dynamic")
    assert result.methods == {"int8-dynamic": 1}
    tagged = read_tagged(tmp_path / "q.onnx")
    assert tagged.model.opset_imports[""] == 11
    assert {call.path for call in tagged.calls.by_call} == {"", "fc", "head"}
    assert not tagged.coverage.untagged
