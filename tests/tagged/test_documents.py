"""The documents beside the model: for every model of the table, and over random ones."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import onnx_ir as ir
import pytest
import torch
from torch import nn

import models
from exports import Exporter
from modelexport import load
from modelexport.core.calls import CallTree, ModuleCall
from modelexport.errors import FileFormatError
from modelexport.exporting.pipeline import export
from modelexport.format import keys, schemas
from modelexport.format.versions import FORMAT_VERSION
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes, initializers, nested_graphs
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.pytorch.inputs.generated_inputs import generate_inputs
from modelexport.pytorch.loading import load_model
from modelexport.tagged import file
from modelexport.tagged.documents import reader

TABLE = [case.name for case in (*models.CASES, *models.TRAINED)]
FORMAT_PAGE = Path(__file__).parent.parent.parent / "docs" / "format.md"


# --- the same facts, from the model alone and in the plainest way -----------------------------------------------------


def enclosing(model: ir.Model) -> dict[ir.Node, list[ir.Node]]:
    """Every node to its enclosing nodes, the innermost first."""
    enclosing = {graph: node for node in all_nodes(model) for graph in nested_graphs(node)}
    found: dict[ir.Node, list[ir.Node]] = {}
    for node in all_nodes(model):  # an enclosing node comes before its nested nodes
        found[node] = [] if node.graph not in enclosing else [enclosing[node.graph], *found[enclosing[node.graph]]]
    return found


def calls_of(node: ir.Node, calls: CallTree) -> set[ModuleCall]:
    """The calls that were running when the node was executed."""
    return {call for owned in owner_of(node).calls for call in calls.stack(owned)}


def consumptions(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Node]]:
    """The producer of a value and its users."""
    for node in all_nodes(model):
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer.op_type != "Constant":
                yield producer, node


def expected_dag(model: ir.Model, calls: CallTree, call: ModuleCall) -> tuple[set[str], set[tuple[str, str]]]:
    held_by = enclosing(model)
    inside = {node for node in all_nodes(model) if call in calls_of(node, calls)}
    nodes = {node for node in inside if not inside.intersection(held_by[node]) and node.op_type != "Constant"}
    edges = {
        (producer.name, stand_in.name)
        for producer, consumer in consumptions(model)
        for stand_in in (consumer, *held_by[consumer])
        if producer in nodes and stand_in in nodes
    }
    return {node.name for node in nodes}, edges


def assert_documents_agree(
    tagged: file.TaggedModel, hierarchy: reader.Hierarchy, dags: dict, operations: dict, naive: bool = True
) -> None:
    """All three documents agree about the same model."""
    nodes = {node.name: node for node in tagged.nodes}
    assert len(nodes) == len(tagged.nodes), "names of nodes are unique in the file"
    assert list(dags) == [call.tag for call in hierarchy.calls] == list(tagged.tags.values())
    assert len(dags) == len(hierarchy.calls)

    listed = {name: operation for name, operation in operations.items() if operation.op_type != "Initializer"}
    assert [(node.name, node.op_type, node.hierarchy_tags or [node.source_module]) for node in hierarchy.nodes] == [
        (name, nodes[name].op_type, [nodes[name].metadata_props[keys.SOURCE_MODULE]])
        if len(owner_of(nodes[name]).calls) == 1
        else (name, operation.op_type, json.loads(nodes[name].metadata_props[keys.HIERARCHY_TAGS]))
        for name, operation in listed.items()
    ]
    for node in hierarchy.nodes:
        assert listed[node.name].tags == list(dict.fromkeys(node.hierarchy_tags or [node.source_module]))
    for name, node in nodes.items():
        assert listed[name].inputs == ["" if value is None else value.name for value in node.inputs]
        assert listed[name].outputs == [value.name for value in node.outputs]

    weights = {name: operation for name, operation in operations.items() if operation.op_type == "Initializer"}
    assert {entry.name: entry.hierarchy_tags for entry in hierarchy.initializers} == {
        name: operation.tags for name, operation in weights.items()
    }
    for value in initializers(tagged.model):
        users = {tag for node, _ in value.uses() for tag in listed[node.name].tags}
        assert set(weights[value.name].tags) == users

    order = {name: index for index, name in enumerate(listed)}
    for call, tag in tagged.tags.items():
        dag = dags[tag]
        assert [*dag.nodes] == sorted(set(dag.nodes), key=order.__getitem__), "in the order of the file, each once"
        assert len(set(dag.edges)) == len(dag.edges)
        if naive:
            assert (set(dag.nodes), set(dag.edges)) == expected_dag(tagged.model, tagged.calls, call)


# --- every model of the table -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def beside(request: pytest.FixtureRequest, exported: Exporter) -> tuple[file.TaggedModel, dict, dict]:
    """A tagged model of the table, its DAGs and its operations."""
    path = exported(request.param).path
    return (
        load(path),
        reader.load_dag(path.with_suffix(".dag.json")),
        reader.load_operations(path.with_suffix(".operations.json")),
    )


every_model = pytest.mark.parametrize("beside", TABLE, indirect=True)


@every_model
def test_the_dag_of_the_root_has_every_operation_but_constants(beside: tuple) -> None:
    tagged, dags, _ = beside
    expected = [node.name for node in tagged.model.graph if node.op_type != "Constant"]
    assert dags[tagged.tags[ModuleCall("")]].nodes == expected


@every_model
def test_the_nodes_of_a_call_are_among_those_of_the_call_it_ran_in_or_held_by_one(beside: tuple) -> None:
    tagged, dags, _ = beside
    held_by = {node.name: [one.name for one in above] for node, above in enclosing(tagged.model).items()}
    for traced in tagged.calls:
        if traced.parent is not None:
            parent = set(dags[tagged.tags[traced.parent]].nodes)
            for node in dags[tagged.tags[traced.call]].nodes:
                assert node in parent or parent.intersection(held_by[node])


@every_model
def test_every_edge_is_an_edge_of_the_graph(beside: tuple) -> None:
    tagged, dags, operations = beside
    users: dict[str, set[str]] = {name: set(operation.inputs) for name, operation in operations.items()}
    for node, above in enclosing(tagged.model).items():
        for one in above:
            users[one.name] |= users[node.name]
    for dag in dags.values():
        for producer, consumer in dag.edges:
            assert {producer, consumer} <= set(dag.nodes)
            assert users[consumer].intersection(operations[producer].outputs), (producer, consumer)


@every_model
def test_the_documents_agree_with_each_other_and_with_the_model(beside: tuple) -> None:
    tagged, dags, operations = beside
    assert_documents_agree(tagged, tagged.hierarchy, dags, operations, naive=len(tagged.nodes) < 200)


@functools.cache
def validator(name: str) -> jsonschema.protocols.Validator:
    schema = schemas.make_json_schema(name)
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)


@every_model
def test_the_documents_fit_their_schemas(beside: tuple) -> None:
    tagged, *_ = beside
    for name in ("hierarchy", "dag", "operations"):
        validator(name).validate(json.loads(tagged.path.with_suffix(f".{name}.json").read_bytes()))
    for key, name in ((keys.CALL_TREE, "call_tree"), (keys.STATE_DICT, "state_dict")):
        validator(name).validate(json.loads(tagged.model.metadata_props[key]))
    for value in initializers(tagged.model):
        if keys.TRANSFORM in value.metadata_props:
            validator("transform").validate(json.loads(value.metadata_props[keys.TRANSFORM]))


@pytest.mark.slow
def test_an_embedding_that_is_tied_shows_both_its_users(exported: Exporter) -> None:
    export = exported("bart")
    tied = [entry.name for entry in export.hierarchy.initializers if "shared.weight" in entry.parameter]
    operations = reader.load_operations(export.path.with_suffix(".operations.json"))
    assert [operations[name].tags for name in tied] == [
        ["/BartModel/BartEncoder/BartScaledWordEmbedding", "/BartModel/BartDecoder/BartScaledWordEmbedding"]
    ]


def test_an_enclosing_node_represents_what_runs_in_it_and_a_call_in_a_branch_has_operations(exported: Exporter) -> None:
    dags = reader.load_dag(exported("condition").path.with_suffix(".dag.json"))
    operations = reader.load_operations(exported("condition").path.with_suffix(".operations.json"))
    [enclosing] = [name for name, operation in operations.items() if operation.op_type == "If"]
    before = dags["/Branches/Block.before"].nodes
    assert dags["/Branches"].nodes[-1] == enclosing
    assert (before[-1], enclosing) in dags["/Branches"].edges, "both branches use the block's output"
    in_branch = dags["/Branches/Block.before@1"]
    assert [operations[name].op_type for name in in_branch.nodes] == [operations[name].op_type for name in before]
    assert len(in_branch.edges) == 2


# --- small graphs by hand ---------------------------------------------------------------------------------------------


class Chunks(nn.Module):
    """Uses both outputs of a Split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return second.sin() + first.cos()


def operators_and_edges(path: Path) -> tuple[set[str], set[tuple[str, str]]]:
    operations = reader.load_operations(path.with_suffix(".operations.json"))
    [dag] = reader.load_dag(path.with_suffix(".dag.json")).values()
    kind = {name: operation.op_type for name, operation in operations.items()}
    assert {kind[name] for name in dag.nodes} == set(kind.values()) - {"Constant", "Initializer"}
    return set(kind.values()), {(kind[producer], kind[consumer]) for producer, consumer in dag.edges}


def test_there_is_an_edge_through_every_output_of_a_split(tmp_path: Path) -> None:
    export(Chunks().eval(), {"x": torch.ones(2, 8)}, tmp_path / "x.onnx", check=False)
    _, edges = operators_and_edges(tmp_path / "x.onnx")
    assert edges == {("Split", "Sin"), ("Split", "Cos"), ("Sin", "Add"), ("Cos", "Add")}


def test_there_is_no_edge_through_a_constant(tmp_path: Path) -> None:
    export(Chunks().eval(), {"x": torch.ones(2, 8)}, tmp_path / "x.onnx", optimized=False, check=False)
    operators, edges = operators_and_edges(tmp_path / "x.onnx")
    assert "Constant" in operators
    assert edges
    assert not any("Constant" in edge for edge in edges)


def named_model(names: list[str], weights: list[str]) -> ir.Model:
    values = [ir.Value(name=name, const_value=ir.tensor([1.0], name=name)) for name in weights]
    nodes = [ir.node("Relu", [values[0]], name=name) for name in names]
    return ir.Model(ir.Graph([], [], nodes=nodes, initializers=values, opset_imports={"": 20}), ir_version=10)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a_2", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_2", "a_2_2"]),
        (["weight", "a"], ["weight_2", "a"]),
    ],
)
def test_nodes_get_names_that_no_other_node_and_no_initializer_has(names: list[str], expected: list[str]) -> None:
    model = named_model(names, ["weight"])
    name_nodes_apart(model)
    assert [node.name for node in all_nodes(model)] == expected


# --- files ------------------------------------------------------------------------------------------------------------


def test_two_exports_of_a_model_write_the_same_documents(tmp_path: Path, exported: Exporter) -> None:
    case = models.case("two-parents")
    export(case.build(), case.inputs(), tmp_path / "two-parents.onnx", check=False)
    for document in ("hierarchy", "dag", "operations"):
        name = f"two-parents.{document}.json"
        assert (tmp_path / name).read_bytes() == exported("two-parents").path.with_name(name).read_bytes()


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path, exported: Exporter) -> Path:
    """A model with its sidecar, for tests that damage it."""
    source = exported("blocks").path
    for suffix in (".onnx", ".hierarchy.json"):
        (tmp_path / f"x{suffix}").write_bytes(source.with_suffix(suffix).read_bytes())
    return tmp_path / "x.onnx"


def test_a_sidecar_that_is_missing_is_fine(copied: Path) -> None:
    assert load(copied).hierarchy.model.name == "Blocks"
    copied.with_suffix(".hierarchy.json").unlink()
    assert load(copied).hierarchy is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["nodes"].pop(), "does not belong to .*: they are from different runs, or one was changed"),
        (lambda d: d["calls"].pop(), "does not belong to .*: it has other calls"),
        (lambda d: d.update(format_version="1999-01-01"), "format version 1999-01-01.* reads .*" + FORMAT_VERSION),
        (lambda d: d.pop("coverage"), "damaged or another document .*coverage"),
        (lambda d: d.clear(), "damaged or another document .*format_version"),
    ],
)
def test_a_sidecar_that_was_not_written_with_the_model_is_not_used(
    copied: Path, change: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = copied.with_suffix(".hierarchy.json")
    document = json.loads(sidecar.read_bytes())
    change(document)
    sidecar.write_text(json.dumps(document))
    with caplog.at_level("INFO", "modelexport.reading"):
        assert load(copied).hierarchy is None
    assert re.fullmatch(f"not used: .*{message}.*", caplog.messages[0])


@pytest.mark.parametrize("read", [reader.load_hierarchy, reader.load_dag, reader.load_operations])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1}', b"[]", None])
def test_a_file_that_is_not_such_a_document_is_refused(tmp_path: Path, read: Any, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FileFormatError, match=re.escape(str(tmp_path / "x.json"))):
        read(tmp_path / "x.json")


# --- schemas and the page ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schemas.DOCUMENTS)
def test_the_shipped_schemas_are_those_of_the_types(name: str) -> None:
    shipped = schemas.DIRECTORY / f"{name}.json"
    assert shipped.read_bytes() == schemas.format_schema(name), "run `python -m modelexport.format.schemas`"


def test_there_are_no_other_schemas() -> None:
    assert {file.stem for file in schemas.DIRECTORY.iterdir()} == set(schemas.DOCUMENTS)


def test_the_examples_of_the_format_page_are_excerpts_of_a_real_export(tmp_path: Path) -> None:
    loaded = load_model("bert-tiny")
    export(loaded.model, generate_inputs(loaded.model), tmp_path / "bert-tiny.onnx", name="bert-tiny", check=False)
    model = ir.load(tmp_path / "bert-tiny.onnx")
    real = {
        "properties of the model": model.metadata_props,
        "properties of nodes": {node.name: node.metadata_props for node in all_nodes(model)},
        "properties of initializers": {value.name: value.const_value.metadata_props for value in initializers(model)},
        **{key: json.loads(model.metadata_props[key]) for key in (keys.CALL_TREE, keys.STATE_DICT)},
        **{file.name: json.loads(file.read_bytes()) for file in tmp_path.glob("*.json")},
    }
    examples = re.findall(r"<!-- from (.*?) -->\n\n```json\n(.*?)```", FORMAT_PAGE.read_text(), re.DOTALL)
    assert len(examples) == FORMAT_PAGE.read_text().count("```json") >= 7
    for source, text in examples:
        assert_excerpt(json.loads(text), real[source], source)


def assert_excerpt(excerpt: Any, real: Any, where: str) -> None:
    """Check that every entry of an object, and every element of a list in order, is in the real one."""
    if isinstance(excerpt, dict):
        for key, value in excerpt.items():
            assert key in real, (where, key)
            assert_excerpt(value, real[key], f"{where}: {key}")
    elif isinstance(excerpt, list) and excerpt and isinstance(excerpt[0], dict):
        for value in excerpt:
            assert any(is_excerpt(value, candidate) for candidate in real), (where, value)
    elif isinstance(excerpt, list):
        remaining = iter(real)
        assert all(value in remaining for value in excerpt), (where, excerpt)
    elif where.endswith(("version", "modelexport.line")) or "environment" in where:
        assert type(excerpt) is type(real)
    else:
        assert excerpt == real, where


def is_excerpt(excerpt: Any, real: Any) -> bool:
    try:
        assert_excerpt(excerpt, real, "")
    except AssertionError:
        return False
    return True
