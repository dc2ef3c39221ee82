"""``place``: annotations that select one module each, rules that become session options, and where modules run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx_ir as ir
import pytest

from exports import Exporter
from modelexport import export, load, retag
from modelexport.core.calls import ModuleCall
from modelexport.errors import UsageError
from modelexport.format.keys import LAYER_ANNOTATION
from modelexport.graph.node_owners import owner_of
from modelexport.tools.devices.placing import PlacementRule, place


@pytest.mark.parametrize("name", ["blocks", "condition", "llama", "swin", "module-dict", "albert"])
def test_every_node_is_annotated_and_a_prefix_takes_one_module(name: str, exported: Exporter) -> None:
    tagged = load(exported(name).path)
    annotations = {node: node.metadata_props[LAYER_ANNOTATION] for node in tagged.nodes}
    assert len(annotations) == len(tagged.nodes)
    for path in {call.path for call in tagged.tags if call.path}:
        inside = {
            node
            for node in tagged.nodes
            if any(f"{owner_of(node).call.path}.".startswith(f"{path}{end}") for end in ".")
        }
        taken = {node for node, text in annotations.items() if text.startswith(ModuleCall(path).annotation)}
        assert taken == inside, path


def test_annotations_end_their_parts_and_escape_what_rules_are_made_of() -> None:
    assert ModuleCall("layers.1").annotation == "layers.1."
    assert not ModuleCall("layers.10").annotation.startswith(ModuleCall("layers.1").annotation)
    assert ModuleCall("layers.1", 2).annotation == "layers.1.@2."
    assert ModuleCall("").annotation == "."
    assert not set(ModuleCall("experts.a, (b);=c").annotation) & set(",();= ")


def matched(settings: str, annotation: str) -> str | None:
    """ONNX Runtime's rule: the first prefix that matches, or else the first annotation that is equal."""
    rules = [
        (device.strip(), text.strip())
        for device, texts in re.findall(r"([^;()]+)\(([^)]*)\)", settings)
        for text in texts.split(",")
    ]
    prefixes = [device for device, text in rules if not text.startswith("=") and annotation.startswith(text)]
    exact = [device for device, text in rules if text == f"={annotation}"]
    return next(iter([*prefixes, *exact]), None)


RULES = [
    ["gpu: model.layers.0", "cpu: lm_head"],
    ["cpu: .", "gpu: **.mlp", "npu: model.layers.1.mlp.up_proj"],
    ["gpu: . !model.layers.1"],
    ["gpu: class:LlamaRMSNorm", "cpu: model"],
]


@pytest.mark.parametrize("rules", RULES)
def test_a_node_goes_by_the_innermost_module_that_a_rule_names(rules: list[str], exported: Exporter) -> None:
    tagged = load(exported("llama").path)
    settings = place(tagged, [PlacementRule.parse(rule) for rule in rules], check=False).settings
    for node in tagged.nodes:
        stack = [str(call) for call in tagged.calls.stack(owner_of(node).call)]
        wanted: list[tuple[int, int, str]] = []
        for index, rule in enumerate(rules):
            device, _, selectors = rule.partition(": ")
            selection = tagged.select(*selectors.split())
            if owner_of(node).call in selection:
                depth = max(stack.index(str(call)) for call in selection.calls if str(call) in stack)
                wanted.append((depth, index, device))
        expected = max(wanted)[2] if wanted else None
        assert matched(settings, node.metadata_props[LAYER_ANNOTATION]) == expected, node.name


@pytest.mark.parametrize("name", ["llama", "condition", "unet"])
def test_a_session_puts_every_module_where_the_rule_says(name: str, exported: Exporter) -> None:
    tagged = load(exported(name).path)
    kids = [call for call in tagged.calls.children[ModuleCall("")] if any(True for _ in tagged.nodes_of(call))]
    placement = place(tagged, [PlacementRule("cpu", (str(kids[0]),)), PlacementRule("gpu", (str(kids[-1]),))])
    by_call = {call.call: call for call in placement.calls}
    assert by_call[str(kids[0])].state == "placed"
    assert set(by_call[str(kids[0])].providers) == {"CPUExecutionProvider"}
    assert by_call[str(kids[-1])].state == "no provider"
    assert not placement.faults
    options = placement.session_options()
    assert json.loads(json.dumps(options))["config_entries"]["session.layer_assignment_settings"] == placement.settings


def test_one_call_of_a_module_can_be_placed_alone(exported: Exporter) -> None:
    tagged = load(exported("blocks").path)
    settings = place(tagged, [PlacementRule("cpu", (".",)), PlacementRule("gpu", ("shared@1",))], check=False).settings
    sent = {node: matched(settings, node.metadata_props[LAYER_ANNOTATION]) for node in tagged.nodes}
    second = set(tagged.nodes_of(ModuleCall("shared", 1)))
    assert {node for node, device in sent.items() if device == "gpu"} == second
    assert second


def test_functions_carry_the_annotations_of_their_calls(exported: Exporter, tmp_path: Path) -> None:
    case = exported("blocks").case
    export(case.build(), case.inputs(), tmp_path / "f.onnx", tags_as="functions", check=False)
    called = [node for node in ir.load(tmp_path / "f.onnx").graph if node.domain == "modelexport"]
    assert "up.1." in {node.metadata_props[LAYER_ANNOTATION] for node in called}
    tagged = load(tmp_path / "f.onnx")
    assert all(node.metadata_props[LAYER_ANNOTATION] == owner_of(node).call.annotation for node in tagged.nodes)


def test_retag_writes_the_annotations_that_a_tool_lost(exported: Exporter, tmp_path: Path) -> None:
    source = exported("blocks").path
    model = ir.load(source)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
    ir.save(model, tmp_path / "changed.onnx")
    with pytest.raises(UsageError, match="has no module call 'stem'"):
        place(load(tmp_path / "changed.onnx"), [PlacementRule("cpu", ("stem",))])
    retag(tmp_path / "changed.onnx", source=source, output=tmp_path / "back.onnx")
    place(load(tmp_path / "back.onnx"), [PlacementRule("cpu", ("stem",))])


def test_invalid_rules_and_rules_that_match_nothing_are_errors(exported: Exporter) -> None:
    tagged = load(exported("blocks").path)
    with pytest.raises(UsageError, match="did you mean stem"):
        place(tagged, [PlacementRule("cpu", ("stm",))])
    for text in ("cpu", "cpu:", "cpu: ", ": stem", "g(pu: stem"):
        with pytest.raises(UsageError, match="is not a rule"):
            PlacementRule.parse(text)
    with pytest.raises(UsageError, match="there is no device 'NoneExecutionProvider'"):
        place(tagged, [PlacementRule("cpu", ("stem",))], providers=["NoneExecutionProvider"])
