"""Files and programs of other exporters become tagged files: each source of evidence, and what remains unknown."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import modelexport
import models
from commands import run
from exports import Exporter
from modelexport.core.owners import Evidence, Owner
from modelexport.errors import FileFormatError, UsageError
from modelexport.format import documents, keys
from modelexport.graph.node_owners import owner_of, required_owner
from modelexport.tagged.found_calls.torchscript_names import read_torchscript_names
from torch_onnx import quietly


def by_dynamo(name: str, *, optimize: bool = False) -> Any:
    case = models.case(name)
    with quietly():
        return torch.onnx.export(case.build(), (), kwargs=case.inputs(), dynamo=True, optimize=optimize, verbose=False)


def by_onnx_exporter(name: str, *, optimize: bool = False) -> Any:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    case = models.case(name)
    with quietly():
        return OnnxExporter().export(case.build(), case.inputs(), OnnxConfig(dynamic=False, optimize=optimize))


def by_torchscript(name: str, path: Path, **options: Any) -> Path:
    case = models.case(name)
    return traced(case.build(), tuple(case.inputs().values()), path, **options)


def traced(model: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, **options: Any) -> Path:
    with quietly():
        torch.onnx.export(model, inputs, path, dynamo=False, opset_version=17, **options)
    return path


def addresses(tagged: modelexport.TaggedModel) -> set[str]:
    return {call.address for call in tagged.tags}


def owners(tagged: modelexport.TaggedModel) -> dict[str, str | None]:
    """The name of a node's first output to the address of the node's owner."""
    return {
        node.outputs[0].name or "": owner.call.address if (owner := owner_of(node)) is not None else None
        for node in tagged.nodes
    }


def operations_of_calls(tagged: modelexport.TaggedModel, *operators: str) -> Counter[tuple[str, str]]:
    return Counter(
        (node.op_type, owner.call.address)
        for node in tagged.nodes
        if node.op_type in operators and (owner := owner_of(node)) is not None
    )


def outputs_of(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs.values(), strict=True)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adopt")


@pytest.fixture(scope="module")
def blocks_program() -> Any:
    return by_dynamo("blocks")


@pytest.fixture(scope="module")
def blocks_file(folder: Path, blocks_program: Any) -> Path:
    blocks_program.save(folder / "blocks.onnx")
    return folder / "blocks.onnx"


@pytest.fixture(scope="module")
def condition(folder: Path) -> Path:
    """An adopted file; nothing is recorded about the nodes in the branches."""
    by_dynamo("condition").save(folder / "condition.onnx")
    modelexport.adopt(folder / "condition.onnx", folder / "condition.adopted.onnx")
    return folder / "condition.adopted.onnx"


# --- programs in memory ----------------------------------------------------------------------------------------------


def test_a_program_in_memory_has_exact_owners_and_all_calls(
    blocks_program: Any, tmp_path: Path, exported: Exporter
) -> None:
    adopted = modelexport.adopt(blocks_program, tmp_path / "x.onnx")
    tagged = modelexport.load(tmp_path / "x.onnx")
    assert adopted.sources == {"fx_node": len(tagged.nodes)}
    assert adopted.coverage == documents.Coverage(exact=len(tagged.nodes))
    assert tagged.tags[tagged.find("shared@1")] == "/Blocks/Block.shared@1"
    own = owners(modelexport.load(exported("blocks").path))
    found = owners(tagged)
    assert len(own.keys() & found.keys()) > 20
    # torch.export records a module by the name through which it was called, an alias.
    assert {name: found[name].replace("entry", "stem") for name in own if name in found} == {
        name: call for name, call in own.items() if name in found
    }


def test_adopting_a_program_leaves_it_as_it_is(blocks_program: Any, tmp_path: Path) -> None:
    before = [(node.name, dict(node.metadata_props)) for node in blocks_program.model.graph]
    modelexport.adopt(blocks_program, tmp_path / "x.onnx")
    assert [(node.name, dict(node.metadata_props)) for node in blocks_program.model.graph] == before
    assert keys.CALL_TREE not in blocks_program.model.metadata_props


@pytest.mark.slow
@pytest.mark.parametrize("optimize", [False, True])
def test_every_call_of_a_shared_layer_is_told_apart_in_memory(
    optimize: bool, tmp_path: Path, exported: Exporter
) -> None:
    adopted = modelexport.adopt(by_onnx_exporter("albert", optimize=optimize), tmp_path / "x.onnx")
    assert adopted.coverage.exact > 150
    assert adopted.coverage.untagged == 0
    assert adopted.repeated == []
    compared = ("Softmax", "LayerNormalization", "Tanh", "Pow")
    found = operations_of_calls(modelexport.load(tmp_path / "x.onnx"), *compared)
    assert found == operations_of_calls(modelexport.load(exported("albert").path), *compared)
    assert any("@3" in address for _, address in found)


def test_a_node_that_the_optimiser_made_is_known_by_name_only(tmp_path: Path) -> None:
    adopted = modelexport.adopt(by_dynamo("residual-network", optimize=True), tmp_path / "x.onnx")
    tagged = modelexport.load(tmp_path / "x.onnx")
    assert adopted.sources["fx_name"] == adopted.coverage.derived > 0
    assert {node.op_type for node in tagged.nodes if owner_of(node).evidence is Evidence.DERIVED} == {"Conv"}


def test_slices_of_lists_are_named_by_their_modules(tmp_path: Path, exported: Exporter) -> None:
    modelexport.adopt(by_dynamo("sliced-sequential"), tmp_path / "x.onnx")
    own = owners(modelexport.load(exported("sliced-sequential").path))
    found = owners(modelexport.load(tmp_path / "x.onnx"))
    common = own.keys() & found.keys()
    assert len(common) == len(own) - 1  # our export names the output
    assert {name: found[name] for name in common} == {name: own[name] for name in common}


def by_operation(tagged: modelexport.TaggedModel) -> dict[tuple[str, str], list[Owner]]:
    """The owners of the values of each operation and shape, in order: ``getitem_2`` is the third of ``getitem``."""
    found: dict[tuple[str, str], list[Owner]] = {}
    for node in tagged.nodes:
        value = node.outputs[0]
        found.setdefault((re.sub(r"_\d+$", "", value.name or ""), str(value.shape)), []).append(required_owner(node))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in models.CASES])
def test_a_program_in_memory_has_the_owners_that_our_own_export_gives(name: str, tmp_path: Path) -> None:
    case = models.case(name)
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}: `make test` installs them")
    model = case.build()
    transformer = hasattr(model, "config")
    program = by_onnx_exporter(name) if transformer else by_dynamo(name)
    adopted = modelexport.adopt(program, tmp_path / "x.onnx")
    own = modelexport.export(model, case.inputs(), tmp_path / "own.onnx", optimized=False, check=False)
    expected, found = (by_operation(modelexport.load(tmp_path / file)) for file in ("own.onnx", "x.onnx"))
    # Our export translates some operations otherwise.
    common = [one for one in expected if len(expected[one]) == len(found.get(one, ()))]
    assert common
    aliased = tuple(f"{module.path}." for module in own.hierarchy.modules if module.aliases)
    calls = modelexport.load(tmp_path / "own.onnx").calls
    for operation in common:
        for right, owner in zip(expected[operation], found[operation], strict=True):
            if not f"{right.call.path}.".startswith(aliased):
                # Nothing is recorded of nodes in branches and loops: their call is at least around the right one.
                possible = calls.stack(right.call) if owner.evidence is Evidence.INFERRED else (right.call,)
                assert owner.call in possible, operation
    assert adopted.repeated == []
    assert adopted.coverage.untagged == 0


# --- files of torch.onnx ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimize", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_file_of_torch_onnx_has_its_modules_and_says_what_it_cannot_tell(
    optimize: bool, blocks_file: Path, tmp_path: Path
) -> None:
    if optimize:
        by_dynamo("blocks", optimize=True).save(tmp_path / "x.onnx")
    adopted = modelexport.adopt(tmp_path / "x.onnx" if optimize else blocks_file, tmp_path / "y.onnx")
    tagged = modelexport.load(tmp_path / "y.onnx")
    assert adopted.coverage == documents.Coverage(derived=len(tagged.nodes))
    assert adopted.sources == {"torch_metadata": len(tagged.nodes)}
    assert json.loads(tagged.model.metadata_props[keys.ADOPTED]) == adopted.sources
    assert tagged.tags[tagged.find("down.1")] == "/Blocks/Block.down.1"
    assert tagged["up.0.norm"].tag == "/Blocks/Block.up.0/LayerNorm"
    assert "shared@1" not in addresses(tagged)
    assert len(tagged["shared"].nodes) == 6
    assert adopted.repeated == ["shared.linear", "shared.norm"]


def test_calls_of_one_module_in_different_modules_are_told_apart(folder: Path, blocks_file: Path) -> None:
    model = ir.load(blocks_file)
    for node, parent in zip(model.graph, ("down.0", "down.1"), strict=False):
        node.metadata_props["pkg.torch.onnx.name_scopes"] = repr(["", parent, "shared", "x"])
        node.metadata_props["pkg.torch.onnx.class_hierarchy"] = repr(["m.Blocks", "m.Block", "m.Block", "aten.x"])
    ir.save(model, folder / "parents.onnx")
    modelexport.adopt(folder / "parents.onnx", folder / "parents.adopted.onnx")
    tagged = modelexport.load(folder / "parents.adopted.onnx")
    assert [tagged.calls[view.call].parent.address for view in tagged["shared"].calls][:2] == ["down.0", "down.1"]


def test_the_namespace_alone_tells_the_same(blocks_file: Path, tmp_path: Path) -> None:
    model = ir.load(blocks_file)
    for node in model.graph:
        for key in [key for key in node.metadata_props if key != keys.NAMESPACE]:
            del node.metadata_props[key]
    ir.save(model, tmp_path / "x.onnx")
    adopted = modelexport.adopt(tmp_path / "x.onnx", tmp_path / "y.onnx")
    modelexport.adopt(blocks_file, tmp_path / "z.onnx")
    assert adopted.sources == {"namespace": adopted.coverage.derived}
    one, other = modelexport.load(tmp_path / "y.onnx"), modelexport.load(tmp_path / "z.onnx")
    assert owners(one) == owners(other)
    assert one.tags == other.tags


def test_a_namespace_of_names_alone_becomes_the_tags(tmp_path: Path, exported: Exporter) -> None:
    path = exported("blocks").path
    model = ir.load(path)
    for store in (model.metadata_props, *(node.metadata_props for node in model.graph)):
        for key in [key for key in store if key != keys.NAMESPACE]:
            del store[key]
    ir.save(model, tmp_path / "x.onnx")
    adopted = modelexport.adopt(tmp_path / "x.onnx", tmp_path / "y.onnx")
    assert adopted.sources == {"namespace": adopted.coverage.derived}
    own, found = modelexport.load(path), modelexport.load(tmp_path / "y.onnx")
    assert set(found.tags.values()) == {tag for call, tag in own.tags.items() if own[str(call)].nodes}
    for node, same in zip(own.nodes, found.nodes, strict=True):
        assert own.tags[owner_of(node).call] == found.tags[owner_of(same).call]


@pytest.mark.slow
def test_parameters_are_those_in_the_state_dict(tmp_path: Path) -> None:
    by_dynamo("buffers").save(tmp_path / "x.onnx")
    modelexport.adopt(tmp_path / "x.onnx", tmp_path / "y.onnx")
    found = modelexport.load(tmp_path / "y.onnx")["."].parameters
    assert set(found) == set(models.case("buffers").build().state_dict())


# --- files of TorchScript --------------------------------------------------------------------------------------------


def test_scoped_names_of_torchscript_tell_paths_and_calls(tmp_path: Path) -> None:
    path = by_torchscript("blocks", tmp_path / "x.onnx")
    adopted = modelexport.adopt(path, tmp_path / "y.onnx")
    tagged = modelexport.load(tmp_path / "y.onnx")
    assert tagged.tags[tagged.find("down.1")] == "/Module/down.1"
    assert tagged["up.0.norm"].tag == "/Module/up.0/LayerNorm?"
    assert tagged.calls[tagged.find("shared.linear@1")].parent == tagged.find("shared@1")
    assert {node.op_type for node in tagged["shared@1"].nodes} == {"Gemm", "Relu", "LayerNormalization"}
    evidence = {str(owner_of(node).call): owner_of(node).evidence for node in tagged.nodes if node.op_type == "Relu"}
    assert (evidence["up.0"], evidence["shared"], evidence["shared@1"]) == ("derived", "inferred", "inferred")
    assert adopted.sources["node_names"] > adopted.sources["neighbours"] > 0
    assert set(tagged["down.0"].parameters) >= {"down.0.linear.weight", "down.0.linear.bias"}


class Containers(nn.Module):
    """Modules in containers that are called and in containers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        self.lists = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)])])
        self.keys = nn.ModuleDict({"one": nn.ModuleDict({"two": nn.Linear(4, 4)}), "7": nn.Linear(4, 4)})
        self.lists_of_their_own = nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(4, 4)])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.keys["7"](self.keys["one"]["two"](self.lists[0][0](self.net(x))))
        return self.net[1](self.lists_of_their_own["inner"][0](x))


def test_paths_are_whole_though_scoped_names_leave_containers_out(tmp_path: Path) -> None:
    path = traced(Containers().eval(), (torch.ones(2, 4),), tmp_path / "x.onnx")
    modelexport.adopt(path, tmp_path / "y.onnx")
    nodes = [node for node in modelexport.load(tmp_path / "y.onnx").nodes if node.op_type in ("Gemm", "Relu")]
    found = [str(owner_of(node).call) for node in nodes]
    assert found == [
        *("net.0.0", "net.0.1", "net.1"),
        *("lists.0.0", "keys.one.two", "keys.7", "lists_of_their_own.inner.0"),
        "net.1@1",
    ]
    weights = [value.name.rpartition(".")[0] for node in nodes for value in node.inputs[1:2]]
    assert weights == [call.partition("@")[0] for call in found if call != "net.0.1"]


def test_a_number_behind_a_name_is_a_call_only_if_the_name_is_not_that_of_a_module() -> None:
    def named(name: str, *inputs: ir.Value) -> ir.Node:
        return ir.node(name.rpartition("/")[2], inputs, name=name)

    x, weight, own = ir.val("x"), ir.val("fc.weight"), ir.val("fc_1.weight")
    for value in (weight, own):
        value.const_value = ir.tensor(np.ones((4, 4), np.float32))
    first = named("/fc/MatMul", x, weight)
    module = named("/fc_1/MatMul", first.outputs[0], own)
    again = named("/fc_2/MatMul", module.outputs[0], weight)
    alone = named("/norm_1/Relu", again.outputs[0])
    graph = ir.Graph(
        [x], alone.outputs, nodes=[first, module, again, alone], initializers=[weight, own], opset_imports={"": 17}
    )
    found = read_torchscript_names(ir.Model(graph, ir_version=10))
    assert [(f.stack[-1].path, f.stack[-1].index) for f in found.values()] == [
        ("fc", 0),
        ("fc_1", 0),
        ("fc", 2),
        ("norm_1", 0),
    ]
    module.replace_input_with(1, weight)
    graph.initializers.pop("fc_1.weight")
    found = read_torchscript_names(ir.Model(graph, ir_version=10))
    assert [(f.stack[-1].path, f.stack[-1].index) for f in found.values()][:3] == [("fc", 0), ("fc", 1), ("fc", 2)]
    assert {f.evidence for f in found.values()} == {Evidence.INFERRED, Evidence.DERIVED}


def test_local_functions_are_modules_and_are_inlined(tmp_path: Path) -> None:
    path = by_torchscript("blocks", tmp_path / "x.onnx", export_modules_as_functions=True)
    assert len(ir.load(path).functions) == 4
    adopted = modelexport.adopt(path, tmp_path / "y.onnx")
    tagged = modelexport.load(tmp_path / "y.onnx")
    assert not tagged.model.functions
    assert adopted.sources["functions"] == adopted.coverage.derived
    assert tagged.tags[tagged.find("shared@1")] == "/Blocks/Block.shared@1"
    assert tagged["up.1.norm"].tag == "/Blocks/Block.up.1/LayerNorm"
    assert tagged["head"].class_name == "Linear"
    inputs = {"x": models.case("blocks").inputs()["x"].numpy()}
    np.testing.assert_allclose(outputs_of(tmp_path / "y.onnx", inputs)[0], outputs_of(path, inputs)[0], rtol=1e-6)


# --- what is not known -----------------------------------------------------------------------------------------------


def test_nodes_in_branches_belong_to_the_call_of_their_enclosing_node(condition: Path) -> None:
    tagged = modelexport.load(condition)
    assert tagged.coverage == documents.Coverage(derived=8, inferred=11)
    inferred = [owner_of(node) for node in tagged.nodes if owner_of(node).evidence is Evidence.INFERRED]
    assert {str(owner.call) for owner in inferred} == {"."}


def test_nodes_without_names_in_a_branch_are_within_the_call_of_the_node_that_holds_it() -> None:
    model = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, bool c) => (float[2] y) {
            ["/a/Relu"] h = Relu (x)
            ["/gate/If"] z = If (c) <
                then_branch = t () => (float[2] o) { o = Neg (h) }, else_branch = e () => (float[2] p) { p = Abs (h) }
            >
            ["/b/Relu"] y = Relu (z)
        }""")
    calls = {node.op_type: str(owner_of(node).call) for node in modelexport.load(model).nodes}
    assert calls == {"Relu": "b", "If": "gate", "Neg": "gate", "Abs": "gate"}


def test_a_value_that_only_an_untagged_node_uses_leaves_its_call(condition: Path, tmp_path: Path) -> None:
    tagged = modelexport.load(condition)
    assert [value.name for value in tagged["before"].outputs] == ["layer_norm"]
    nodes = {node.op_type: node for node in tagged["before"].nodes}
    for key in [key for key in nodes["LayerNormalization"].metadata_props if key.startswith("modelexport.")]:
        del nodes["LayerNormalization"].metadata_props[key]
    ir.save(tagged.model, tmp_path / "x.onnx")
    modelexport.load(tmp_path / "x.onnx").extract("before", tmp_path / "before.onnx")
    cut = ir.load(tmp_path / "before.onnx")
    assert [node.op_type for node in cut.graph] == ["Gemm", "Relu"]
    assert [value.name for value in cut.graph.outputs] == ["relu"]


def chain(*names: str | None) -> ir.Model:
    """Relu after Relu, with these names."""
    value = ir.val("x", ir.DataType.FLOAT, [4])
    inputs, nodes = [value], []
    for i, name in enumerate(names):
        nodes.append(ir.node("Relu", [value], name=name))
        value = nodes[-1].outputs[0]
        value.name, value.dtype, value.shape = f"v{i}", ir.DataType.FLOAT, ir.Shape([4])
    return ir.Model(ir.Graph(inputs, [value], nodes=nodes, opset_imports={"": 18}, name="g"), ir_version=10)


@pytest.mark.parametrize(
    ("names", "owners_found"),
    [
        (("/a/Relu", None, None, "/a/Relu_1"), ["a", "a", "a", "a"]),
        (("/a/Relu", None, None, "/b/Relu"), ["a", "", "", "b"]),
        (("/a/b/Relu", None, "/a/c/Relu"), ["a.b", "a", "a.c"]),
        (("/a/Relu", None, None), ["a", "", ""]),
        ((None, "/a/Relu"), ["a", "a"]),
        ((None, None), ["", ""]),
    ],
)
def test_a_node_without_a_name_belongs_to_the_nearest_call_around_its_neighbors(
    names: tuple[str | None, ...], owners_found: list[str], tmp_path: Path
) -> None:
    adopted = modelexport.adopt(chain(*names), tmp_path / "x.onnx")
    assert list(owners(modelexport.load(tmp_path / "x.onnx")).values()) == owners_found
    assert adopted.coverage == documents.Coverage(derived=len(names) - names.count(None), inferred=names.count(None))
    assert adopted.coverage.inferred == adopted.sources.get("neighbours", 0)


# --- files that have tags --------------------------------------------------------------------------------------------


def test_tags_that_are_there_stay_and_new_nodes_inside_a_call_get_its_tag(tmp_path: Path, exported: Exporter) -> None:
    path = exported("blocks").path
    model = ir.load(path)
    relu = next(node for node in model.graph if node.op_type == "Relu" and "down.0" in str(node.metadata_props))
    linear = relu.inputs[0].producer()
    for node in (linear, relu):  # the Linear's node becomes one of the block itself
        node.metadata_props[keys.CALL] = "down.0"
    new = ir.node("Identity", [linear.outputs[0]], name="by_a_tool")
    new.outputs[0].name = "copied"
    relu.replace_input_with(0, new.outputs[0])
    model.graph.insert_before(relu, new)
    ir.save(model, tmp_path / "x.onnx")
    adopted = modelexport.adopt(tmp_path / "x.onnx", tmp_path / "y.onnx")
    tagged = modelexport.load(tmp_path / "y.onnx")
    before = modelexport.load(path)
    assert adopted.sources == {"tags": len(before.nodes), "neighbours": 1}
    assert tagged.tags == before.tags
    properties = next(node for node in tagged.nodes if node.name == "by_a_tool").metadata_props
    assert properties[keys.SOURCE_MODULE] == "/Blocks/Block.down.0"
    assert (properties[keys.CALL], properties[keys.EVIDENCE]) == ("down.0", "inferred")
    again = modelexport.adopt(tmp_path / "y.onnx", tmp_path / "z.onnx")
    assert again.sources == adopted.sources


def test_tags_that_are_damaged_or_in_memory_are_refused(blocks_file: Path, tmp_path: Path) -> None:
    modelexport.adopt(blocks_file, tmp_path / "x.onnx")
    model = ir.load(tmp_path / "x.onnx")
    with pytest.raises(UsageError, match="has tags of modelexport already"):
        modelexport.adopt(model, tmp_path / "y.onnx")
    model.metadata_props[keys.ADOPTED] = '{"a guess": 1}'
    ir.save(model, tmp_path / "y.onnx")
    with pytest.raises(FileFormatError, match="damaged tags"):
        modelexport.adopt(tmp_path / "y.onnx", tmp_path / "z.onnx")
    model.metadata_props[keys.FORMAT_VERSION_KEY] = "1999-01-01"
    ir.save(model, tmp_path / "y.onnx")
    with pytest.raises(FileFormatError, match="1999-01-01"):
        modelexport.adopt(tmp_path / "y.onnx", tmp_path / "z.onnx")
    assert not (tmp_path / "z.onnx").exists()


# --- the file --------------------------------------------------------------------------------------------------------


def test_an_adopted_file_is_valid_and_computes_the_same(blocks_file: Path, tmp_path: Path) -> None:
    modelexport.adopt(blocks_file, tmp_path / "x.onnx")
    onnx.checker.check_model(str(tmp_path / "x.onnx"), full_check=True)
    inputs = {"x": models.case("blocks").inputs()["x"].numpy()}
    np.testing.assert_array_equal(outputs_of(tmp_path / "x.onnx", inputs)[0], outputs_of(blocks_file, inputs)[0])
    assert b"pkg.torch" not in (tmp_path / "x.onnx").read_bytes()
    assert modelexport.verify_against(tmp_path / "x.onnx", tmp_path / "x.onnx").agrees


def test_weights_in_a_file_of_their_own_stay_there(tmp_path: Path) -> None:
    weight = ir.val("fc.weight", ir.DataType.FLOAT, [32, 32])
    weight.const_value = ir.tensor(np.ones((32, 32), np.float32))
    x = ir.val("x", ir.DataType.FLOAT, [2, 32])
    node = ir.node("MatMul", [x, weight], name="/fc/MatMul")
    node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.FLOAT, ir.Shape([2, 32])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 18}, name="g")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "x.onnx", external_data="x.onnx.data")
    adopted = modelexport.adopt(tmp_path / "x.onnx", tmp_path / "y.onnx")
    assert [Path(file).name for file in adopted.files] == ["y.onnx", "y.onnx.data"]
    modelexport.load(tmp_path / "y.onnx").extract("fc", tmp_path / "fc.onnx")
    (tmp_path / "x.onnx.data").unlink()
    with pytest.raises(FileFormatError, match="missing"):
        modelexport.adopt(tmp_path / "x.onnx", tmp_path / "z.onnx")
    assert not (tmp_path / "z.onnx").exists()


def test_metadata_of_torch_stays_when_asked_for(blocks_file: Path, tmp_path: Path) -> None:
    modelexport.adopt(blocks_file, tmp_path / "x.onnx", keep_torch_metadata=True)
    assert b"pkg.torch.onnx.name_scopes" in (tmp_path / "x.onnx").read_bytes()
    assert b"Block.down.0" in (tmp_path / "x.onnx").read_bytes()


def test_an_object_that_is_neither_a_program_nor_an_onnx_file_is_refused(tmp_path: Path, blocks_file: Path) -> None:
    with pytest.raises(UsageError, match="cannot adopt a Linear"):
        modelexport.adopt(nn.Linear(1, 1), tmp_path / "y.onnx")
    with pytest.raises(FileFormatError, match="there is no file"):
        modelexport.adopt(tmp_path / "none.onnx", tmp_path / "y.onnx")
    (tmp_path / "x.onnx").write_bytes(blocks_file.read_bytes()[:500])
    with pytest.raises(FileFormatError, match="not an ONNX file, or damaged"):
        modelexport.adopt(tmp_path / "x.onnx", tmp_path / "y.onnx")
    assert not (tmp_path / "y.onnx").exists()


def test_the_commands_work_on_an_adopted_file(condition: Path, blocks_file: Path, tmp_path: Path) -> None:
    done = run("adopt", blocks_file, "-o", "x.onnx", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert done.stderr == f"{blocks_file} has no tags: 20 calls from the metadata of torch.onnx (26 nodes)\n"
    assert document["repeated"] == ["shared.linear", "shared.norm"]
    assert document["coverage"]["untagged"] == 0
    shown = run("adopt", blocks_file, "-o", "x.onnx", cwd=tmp_path).stdout
    assert "sources: torch_metadata 26" in shown
    assert "may be several calls that look like one: shared.linear, shared.norm" in shown
    tree = json.loads(run("tree", condition, "--json", cwd=tmp_path).stdout)
    assert tree["untagged"] == {}
    listed = json.loads(run("nodes", condition, "before", "--json", cwd=tmp_path).stdout)
    assert [row["op_type"] for row in listed] == ["Gemm", "Relu", "LayerNormalization"]
    assert run("extract", condition, "before", "-o", "before.onnx", cwd=tmp_path).returncode == 0


def test_the_command_refuses_with_one_line(tmp_path: Path, blocks_file: Path) -> None:
    (tmp_path / "y.onnx").write_text("what was there")
    for arguments in ((tmp_path / "none.onnx", "-o", "y.onnx"), (blocks_file, "-o", "y.onnx/y.onnx")):
        done = run("adopt", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "y.onnx").read_text() == "what was there"
