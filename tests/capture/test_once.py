"""Equal work is done once, and the files are those without that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import models
from modelexport import export
from modelexport.capture.dynamo import capture_by_dynamo
from modelexport.capture.exported_graph import Exported
from modelexport.capture.front_end_options import FrontEndOptions
from modelexport.capture.once import decomposed_calls, equal_calls
from modelexport.capture.patches import TABLE, turned_off
from modelexport.graph.node_owners import owner_of
from test_frontends import STOPPED

WIDTH = 8


class Layer(nn.Module):
    """A layer of a stack; layers of one variant compute the same function of what they get."""

    def __init__(self, variant: str, shared: torch.Tensor) -> None:
        super().__init__()
        self.variant = variant
        hidden = 12 if variant == "shape" else 16
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3 if variant == "attribute" else 1e-5)
        self.wide = nn.Linear(WIDTH, hidden)
        self.narrow = nn.Linear(hidden, WIDTH)
        self.register_buffer("own", torch.full((WIDTH,), 0.5))
        self.register_buffer("shared", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.variant == "writes its input":
            x += 1
        if self.variant == "writes its buffer":
            self.own.add_(1)
        y = nn.functional.relu(self.wide(self.norm(x)), inplace=self.variant != "attribute")
        y = self.narrow(y) * (3.0 if self.variant == "constant" else 2.0)
        if self.variant == "alias":
            return x + y + self.shared + self.shared.view(1, WIDTH)
        return x + y + self.own + self.shared.view(1, WIDTH)


VARIANTS = ("plain", "attribute", "constant", "shape", "alias", "writes its input", "writes its buffer")
NEVER = ("writes its input", "writes its buffer")


class Stack(nn.Module):
    def __init__(self, variants: list[str]) -> None:
        super().__init__()
        shared = torch.arange(float(WIDTH))
        self.layers = nn.ModuleList(Layer(variant, shared) for variant in variants)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for layer in self.layers:
            x = layer(x)
        return x


def facts(exported: Exported) -> list[str]:
    """All that a graph says, as text."""
    lines = []
    for graph in exported.model.graphs():
        for node in graph:
            made = [(value.name, str(value.dtype), str(value.shape)) for value in node.outputs]
            taken = [value and value.name for value in node.inputs]
            attributes = [(key, str(attribute.value)) for key, attribute in node.attributes.items()]
            rest = sorted(attributes), sorted(node.metadata_props.items()), owner_of(node)
            lines.append(f"{node.name} {node.op_type} {taken} {made} {rest}")
    lines += [str(value) for value in (*exported.model.graph.inputs, *exported.model.graph.outputs)]
    lines += [f"{name} {value.shape}" for name, value in exported.model.graph.initializers.items()]
    return [*lines, *sorted(f"{port} {name}" for port, name in exported.values.items()), str(exported.calls)]


def captured(model: nn.Module, inputs: Mapping[str, Any], **options: Any) -> tuple[list[str], list[list[str]]]:
    """What capture makes, and the classes of calls that it took for equal."""
    found: list[list[str]] = []
    find = equal_calls.find_repeats

    def noted(*args: Any) -> Any:
        classes = find(*args)
        found.extend([str(region.call) for region in equal] for equal in classes)
        return classes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decomposed_calls, "find_repeats", noted)
        return facts(capture_by_dynamo(model, inputs, FrontEndOptions(stack_traces=True, **options))), found


def check_stack(variants: list[str], dynamic: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Stack(variants).eval(), {"x": torch.randn(3, WIDTH)}
    once, found = captured(model, inputs, dynamic=dynamic)
    with turned_off("once"):
        whole, none = captured(model, inputs, dynamic=dynamic)
    assert once == whole
    assert none == []
    equal: dict[str, list[str]] = defaultdict(list)
    for index, variant in enumerate(variants):
        if variant not in NEVER:
            equal[variant].append(f"layers.{index}")
    shared = [call for calls in found for call in calls]
    assert all(
        {variants[int(call.split(".")[1])] for call in calls} == {variants[int(calls[0].split(".")[1])]}
        for calls in found
    )
    assert not [call for call in shared if variants[int(call.split(".")[1])] in NEVER]
    if not set(variants) & set(NEVER):
        assert sorted(found) == sorted(calls for calls in equal.values() if len(calls) > 1)


stacks = st.lists(st.sampled_from(VARIANTS), min_size=2, max_size=5)
SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


@pytest.mark.slow
@given(stacks, st.booleans())
@settings(max_examples=40, **SETTINGS)
def test_forty_random_stacks_are_captured_as_without_sharing(variants: list[str], dynamic: bool) -> None:
    check_stack(variants, dynamic)


def test_layers_that_differ_in_one_thing_or_write_into_what_they_get_are_not_shared() -> None:
    check_stack(["plain", "writes its input", "constant", "plain", "writes its input"], dynamic=False)


def test_equal_layers_are_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[int] = []
    run = torch.export.ExportedProgram.run_decompositions

    def counted(self: Any, decomp_table: Any = None, **options: Any) -> Any:
        nodes.append(sum(node.op == "call_function" for node in self.graph.nodes))
        return run(self, decomp_table, **options)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    for layers in (1, 3):
        capture_by_dynamo(Stack(["plain"] * layers).eval(), {"x": torch.randn(3, WIDTH)})
    one, three = nodes
    assert one < three < 2 * one


class Named(nn.Module):
    def forward(self, input: torch.Tensor, sum: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input.sum() + sum


def test_inputs_keep_names_that_torch_fx_avoids() -> None:
    exported = capture_by_dynamo(Named(), {"input": torch.randn(2), "sum": torch.randn(2)})
    assert [value.name for value in exported.model.graph.inputs] == ["input", "sum"]


def files_of(case: models.ModelCase, folder: Path, **options: Any) -> dict[str, bytes]:
    """The bytes of the files that an export writes, without the report, which has times."""
    folder.mkdir()
    export(case.build(), case.inputs(), folder / "m.onnx", check=False, **options)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".md"}


def check_files(name: str, folder: Path, **options: Any) -> None:
    case = models.case(name)
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}: `make test` installs them")
    shared, alone = (files_of(case, folder / str(reuse), reuse=reuse, **options) for reuse in (True, False))
    assert {name for name in shared if shared[name] != alone.get(name)} == set()
    assert shared.keys() == alone.keys()
    assert "m.onnx" in shared


@pytest.mark.slow  # a stack of layers shows it below
def test_a_file_has_the_bytes_that_it_has_without_sharing(tmp_path: Path) -> None:
    check_files("blocks", tmp_path, dynamic=True, frontend="dynamo")


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in models.CASES])
def test_every_file_of_the_table_has_the_bytes_that_it_has_without_sharing(name: str, tmp_path: Path) -> None:
    check_files(name, tmp_path, frontend="dynamo")


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in models.CASES if case.dynamic is not None])
def test_every_dynamic_file_of_the_table_has_the_bytes_that_it_has_without_sharing(name: str, tmp_path: Path) -> None:
    check_files(name, tmp_path, frontend="dynamo", dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in models.CASES if case.name not in STOPPED])
def test_every_traced_file_of_the_table_has_the_bytes_that_it_has_without_sharing(name: str, tmp_path: Path) -> None:
    check_files(name, tmp_path, frontend="torchscript")


def test_fake_tensors_of_one_memory_are_told_from_others() -> None:
    """The canary of ``UntypedStorage._cdata``."""
    with torch._subclasses.FakeTensorMode():
        one, other = torch.empty(4), torch.empty(4)
        assert (
            equal_calls.storage_of(one)
            == equal_calls.storage_of(one.view(2, 2))
            == equal_calls.storage_of(one.detach())
        )
        assert equal_calls.storage_of(one) != equal_calls.storage_of(other)


PARTS = ["once", *(name for name, row in TABLE.items() if row.use == "once")]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return written(tmp_path_factory.mktemp("usual"))


def written(folder: Path) -> dict[str, bytes]:
    torch.manual_seed(0)
    model = Stack(["plain", "constant", "plain"]).eval()
    export(model, {"x": torch.randn(3, WIDTH)}, folder / "m.onnx", dynamic=True, frontend="dynamo", check=False)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".md"}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_file_is_the_same_without_each_part_and_without_all(
    part: str, usual: dict[str, bytes], tmp_path: Path
) -> None:
    with turned_off(part):
        assert written(tmp_path) == usual


def test_stack_traces_are_recorded_for_those_who_keep_them() -> None:
    key = "pkg.torch.onnx.stack_trace"
    for wanted in (True, False):
        inputs = {"input": torch.randn(2), "sum": torch.randn(2)}
        graph = capture_by_dynamo(Named(), inputs, FrontEndOptions(stack_traces=wanted)).model.graph
        assert any("in forward" in node.metadata_props.get(key, "") for node in graph) == wanted
