"""Every model of the table: exported, tagged, valid, and equal to PyTorch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import modelexport
import models
from exports import Exporter
from modelexport import load
from modelexport.graph.node_owners import owner_of
from modelexport.pytorch.inputs.named_inputs import feeds
from modelexport.pytorch.runs.outputs_as_users_run import returned_by
from modelexport.traces.array_differences import compare_outputs

DYNAMIC = [case.name for case in (*models.CASES, *models.TRAINED) if case.dynamic is not None]
QUICK_DYNAMIC = ["blocks", "bert"]


def test_the_table_has_the_models_that_the_claims_are_about() -> None:
    assert len(models.CASES) >= 24
    assert len({case.family for case in models.CASES}) >= 12


@pytest.mark.parametrize("name", models.NAMES)
def test_every_node_has_an_owner_and_none_is_inferred(name: str, exported: Exporter) -> None:
    coverage = exported(name).document["coverage"]
    assert coverage["exact"] > 0
    assert (coverage["inferred"], coverage["untagged"]) == (0, 0)


@pytest.mark.slow
def test_a_graph_with_a_loop_that_is_not_optimized_has_owners_too(tmp_path: Path) -> None:
    case = models.case("loop")
    modelexport.export(case.build(), case.inputs(), tmp_path / "m.onnx", optimized=False, check=False)
    assert load(tmp_path / "m.onnx").coverage.untagged == 0


class Until(nn.Module):
    """Computes a condition of several operators, for the first time before the loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.while_loop(lambda x: (x.abs() - 1).sum() > 0, lambda x: (x * 0.5,), (x,))[0].sigmoid()


@pytest.mark.slow
def test_the_first_condition_of_a_loop_is_of_the_call_that_it_is_in(tmp_path: Path) -> None:
    result = modelexport.export(Until(), (torch.full((2, 3), 5.0),), tmp_path / "m.onnx", check=False)
    assert (result.coverage.inferred, result.coverage.untagged) == (0, 0)


@pytest.mark.parametrize("name", models.NAMES)
def test_the_file_computes_what_pytorch_computes(name: str, exported: Exporter) -> None:
    verified = exported(name).document["verify"]
    assert verified["agrees"], verified
    assert verified["outputs"]
    calls = verified["calls"]
    assert calls["agree"] > 0
    assert "not compared" not in calls


@pytest.mark.parametrize("name", models.NAMES)
def test_the_file_passes_the_full_check(name: str, exported: Exporter) -> None:
    onnx.checker.check_model(str(exported(name).path), full_check=True)


@pytest.mark.parametrize("name", models.NAMES)
def test_what_is_read_back_is_what_the_sidecar_says(name: str, exported: Exporter) -> None:
    export = exported(name)
    tagged, hierarchy = load(export.path), export.hierarchy
    assert tagged.coverage == hierarchy.coverage
    assert [call.call.address for call in tagged.calls] == [call.address for call in hierarchy.calls]
    assert [(node.name, owner_of(node).call.address) for node in tagged.nodes] == [
        (node.name, node.call) for node in hierarchy.nodes
    ]


@pytest.mark.parametrize("name", models.NAMES)
def test_tags_are_those_of_the_owners_deepest_level(name: str, exported: Exporter) -> None:
    export = exported(name)
    tagged = load(export.path)
    levels = {module.path for module in export.hierarchy.modules if module.level}
    for node in tagged.nodes:
        call = owner_of(node).call
        level = next(c for c in reversed(tagged.calls.stack(call)) if c.path in levels or c.path == "")
        assert node.metadata_props["modelexport.source_module"] == tagged.tags[level]
        assert "/" + node.metadata_props["namespace"] == tagged.tags[call]


@pytest.mark.parametrize("name", [case.name for case in models.CASES if case.expected.repeated])
def test_repeated_calls_have_addresses_and_nodes_of_their_own(name: str, exported: Exporter) -> None:
    export = exported(name)
    calls = Counter(call.address.partition("@")[0] for call in export.hierarchy.calls)
    for path, count in export.case.expected.repeated.items():
        assert calls[path] == count


def test_the_calls_of_one_module_have_the_same_operators(exported: Exporter) -> None:
    tagged = load(exported("blocks").path)
    first, second = (
        Counter(node.op_type for node in tagged.nodes_of(tagged.find(address))) for address in ("shared", "shared@1")
    )
    assert first == second
    assert first.total() > 1


def test_gpt2s_split_nodes_belong_to_the_attention_that_splits(exported: Exporter) -> None:
    tagged = load(exported("gpt2-cache").path)
    splits = [node for node in tagged.nodes if node.op_type == "Split"]
    assert [owner_of(node).call.address for node in splits] == [f"transformer.h.{i}.attn" for i in range(len(splits))]
    assert splits


def test_the_branches_of_a_condition_belong_to_the_modules_called_in_them(exported: Exporter) -> None:
    tagged = load(exported("condition").path)
    branch = next(node for node in tagged.nodes if node.op_type == "If")
    owners = {
        attribute.name: {owner_of(node).call.path for node in attribute.as_graph().all_nodes()}
        for attribute in branch.attributes.values()
    }
    assert owners["then_branch"].isdisjoint(owners["else_branch"] - {""})
    assert all(any(path for path in paths) for paths in owners.values())


@pytest.mark.parametrize("name", QUICK_DYNAMIC)
def test_a_dynamic_export_takes_other_sizes(name: str, exported: Exporter) -> None:
    check_dynamic(name, exported)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DYNAMIC if name not in QUICK_DYNAMIC])
def test_every_other_dynamic_export_takes_other_sizes(name: str, exported: Exporter) -> None:
    check_dynamic(name, exported)


def check_dynamic(name: str, exported: Exporter) -> None:
    export = exported(name, dynamic=True)
    coverage = export.document["coverage"]
    assert (coverage["inferred"], coverage["untagged"]) == (0, 0)
    onnx.checker.check_model(str(export.path), full_check=True)
    assert export.case.dynamic is not None
    others = export.case.dynamic()
    session = onnxruntime.InferenceSession(export.path, providers=["CPUExecutionProvider"])
    actual = session.run(None, feeds(others, session))
    expected = returned_by(export.case.build(), others)
    differences = compare_outputs([output.name for output in session.get_outputs()], expected, actual)
    assert [d for d in differences if d.status != "agree" and (d.absolute or 1) > export.case.tolerance] == []


class Largest(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros(6).scatter_reduce(0, index, x, "amax")


def test_a_constant_that_only_a_removed_branch_used_is_removed_too(tmp_path: Path) -> None:
    """The exporter's translation has an ``If`` that the optimizer folds."""
    inputs = torch.rand(4), torch.tensor([0, 1, 2, 5])
    result = modelexport.export(Largest(), inputs, tmp_path / "x.onnx", frontend="torchscript", verify=True)
    graph = onnx.load(tmp_path / "x.onnx").graph
    assert {value.name for value in graph.initializer} <= {name for node in graph.node for name in node.input}
    assert result.verified is not None
    assert result.verified.agrees
