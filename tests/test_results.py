"""What Python shows of a result fits on a screen, and results are taken wherever a file is."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import logging
import os
import pickle
import pydoc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import modelexport
import modelexport.errors
from modelexport.core.result_display import Rows, Shown
from modelexport.core.text import name_of_code
from modelexport.exporting.options import Options
from modelexport.verify.verify_report import CallVerdict, VerifyReport


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, printed: io.StringIO) -> dict[str, Any]:
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        return made(tmp_path_factory)


def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    file, inputs = folder / "blocks.onnx", {"x": torch.ones(2, 4)}
    model = Blocks().eval()
    exported = modelexport.export(model, inputs, file, verify=True, reference=True)
    tagged = modelexport.load(file)
    return {
        "ExportResult": exported,
        "VerifyReport": exported.verified,
        "AgainstReport": modelexport.verify_against(file, exported),
        "PackageResult": modelexport.export_package(model, folder / "package", inputs=inputs, check=False),
        "model": model,
        "StagesReport": modelexport.verify_stages(modelexport.split(file, folder / "two", stages=2), file),
        "TaggedModel": tagged,
        "ModuleView": tagged["blocks.0"],
        "Table": modelexport.cost(file),
        "ModuleProfile": modelexport.profile(file, runs=1, warmup=1),
        "FileValues": modelexport.values(file),
        "FileComparison": modelexport.compare(file, file),
        "Extracted": tagged.extract("blocks.3", folder / "block.onnx"),
        "Split": modelexport.split(file, folder / "stages", stages=2),
        "Renamed": modelexport.rename(file, folder / "renamed.onnx"),
        "Replaced": modelexport.replace(file, ["blocks.1"], modelexport.Identity(), folder / "replaced.onnx"),
        "Placement": modelexport.place(file, ["gpu: blocks.[0-9]"], check=False),
        "RetagReport": modelexport.retag(folder / "renamed.onnx", source=file, output=folder / "retagged.onnx"),
        "UpdateResult": modelexport.update_weights(file, model.state_dict(), folder / "updated.onnx"),
        "HierarchyOverview": modelexport.hierarchy(model, inputs),
    }


def test_every_result_is_one_line_that_begins_with_its_class(results: dict[str, Any]) -> None:
    for name, result in results.items():
        if name == "model":
            continue
        text = repr(result)
        assert text.strip("<").startswith(name), text
        assert len(text) < 420, text
        assert "\n" not in text, text


def test_a_notebook_shows_the_line_with_a_table(results: dict[str, Any]) -> None:
    for name in ("ExportResult", "VerifyReport", "AgainstReport", "FileComparison", "Split", "PackageResult"):
        assert name in results[name]._repr_html_()
    assert "<td style='text-align:left'>blocks.3</td>" in results["VerifyReport"]._repr_html_()
    assert results["ExportResult"]._repr_html_().endswith("<div>11 more</div></div>")
    for name in ("Table", "ModuleProfile", "TaggedModel"):
        assert "blocks" in results[name]._repr_html_()


def test_a_name_in_a_table_is_not_taken_for_html() -> None:
    class Odd(Shown):
        def __repr__(self) -> str:
            return "<Odd>"

        def _table(self) -> Rows:
            yield from ([["name"], ["<script>"]])

    assert "<script>" not in Odd()._repr_html_()
    assert "&lt;script&gt;" in Odd()._repr_html_()


def test_nothing_is_printed_by_this_or_other_packages(results: dict[str, Any], printed: io.StringIO) -> None:
    assert printed.getvalue() == ""


SOURCES: dict[str, Callable[[str], Any]] = {
    "text": str,
    "path": Path,
    "proto": onnx.load,
    "ir": ir.load,
    "tagged": modelexport.load,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_paths_open_models_and_results_are_taken_wherever_a_file_is(
    results: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    exported = results["ExportResult"]
    given = SOURCES[kind](str(exported.path))
    before = content(given)
    assert len(modelexport.load(given)) == 61
    assert modelexport.cost(given).calls == modelexport.cost(exported).calls
    assert not modelexport.compare(given, exported, values=True).differs
    assert modelexport.rename(given, tmp_path / "renamed.onnx").path == str(tmp_path / "renamed.onnx")
    assert modelexport.verify_against(exported, given).agrees
    assert (
        modelexport.retag(tmp_path / "renamed.onnx", source=given, output=tmp_path / "tagged.onnx").coverage.exact == 40
    )
    assert content(given) == before


def content(given: Any) -> bytes:
    """The bytes of an open model."""
    proto = ir.to_proto(given) if isinstance(given, ir.Model) else given
    return proto.SerializeToString(deterministic=True) if isinstance(proto, onnx.ModelProto) else b""


def test_the_file_of_an_open_model_is_removed_with_what_was_read_from_it(results: dict[str, Any]) -> None:
    tagged = modelexport.load(onnx.load(results["ExportResult"].path))
    path = str(tagged.path)
    assert os.path.exists(path)  # noqa: PTH110 - a path object would keep the file
    del tagged
    assert not os.path.exists(path)  # noqa: PTH110


def test_what_is_not_a_file_is_refused() -> None:
    with pytest.raises(modelexport.ModelExportError, match="int is neither a path nor an ONNX model"):
        modelexport.load(3)  # type: ignore[arg-type]


def test_arguments_in_another_order_or_of_another_type_are_refused(results: dict[str, Any], tmp_path: Path) -> None:
    path, model, inputs = results["ExportResult"].path, torch.nn.Linear(4, 4), torch.ones(2, 4)
    new: Any = tmp_path / "new.onnx"
    modelexport.export(model, inputs, new)
    calls: dict[str, Callable[[], Any]] = {
        "the example inputs are a NoneType": lambda: modelexport.export(model, None, path),  # type: ignore[arg-type]
        "export: path takes str | Path | None, not tensor(": lambda: modelexport.export(model, path, inputs),  # type: ignore[arg-type]
        "export: dynamic takes bool | None, not {'x'": lambda: modelexport.export(
            model, inputs, path, dynamic={"x": {0: "b"}}
        ),  # type: ignore[arg-type]
        "export: dynamic takes bool | None, not 'batch'": lambda: modelexport.export(
            model, inputs, path, dynamic="batch"
        ),  # type: ignore[arg-type]
        "there is no path: give export(model, inputs, path)": lambda: modelexport.export(model, path),
        "packed/ does not end in .onnx: give packed.onnx, or a folder": lambda: modelexport.export(
            model, inputs, "packed/"
        ),
        "export: tags_as takes Literal['metadata', ": lambda: modelexport.export(model, inputs, path, tags_as="name"),  # type: ignore[arg-type]
        "export: include takes Collection[str], not 'Linear'": lambda: modelexport.export(
            model, inputs, path, include="Linear"
        ),
        "cost: sizes takes Mapping[str, int of 0 or more] | None, not {'x': -1}": lambda: modelexport.cost(
            path, {"x": -1}
        ),
        "place: rules takes Iterable[str | ": lambda: modelexport.place(path, 5),  # type: ignore[arg-type]
        "verify: model takes torch.nn.modules.module.Module, not Posix": lambda: modelexport.verify(new, model, inputs),
        "Linear does not run with": lambda: modelexport.verify(model, torch.ones(2, 5), new),
    }
    for text, call in calls.items():
        with pytest.raises(modelexport.errors.UsageError) as error:
            call()
        assert str(error.value).startswith(text)
        assert "\n" not in str(error.value)


def test_a_misspelled_keyword_is_refused_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'opset_version'; did you mean opset"):
        modelexport.export(torch.nn.Linear(4, 4), torch.ones(2, 4), tmp_path / "new.onnx", opset_version=18)


def test_a_missing_argument_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'path'"):
        modelexport.verify(torch.nn.Linear(4, 4), tmp_path / "new.onnx")  # type: ignore[call-arg]


def test_functions_that_check_their_arguments_are_pickled_and_inspected_like_any_other() -> None:
    assert pickle.loads(pickle.dumps(modelexport.export)) is modelexport.export
    assert inspect.signature(modelexport.profile).parameters["runs"].default == 10


def test_a_selection_is_iterated_over_its_calls(results: dict[str, Any]) -> None:
    selection = results["TaggedModel"].select("blocks.0")
    assert [call.address for call in selection] == ["blocks.0"]
    assert len(selection.inside) > 1


def test_a_file_is_a_mapping_of_addresses_to_calls(results: dict[str, Any]) -> None:
    tagged = results["TaggedModel"]
    assert isinstance(tagged, Mapping)
    assert list(tagged)[:3] == [".", "blocks.0", "blocks.0.0"]
    assert tagged["blocks.0"].address == "blocks.0"
    assert tagged.get("blocks.99") is None
    assert [view.address for view in tagged.values()] == list(tagged.keys())
    with pytest.raises(KeyError, match=r"no module call 'blocks.99'; did you mean .*\? `modelexport tree"):
        tagged["blocks.99"]
    assert repr(tagged["blocks.0.0"]) == "<ModuleView Linear blocks.0.0: 1 node>"


def test_a_notebook_shows_the_line_that_failed_and_the_message(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the protocol of IPython; and a line of a cell is told by the number of the cell."""
    with pytest.raises(modelexport.ModelExportError) as raised:
        results["TaggedModel"]["no such call"]
    line = f'line {raised.traceback[0].lineno + 1}: results["TaggedModel"]["no such call"]'
    assert raised.value._render_traceback_() == [line, f"NoSuchCallError: {raised.value}"]
    assert name_of_code("/home/me/net.py") == "net.py"
    compiler = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if "ipykernel" in file else None)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compiler))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert [name_of_code(file) for file in ("/tmp/ipykernel_7/123.py", "/home/me/net.py")] == ["In[3]", "net.py"]


def test_a_report_has_the_verdict_of_a_call_by_its_address(results: dict[str, Any]) -> None:
    assert results["VerifyReport"]["blocks.0.0"].status == "agree"
    assert results["VerifyReport"]["."].address == ""
    assert results["AgainstReport"]["blocks.3"].tag.endswith("Sequential.3")
    with pytest.raises(modelexport.ModelExportError, match=r"the report has no module call 'blocks.99'; did you mean"):
        results["VerifyReport"]["blocks.99"]


def test_a_file_stages_and_a_package_are_verified_by_a_function_each(results: dict[str, Any]) -> None:
    file, inputs, steps = results["ExportResult"], {"x": torch.ones(2, 4)}, list[str]()
    modelexport.verify(results["model"], inputs, file, progress=steps.append)
    assert "verify: every call" in steps
    assert modelexport.verify_reference(file).agrees
    assert modelexport.verify_stages(results["Split"], file).agrees
    assert modelexport.verify_package(results["model"], inputs, results["PackageResult"]).agrees
    with pytest.raises(modelexport.ModelExportError, match="is a folder: give verify_package"):
        modelexport.verify(results["model"], inputs, results["Split"])
    with pytest.raises(modelexport.ModelExportError, match="consists of stages: give compare"):
        modelexport.verify_package(results["model"], inputs, results["Split"])


def test_a_result_opens_its_file_in_onnx_runtime(results: dict[str, Any]) -> None:
    x = np.ones((2, 4), np.float32)
    for one in (results["ExportResult"], results["TaggedModel"]):
        (found,) = one.session().run(None, {"x": x})
        assert found.shape == (2, 4)


def test_stages_are_told_and_logged_under_one_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    with caplog.at_level(logging.INFO, "modelexport"):
        modelexport.export(nn.ReLU(), (torch.ones(2),), tmp_path / "x.onnx", progress=told.append)
    assert [*dict.fromkeys(told)][:2] == ["prepare", "capture"]
    logged = [record.message for record in caplog.records if record.name == "modelexport"]
    assert {"capture", "optimize", "write", "check"} <= set(logged)


def test_a_result_says_what_was_proven(results: dict[str, Any]) -> None:
    assert "61 calls, 40 nodes (40 exact), check passed, verified: agree" in repr(results["ExportResult"])
    assert "agree; 1 output within" in repr(results["VerifyReport"])
    assert "61 agree" in repr(results["VerifyReport"])
    assert repr(results["Split"]).endswith("stages: 2)")
    assert repr(results["StagesReport"]) == "StagesReport(outputs: 1, agrees=True)"


def test_a_table_begins_with_what_differs() -> None:
    statuses: list[Any] = [*["agree"] * 60, "tie", "not compared", "differ"]
    calls = [CallVerdict(address=f"c{number}", tag="/C", status=status) for number, status in enumerate(statuses)]
    shown = VerifyReport(outputs=[], calls=calls, provider="", parameters=None)._repr_html_()
    places = [shown.find(f">{status}<") for status in ("differ", "not compared", "tie", "agree")]
    assert -1 not in places
    assert places == sorted(places)


def test_help_shows_every_option_of_an_export() -> None:
    shown = set(inspect.signature(modelexport.export_package).parameters)
    groups = vars(Options()).values()
    assert {field.name for group in groups for field in dataclasses.fields(group)} - shown == {
        "interface", "source", "sizes"
    }, "only these are for Python alone"  # fmt: skip
    text = pydoc.render_doc(modelexport.export, renderer=pydoc.plaintext)
    assert "sizes: bool = False" in text
    assert "dynamic: bool | None = None" in text
    assert "dynamic: Make every axis dynamic" in text
    assert "check: ``False``: do not run the file" in text
    assert "separate_prefill" not in text
    assert "\n    Raises:" in text
