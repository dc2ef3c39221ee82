"""Nodes know the line of the model's code that made them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from modelexport import export
from modelexport.capture import FrontEnd
from modelexport.capture.lines_of_code import LinesOfCode
from modelexport.errors import RunError
from modelexport.format import keys
from modelexport.graph.node_owners import owner_of
from modelexport.graph.nodes import all_nodes
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import TaggedFile, read_tagged
from modelexport.traces.node_computation import NodeError
from modelexport.traces.value_ranges import measure_values


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2  # in a function


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)  # a module of torch.nn
        return halved(x).tanh()  # an operator


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.table = nn.Embedding(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.layer_norm(x, [4])  # the root


def line(text: str) -> str:
    """The line of this file that ends with a comment."""
    numbers = [number for number, code in enumerate(Path(__file__).read_text().splitlines(), 1) if code.endswith(text)]
    return f"{__name__}:{numbers[0]}"


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def tagged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TaggedFile:
    front_end: FrontEnd = request.param
    path = tmp_path_factory.mktemp("lines") / "net.onnx"
    export(Net().eval(), {"ids": torch.tensor([[1, 2]])}, path, frontend=front_end)
    return read_tagged(path)


def lines_of(tagged: TaggedFile, operator: str) -> set[str]:
    return {owner_of(node).line for node in tagged.nodes if node.op_type == operator}


@pytest.mark.parametrize(
    ("operator", "comment"),
    [
        ("MatMul", "# a module of torch.nn"),
        ("Div", "# in a function"),
        ("Tanh", "# an operator"),
        ("LayerNormalization", "# the root"),
    ],
)
def test_a_node_has_the_line_of_the_models_own_code(tagged: TaggedFile, operator: str, comment: str) -> None:
    assert lines_of(tagged, operator) == {line(comment)}


def test_every_node_of_an_export_has_a_line(tagged: TaggedFile) -> None:
    assert [node.name for node in tagged.nodes if not owner_of(node).line] == []


def test_the_file_has_modules_and_no_paths(tagged: TaggedFile) -> None:
    assert str(Path(__file__).parent).encode() not in tagged.path.read_bytes()


def test_without_lines_nothing_is_recorded(tmp_path: Path) -> None:
    export(nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "net.onnx", lines=False)
    assert not any(keys.LINE in node.metadata_props for node in all_nodes(ir.load(tmp_path / "net.onnx")))


def test_of_code_in_an_installed_package_that_is_not_the_models_the_caller_is_told() -> None:
    places = [(pytest.__file__, 10), (__file__, 20)]
    assert LinesOfCode(Net()).innermost(places) == f"{__name__}:20"


def test_code_of_the_package_of_a_models_class_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "__module__", "pytest.anything")
    assert LinesOfCode(Net()).innermost([(pytest.__file__, 10), (__file__, 20)]) == "pytest:10"


def test_a_script_is_named_after_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "my_script.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert LinesOfCode(Net()).innermost([(str(script), 3)]) == "my_script:3"


def test_code_that_torch_fx_wrote_has_no_line_of_the_file_that_asked_for_it() -> None:
    written = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert LinesOfCode(written).innermost([(written.forward.__func__.__code__.co_filename, 5)]) == ""


def test_a_file_of_another_system_has_no_path_either() -> None:
    assert LinesOfCode(Net()).innermost([(r"C:\Users\me\net.py", 3)]) == "net:3"


def test_a_module_that_may_not_be_imported_is_no_place_of_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "forbidden", None)
    assert LinesOfCode(Net()).innermost([(str(tmp_path / "net.py"), 3)]) == "net:3"


def test_an_error_of_onnxruntime_tells_the_call_and_the_line_of_the_node(tagged: TaggedFile) -> None:
    with pytest.raises(RunError, match=r"the node is of table, test_lines_of_code:\d+\)$"):
        run_session(open_session(tagged.path), {"ids": np.array([[1, 99]])})


def test_a_node_that_cannot_be_computed_is_told_with_its_call_and_line(tagged: TaggedFile) -> None:
    with pytest.raises(NodeError, match=r"^Gather \S+ of table, test_lines_of_code:\d+ fails: "):
        measure_values(tagged, [{"ids": np.array([[1, 99]])}])
