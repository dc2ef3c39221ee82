"""Nodes that change nothing on the given inputs: wherever they are, and at what cost they are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export, verify
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.runtime import sessions
from modelexport.verify import stretches
from modelexport.verify.verdicts import VerifyReport

IDS = {"ids": torch.arange(3, 9)[None]}


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    """A model with weights none of which are equal, so that none are changed."""
    torch.manual_seed(0)
    model = kind().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1.0, 1.0) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model


def verified(model: nn.Module, path: Path, plant: Callable[[ir.Graph], None]) -> VerifyReport:
    """Export, see that the sound file agrees, plant a fault, and verify."""
    export(model, IDS, path / "sound.onnx")
    assert verify(model, IDS, path / "sound.onnx").agrees
    file = load_onnx(path / "sound.onnx")
    plant(file.graph)
    save_model(file, path / "faulty.onnx")
    return verify(model, IDS, path / "faulty.onnx")


def insert_after(node: ir.Node, op_type: str, number: float) -> None:
    """Put an operation with a constant behind a node, which the node's call owns."""
    value, graph = node.outputs[0], node.graph
    assert isinstance(graph, ir.Graph)
    constant = ir.Value(name="bound", const_value=ir.tensor(np.float32(number), name="bound"))
    constant.type, constant.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    graph.initializers.add(constant)
    users = list(value.uses())
    new = ir.Node("", op_type, [value, constant], name="planted", metadata_props=dict(node.metadata_props))
    new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = "planted", value.type, value.shape
    graph.insert_after(node, new)
    for user, index in users:
        user.replace_input_with(index, new.outputs[0])
    if value in graph.outputs:
        value.name, new.outputs[0].name = "before", value.name
        graph.outputs[list(graph.outputs).index(value)] = new.outputs[0]


def cut_off(which: str) -> Callable[[ir.Graph], None]:
    """Cuts the last result of an operation off at the largest number that it has for any id."""

    def plant(graph: ir.Graph) -> None:
        node = [node for node in graph if node.op_type == which][-1]
        insert_after(node, "Min", largest_before(node, graph))

    def largest_before(node: ir.Node, graph: ir.Graph) -> float:
        outputs = list(graph.outputs)
        graph.outputs.clear()
        graph.outputs.append(node.outputs[0])
        whole = ir.Model(graph, ir_version=10)
        session = sessions.open_session(whole)
        every = [np.arange(start, start + 6)[None] for start in (0, 6)]
        found = [sessions.run_session(session, {"ids": ids})[node.outputs[0].name or ""].max() for ids in every]
        graph.outputs.clear()
        graph.outputs.extend(outputs)
        return float(max(found))

    return plant


class OwnCode(nn.Module):
    """A model that gets ids, and computes something itself between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(12, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.abs(self.norm(self.words(ids)) * 2) * 3)


class OwnEnd(OwnCode):
    """Its last operation is its own: nothing but its output follows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.words(ids))) * 2


class OwnSum(OwnCode):
    """What one call gets, the model adds to what this call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.norm(self.words(ids))
        return self.head(words * 2 - self.inner(words))


@pytest.mark.parametrize(("kind", "operation"), [(OwnCode, "Mul"), (OwnCode, "Abs"), (OwnEnd, "Mul"), (OwnSum, "Sub")])
def test_numbers_that_the_model_itself_cuts_off_where_no_input_reaches(
    kind: Callable[[], nn.Module], operation: str, tmp_path: Path
) -> None:
    model = seeded(kind)
    report = verified(model, tmp_path, cut_off(operation))
    assert report.diverging is not None
    assert (report.diverging.address, report.diverging.first_node) == ("", "planted")


class Squares(nn.Module):
    """What it returns is never negative, so that its last operation changes nothing, as it should."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Squares(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.inner(x) - 1)


class Nested(nn.Module):
    """Both a call and the call inside it have operations that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.outer = nn.Embedding(12, 16), nn.LayerNorm(16), Around()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.words(ids)))


class Softer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(torch.clamp(x, -50.0, 50.0) + 40)


class Row(nn.Module):
    """Blocks with operations that rightly change nothing on these ids."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(count))
        self.blocks = nn.ModuleList(Softer() for _ in range(count))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = block(norm(x))
        return x


def test_a_call_inside_another_one_that_is_tried_too(tmp_path: Path) -> None:
    model = seeded(Nested)
    report = verified(model, tmp_path, cut_off("Sub"))
    assert report.diverging is not None
    assert report.diverging.first_node == "planted"


def costs(count: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, int]:
    """Sessions, and nodes that are looked at, when a file with so many blocks is verified."""
    model, found = seeded(lambda: Row(count)), {"sessions": 0, "nodes": 0}
    export(model, IDS, path / f"{count}.onnx")
    for module, name, what in ((sessions, "open_session", "sessions"), (stretches, "values_taken", "nodes")):
        plain = getattr(module, name)

        def counted(*given: object, plain: Callable[..., object] = plain, what: str = what, **more: object) -> object:
            found[what] += 1
            return plain(*given, **more)

        monkeypatch.setattr(module, name, counted)
    assert verify(model, IDS, path / f"{count}.onnx").agrees
    monkeypatch.undo()
    return found


def test_many_idle_nodes_take_few_sessions_and_each_node_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (costs(count, tmp_path, monkeypatch) for count in (3, 24))
    assert max(few["sessions"], many["sessions"]) < 5  # with those of all that verify compares
    assert 0 < many["nodes"] < 9 * few["nodes"]


SOUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "what it gets": lambda x: torch.clamp(x, -50.0, 50.0),
    "in other steps": lambda x: torch.clamp(x * 2, -50.0, 50.0) / 2,
    "in another order": lambda x: torch.clamp(x.transpose(-1, -2), -50.0, 50.0).contiguous(),
    "in another order and back": lambda x: torch.clamp(x.mT * 2, -50.0, 50.0).mT / 2,
    "a choice of two": lambda x: torch.where(x * 2 < 20, x, 10 - x),
    "only what is positive": lambda x: torch.relu(x + 30),
    "the exporter's own choice of two": lambda x: nn.functional.softplus(x, beta=2),
    "with steps that change nothing": lambda x: torch.clamp(torch.clamp(x, -50.0, 50.0).reshape(6, 16), max=9)[None],
    "a part of it": lambda x: torch.cat([torch.clamp(x[..., :8], -50.0, 50.0), x[..., 8:]], -1),
}
"""Functions that change nothing with the numbers of the example, and do with larger ones."""


class Function(nn.Module):
    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SOUND[self.which](x)


class Wrapped(nn.Module):
    """Returns what a module in it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Sound(nn.Module):
    """A function in its own call, in the caller, and behind the last operation of another call."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.words, self.norm, self.act = nn.Embedding(12, 16), nn.LayerNorm(16), Wrapped(Function(which))
        self.first, self.second = nn.Linear(16, 16), Wrapped(nn.Sequential(nn.Linear(16, 16), Function(which)))
        self.head = nn.LazyLinear(5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(self.norm(self.words(ids)))).reshape(1, 6, 16)
        x = self.second(x).reshape(1, 6, 16) + x
        return self.head(SOUND[self.which](x).flatten(1))


@pytest.mark.sweep
@pytest.mark.parametrize("which", SOUND)
def test_what_rightly_changes_nothing_is_not_accused(which: str, tmp_path: Path) -> None:
    model = Sound(which).eval()
    model(**IDS)  # creates the weights of the head
    model = seeded(lambda: model)
    export(model, IDS, tmp_path / "sound.onnx")
    report = verify(model, IDS, tmp_path / "sound.onnx")
    assert [call.reason for call in report.calls if call.status == "differ"] == []
    assert report.agrees


class Returning(nn.Module):
    """Computes on with what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = torch.clamp(self.first(self.norm(x)).abs().mean(-1, keepdim=True), min=1e-6)
        scale = torch.log(size)
        return self.second(x / size + scale.expand_as(x)), scale


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(12, 16), Returning(), nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, scale = self.inner(self.words(ids))
        return self.head(x) * scale


def test_a_call_that_computes_on_with_what_it_returns_is_not_accused(tmp_path: Path) -> None:
    model = seeded(Returned)
    export(model, IDS, tmp_path / "sound.onnx")
    report = verify(model, IDS, tmp_path / "sound.onnx")
    assert [call.reason for call in report.calls if call.status == "differ"] == []
    assert report.agrees


class Likely(nn.Module):
    """The logarithm of what is left of a probability: of large numbers there is nothing left but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.first = nn.Embedding(12, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        likely = torch.sigmoid(self.first(self.norm(self.words(ids)))).clamp(1e-7, 1 - 1e-7)
        return self.head(torch.log(likely) - torch.log(1 - likely))


@pytest.mark.parametrize("largest", [0.3, 1.0, 4.0])
def test_what_is_nothing_but_rounding_of_large_numbers_is_not_accused(largest: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Likely().eval()
    for parameter in model.parameters():
        parameter.data.uniform_(-largest, largest)
    export(model, IDS, tmp_path / "sound.onnx")
    assert verify(model, IDS, tmp_path / "sound.onnx").agrees


class Distance(nn.Module):
    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return 1 - torch.nn.functional.cosine_similarity(one, two, dim=-1)


class Parallel(nn.Module):
    """The distance of parallel vectors is nothing but rounding, of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.distance = nn.Linear(8, 8), Distance()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layer(x)
        return self.distance(x, x.flip(0)), self.distance(x, 2 * x)


def test_bounds_before_what_is_nothing_but_rounding_are_not_accused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Parallel().eval(), (torch.randn(4, 8),)
    export(model, inputs, tmp_path / "sound.onnx", frontend="torchscript")
    assert verify(model, inputs, tmp_path / "sound.onnx").agrees
