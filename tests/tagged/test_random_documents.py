"""The documents of random models: trees with shared, aliased and repeated children, and graphs of their calls."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from torch import nn

from modelexport import load
from modelexport.core.calls import CallTree
from modelexport.core.owners import Owner
from modelexport.core.tags import Tags
from modelexport.core.uncalled_modules import compare_hierarchies
from modelexport.format import documents
from modelexport.graph.boundaries import find_boundaries
from modelexport.graph.node_owners import set_owner
from modelexport.graph.snapshot import take_snapshot
from modelexport.graph.unique_names import name_nodes_apart
from modelexport.pytorch.calls.module_tree_of_model import containers, module_tree
from modelexport.pytorch.calls.traced_tree import trace_calls
from modelexport.tagged.documents import reader
from modelexport.tagged.documents.dag import dag_document
from modelexport.tagged.documents.encoded_documents import encode_table
from modelexport.tagged.documents.export_facts import facts_of_export
from modelexport.tagged.documents.hierarchy_sidecar import hierarchy_document
from modelexport.tagged.documents.operations import operations_document
from modelexport.tagged.encodings.metadata import write_tags
from test_documents import assert_documents_agree
from test_tags import Runner, X
from test_tags import models as module_trees


class GraphMaker:
    """Graphs of nodes that random calls own: several outputs, several owners, constants and nested graphs."""

    def __init__(self, draw: st.DrawFn, calls: CallTree) -> None:
        self.draw = draw
        self.calls = st.sampled_from([traced.call for traced in calls])
        self.weights = [ir.Value(name=f"w{i}", const_value=ir.tensor([float(i)], name=f"w{i}")) for i in range(3)]
        self.count = 0

    def nodes(self, size: int, values: list[ir.Value], depth: int) -> list[ir.Node]:
        made: list[ir.Node] = []
        values = [*values]
        for _ in range(size):
            node = self.node(values, depth)
            made.append(node)
            values += node.outputs
        return made

    def node(self, values: list[ir.Value], depth: int) -> ir.Node:
        kind = self.draw(st.sampled_from(["Add", "Add", "Split", "Constant", *(["If"] if depth < 2 else [])]))
        several = st.lists(self.calls, min_size=1, max_size=3, unique=True)
        inputs = self.draw(st.lists(st.sampled_from([*values, None]), max_size=3)) if kind != "Constant" else []
        attributes = [ir.AttrInt64("value_int", 1)] if kind == "Constant" else []
        if kind == "If":
            for branch in ("then_branch", "else_branch"):
                inner = self.nodes(self.draw(st.integers(1, 3)), values, depth + 1)
                graph = ir.Graph([], [inner[-1].outputs[0]], nodes=inner, name=f"graph{self.count}")
                attributes.append(ir.AttrGraph(branch, graph))
        self.count += 1
        node = ir.Node("", kind, inputs, attributes, num_outputs=2 if kind == "Split" else 1)
        node.name = self.draw(st.sampled_from(["same", "w0", f"n{self.count}", None]))
        for position, value in enumerate(node.outputs):
            value.name = f"v{self.count}_{position}"
        set_owner(node, Owner(tuple(self.draw(several))))
        return node


@st.composite
def tagged_graphs(draw: st.DrawFn) -> tuple[nn.Module, Tags, ir.Model]:
    module = draw(module_trees())
    module.program = tuple(part for part in module.program if not isinstance(part, nn.ModuleDict))
    tree, calls = module_tree(module), trace_calls(module, (X,))
    tags = Tags(tree, calls, granularity=draw(st.sampled_from(["auto", "model", "all"])))
    maker = GraphMaker(draw, calls)
    start = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    for value in maker.weights:
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([1])
    nodes = maker.nodes(draw(st.integers(1, 8)), [start, *maker.weights], depth=0)
    graph = ir.Graph(
        [start], [nodes[-1].outputs[0]], nodes=nodes, initializers=maker.weights, opset_imports={"": 20}, name="main"
    )
    return module, tags, ir.Model(graph, ir_version=10)


def described(module: nn.Module, tags: Tags, model: ir.Model) -> documents.Hierarchy:
    boundaries = find_boundaries(model, tags.calls)
    facts = facts_of_export(
        name="random",
        model=model,
        source=take_snapshot(model),
        tags=tags,
        comparison=compare_hierarchies(tags.tree, tags.calls, containers(module)),
        values={},
        settings=documents.Settings(
            frontend="none", granularity="auto", include=[], exclude=[], dynamic=False, optimize=False
        ),
        boundaries=boundaries,
    )
    return hierarchy_document(facts, model, tags, boundaries)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(tagged_graphs())
def test_the_documents_of_random_models_agree_and_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[Runner, Tags, ir.Model]
) -> None:
    module, tags, model = made
    name_nodes_apart(model)
    write_tags(model, tags)
    hierarchy = described(module, tags, model)
    dags, operations = dag_document(model, tags), operations_document(model, tags)

    path = tmp_path_factory.getbasetemp() / "random.onnx"
    ir.save(model, path)
    path.with_suffix(".hierarchy.json").write_bytes(msgspec.json.encode(hierarchy))
    path.with_suffix(".dag.json").write_bytes(encode_table(dags))
    path.with_suffix(".operations.json").write_bytes(encode_table(operations))

    tagged = load(path)
    assert tagged.hierarchy == reader.load_hierarchy(path.with_suffix(".hierarchy.json")) == hierarchy
    assert reader.load_dag(path.with_suffix(".dag.json")) == dags
    assert reader.load_operations(path.with_suffix(".operations.json")) == operations
    assert_documents_agree(tagged, hierarchy, dags, operations)
