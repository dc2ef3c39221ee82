"""What is used of private names does what it is used for, and what is missing is not used."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript import FLOAT
from packaging.requirements import Requirement
from torch import nn

from modelexport import export
from modelexport.capture import patches
from modelexport.capture.front_ends import capture
from modelexport.capture.patches import TABLE, private, problem, replaced, turned_off, usable
from modelexport.capture.repairs.recurrent import steps_open
from modelexport.capture.repairs.untraceable import Rewritten, reading_no_values
from modelexport.capture.transformers_exporter import asked_once, of_imported_models
from modelexport.errors import CaptureError, VersionWarning
from truth import wrong

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
OPTIONAL = [name for name, row in TABLE.items() if not row.required]


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """What was found out about the names, and said, is that of one test."""
    yield
    problem.cache_clear()
    patches.tested.cache_clear()
    patches.warned.clear()


def missing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let torch lack some of the names."""
    for name in names:
        monkeypatch.setitem(TABLE, name, dataclasses.replace(TABLE[name], where="torch:not_there"))
    problem.cache_clear()


def test_the_names_are_there_with_their_parameters() -> None:
    assert {name: problem(name) for name in TABLE if problem(name)} == {}


def test_private_names_of_torch_are_in_the_table_or_in_one_file() -> None:
    """Strings are those of the table, and ``torch._check`` is documented."""
    source = ROOT / "src/modelexport"
    used = re.compile(r"from torch\S*\._|(?<![\w.\"`])torch\.(?!ops\.|_check\b)[\w.]*\b_[a-zA-Z]\w*")
    found = {(path, name) for path in source.rglob("*.py") for name in used.findall(path.read_text())}
    assert {path.relative_to(source).as_posix() for path, _ in found} == {"pytorch/private_torch.py"}, found


def test_torch_leaves_the_signature_of_a_translation_at_its_function() -> None:
    def translation(x: FLOAT) -> FLOAT:
        return x

    entry = patches.owner_and_attribute(TABLE["signatures"].where)[0](translation, aten.erf.default, None)
    assert translation._pt_onnx_signature is entry.signature


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.layers(x)
        return y + torch.tensor(1.0)


INPUTS = {"x": torch.ones(2, 4)}


def test_without_any_name_that_is_not_required_models_are_exported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing(monkeypatch, *OPTIONAL)
    model = Model().eval()
    for frontend in ("dynamo", "torchscript"):
        with warnings.catch_warnings(record=True) as said:
            export(model, INPUTS, tmp_path / "m.onnx", frontend=frontend, check=False)
        assert wrong(tmp_path / "m.onnx", model, INPUTS) == ""
        texts = [str(one.message) for one in said if one.category is VersionWarning]
        # Once for each thing that is lost, and nothing in the second export.
        losses = {TABLE[name].lost for name in OPTIONAL}
        assert {text.partition("is missing: ")[2] for text in texts} == (losses if frontend == "dynamo" else set())
        assert len(texts) == len(set(texts))


def test_a_function_with_other_parameters_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = patches.owner_and_attribute(TABLE["operators"].where)
    find = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda more=None: find())
    problem.cache_clear()
    assert problem("operators") == "takes (more)"
    changed = getattr(owner, name)
    with replaced({"operators": lambda before: None}):
        assert getattr(owner, name) is changed
    with pytest.warns(VersionWarning, match=rf"{name} takes \(more\): exports take longer"):
        capture(Model().eval(), INPUTS, "dynamo")


def test_parameters_may_be_added_where_the_table_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "export", dataclasses.replace(TABLE["export"], takes="mod args ..."))
    problem.cache_clear()
    assert problem("export") == ""
    monkeypatch.setitem(TABLE, "export", dataclasses.replace(TABLE["export"], takes="mod kwargs ..."))
    problem.cache_clear()
    assert problem("export").startswith("takes (mod, args, ")


@pytest.mark.sweep
@pytest.mark.parametrize(("frontend", "name"), [(row.use, name) for name, row in TABLE.items() if row.required])
def test_a_front_end_whose_files_would_be_wrong_is_refused(
    frontend: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(monkeypatch, name)
    with pytest.raises(CaptureError, match=r"is missing in torch .*; without it, .*; install torch") as caught:
        capture(Model().eval(), INPUTS, frontend)
    assert "\n" not in str(caught.value)
    assert capture(Model().eval(), INPUTS, "dynamo" if frontend == "torchscript" else "torchscript")


def test_replaced_names_are_put_back() -> None:
    before = {name: private(name) for name in TABLE}
    with pytest.raises(ZeroDivisionError), replaced({name: lambda _: None for name in TABLE}):
        assert all(private(name) is None for name in TABLE if name not in ("kernels", "cached kernels"))
        raise ZeroDivisionError
    assert all(private(name) is what or private(name) == what for name, what in before.items())


def test_names_are_turned_off_by_name_and_by_use() -> None:
    with turned_off("print"):
        assert not usable("print")
        with turned_off("once"):
            assert not usable("memory")
            assert not usable("print")
        assert usable("memory")
    assert usable("print", "memory")


def test_a_version_outside_the_tested_range_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["torch<2.0; extra == 'tested'", "typer", "onnx; extra == 'check'"]
    )
    patches.tested.cache_clear()
    with pytest.warns(VersionWarning, match=r"torch .* is outside the range that is tested, <2.0") as said:
        patches.warn_of_versions()
        patches.warn_of_versions()
    assert len(said) == 1


def test_the_tested_range_has_the_versions_that_are_pinned_and_no_others_are_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["torch"], *extras["transformers"]]
    required = {one.name: one.specifier for one in map(Requirement, asked)}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for one in map(Requirement, project["optional-dependencies"]["tested"]):
        assert one.specifier.contains(pinned[one.name])
        assert str(required[one.name]) in str(one.specifier)


def test_complex_tensors_compute_in_two_parts() -> None:
    a, b = torch.tensor([1 + 2j, -1j]), torch.tensor([3 - 1j, 2.0])
    one, other = (private("complex tensors")(z.real.clone(), z.imag.clone()) for z in (a, b))
    product = private("complex operators")[aten.mul](one, other)
    assert torch.equal(torch.complex(product.re, product.im), a * b)


def test_the_registry_says_which_operators_have_translations_of_complex_numbers() -> None:
    translations = [one for known in private("registry")().functions.values() for one in known]
    assert {one.is_complex for one in translations if one.fx_target is aten.abs.default} == {True, False}
    assert {one.is_complex for one in translations if one.fx_target is aten.erf.default} == {False}


def test_decompositions_are_in_one_table() -> None:
    assert {aten.lstm.input, aten.gru.input, aten.diagonal_scatter.default} <= private("definitions").keys()


def test_the_kernels_of_recurrent_layers_are_replaced_and_put_back() -> None:
    layer, x = nn.GRU(4, 3).eval(), torch.ones(5, 2, 4)
    before, table = dict(aten.gru.input.py_kernels), dict(private("definitions"))
    with torch.no_grad(), steps_open():
        assert aten.gru.input.py_kernels != before
    assert (aten.gru.input.py_kernels, private("definitions")) == (before, table)
    with torch.no_grad():
        assert layer(x)[0].any()


def test_regions_are_operators_that_call_their_graphs() -> None:
    x = torch.ones(2)
    assert torch.equal(
        private("gradients")(torch.ops.higher_order.wrap_with_set_grad_enabled, True, torch.sin, x), x.sin()
    )
    operator = torch.ops.higher_order.wrap_with_autocast
    assert torch.equal(private("autocast")(operator, "cpu", None, False, None, torch.sin, x), x.sin())


def test_functions_are_replaced_only_while_a_model_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    intercepted = []

    def noted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        intercepted.append(func)
        return func(*args, **(kwargs or {}))

    monkeypatch.setattr(Rewritten, "__torch_function__", noted)
    with replaced({"export": reading_no_values}):
        torch.ones(2).add(1)
        assert intercepted == []
        torch.export.export(Model().eval(), (torch.ones(2, 4),))
        assert torch.nn.functional.linear in intercepted
        intercepted.clear()
        torch.ones(2).add(1)
    assert intercepted == []


def test_lazy_graphs_become_code_when_they_run_and_strict_ones_at_once() -> None:
    kinds = []

    def capture_lazily(mod: nn.Module, **options: Any) -> None:
        kinds.append(private("lazy graphs"))

    with replaced({"lazy graphs": lambda _: True, "export": lambda _: reading_no_values(capture_lazily)}):
        torch.export.export(nn.ReLU())
        torch.export.export(nn.ReLU(), strict=True)
        module = torch.fx.symbolic_trace(nn.ReLU())
    assert kinds == [True, False]
    assert type(module) is not torch.fx.symbolic_trace(nn.ReLU()).__class__
    assert module(torch.tensor(-1.0)) == 0


BROKEN = """
def __getattr__(name):
    raise (AttributeError if name[:2] == "__" else RuntimeError)("operator torchvision::nms does not exist")
"""


@pytest.mark.slow  # an export in a process
def test_transformers_that_cannot_be_imported_does_not_stop_other_models(tmp_path: Path) -> None:
    """As with a torchvision that does not fit torch: its names are read when they are used, and raise then."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(BROKEN)
    (tmp_path / "transformers" / "exporters.py").write_text("raise RuntimeError('torchvision does not fit')\n")
    lines = (
        "import transformers, torch, modelexport",
        "given = torch.nn.Linear(4, 4).eval(), (torch.ones(2, 4),), 'm.onnx'",
        "assert modelexport.export(*given, dynamic=True, verify=True).verified.agrees",
        "assert modelexport.verify(*given).agrees",
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "\n".join(lines)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_modules_of_other_models_are_not_imported_to_be_changed() -> None:
    module = "transformers.models.yoso.modeling_yoso"
    imported_already = module in sys.modules
    with replaced({"changed models": of_imported_models}):
        assert (private("changed models")(module, missing_ok=True) is None) != imported_already
        assert (module in sys.modules) == imported_already
        assert private("changed models")("torch.Tensor", missing_ok=True) is torch.Tensor
    assert private("changed models")(module, missing_ok=True) is sys.modules[module]


def test_a_tensor_is_asked_again_whether_it_is_contiguous_when_its_strides_changed() -> None:
    asked: list[torch.Tensor] = []
    with replaced({"contiguity": lambda ask: asked_once(lambda x: asked.append(x) or ask(x))}):
        is_contiguous, x = private("contiguity"), torch.ones(2, 3)
        assert [is_contiguous(x), is_contiguous(x), len(asked)] == [True, True, 1]
        x.t_()
        assert [is_contiguous(x), is_contiguous(torch.ones(2, 3)), len(asked)] == [False, True, 3]
