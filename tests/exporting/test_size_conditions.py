"""What Python decides by a size holds for sizes on one side of the decision only, and the file says for which."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

from modelexport import cost, export, profile, verify
from modelexport.capture.front_end_options import FrontEndOptions
from modelexport.capture.front_ends import capture
from modelexport.cli.show_export import format_export
from modelexport.errors import CheckError, RunError, UsageError
from modelexport.exporting.requested_names import RequestedNames
from modelexport.exporting.size_decisions import SizeTrials
from modelexport.graph.copies import value_like
from modelexport.graph.size_conditions import (
    SizeCondition,
    broken,
    fitting,
    limits_of,
    renamed,
    simplified,
    sizes_against,
)
from modelexport.graph.size_formulas import evaluated_size, symbols_in, symbols_of
from modelexport.graph.size_symbols import put_size, rename_sizes
from modelexport.pytorch.inputs.other_sizes import symbol_sizes, with_sizes, within_conditions, without_parts
from modelexport.runtime.random_inputs import make_random_inputs
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tagged.file import read_tagged
from modelexport.verify.model_and_file import ModelAndFile, ModelRuns


class Decides(nn.Module):
    """Decides by a threshold, as window attention does, by two inputs, and by nothing that matters."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n, h, m = x.shape[1], x.shape[2], y.shape[1]
        x = x * (2.0 if n >= 24 else 1.0)
        if h % 4:
            x = functional.pad(x, (0, 4 - h % 4)) + 1
        if h % 2:  # follows from the other
            x = x + 1
        if n > m:
            x = x + 1
        if m % 2 == 0:  # both sides compute the same
            y = y + 0
        return x.sum((1, 2)) + y.sum(1)


INPUTS = {"x": torch.rand(2, 9, 8), "y": torch.rand(2, 6)}


@pytest.fixture(scope="module", params=["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
def exported(request: Any, tmp_path_factory: Any) -> Any:
    path = tmp_path_factory.mktemp("sizes") / "x.onnx"
    return export(Decides().eval(), INPUTS, path, frontend=request.param, dynamic=True)


def test_a_file_states_the_conditions_of_its_sizes_and_only_those_that_matter(exported: Any) -> None:
    file = read_tagged(exported.path)
    (_, n, h), (_, m) = ([str(size) for size in value.shape or ()] for value in file.model.graph.inputs)
    formulas = [f"{n} < 24", f"{h} % 4 == 0", f"{n} > {m}"]
    assert [one.formula for one in exported.valid_if] == formulas
    assert json.loads(file.model.metadata_props["modelexport.valid_if"]) == formulas
    line = exported.valid_if[0].where
    assert line.startswith("test_size_conditions.py:")
    assert exported.valid_if[0].source == "x = x * (2.0 if n >= 24 else 1.0)"
    assert file.hierarchy is not None
    assert file.hierarchy.settings.valid_if == exported.valid_if
    assert f"| `{n} < 24` | {line} |" in exported.path.with_suffix(".report.md").read_text()
    assert f"valid for {n} < 24, {h} % 4 == 0, {n} > {m}" in format_export(exported)
    assert not exported.fixed


def test_verify_tries_sizes_for_which_the_conditions_hold_up_to_their_limits(exported: Any) -> None:
    report = verify(Decides().eval(), INPUTS, exported.path)
    assert report.agrees
    assert any("23" in one.what for one in report.others)


def test_what_runs_a_file_refuses_or_avoids_sizes_that_it_excludes(exported: Any) -> None:
    file = read_tagged(exported.path)
    n = str((file.model.graph.inputs[0].shape or ())[1])
    feeds = make_random_inputs(file.model, exported.session())
    assert feeds["x"].shape[1] < 24
    run_session(exported.session(), feeds)
    refusal = f"the file is right only for {n} < 24, and {n} is 30"
    with pytest.raises(UsageError, match=refusal):
        run_session(exported.session(), {**feeds, "x": np.zeros((2, 30, 8), np.float32)})
    for run in (cost, profile):
        with pytest.raises(UsageError, match=refusal):
            run(exported.path, sizes={n: 30})
    moved = within_conditions({"x": torch.rand(2, 30, 8), "y": torch.rand(2, 6)}, file.model)
    assert [tensor.shape for tensor in moved.values()] == [(2, 23, 8), (2, 6)]


def test_a_file_that_is_not_run_states_what_the_code_of_the_model_decides(tmp_path: Path) -> None:
    export(Decides().eval(), INPUTS, tmp_path / "x.onnx", frontend="dynamo", dynamic=True, check=False)
    properties = {one.key: one.value for one in onnx.load(tmp_path / "x.onnx").metadata_props}
    assert len(json.loads(properties["modelexport.valid_if"])) == 5


def test_a_named_axis_with_a_condition_is_refused_with_the_line_that_decides(tmp_path: Path) -> None:
    named = RequestedNames(axes={("x", 0): "n"})
    with pytest.raises(
        CheckError, match=r"n was to be dynamic.* n <= 3 \(test_size_conditions.py:\d+ .*`return 2 \* x if"
    ):
        export(
            DoublesMany(), (torch.ones(2, 8),), tmp_path / "x.onnx", frontend="dynamo", dynamic=True, interface=named
        )


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(row) for row in x]) / math.cos(x.shape[1])


@pytest.mark.slow
def test_an_axis_that_the_capture_makes_constant_is_told_if_the_model_accepts_other_sizes(tmp_path: Path) -> None:
    result = export(Constant().eval(), {"x": torch.rand(2, 3, 4)}, tmp_path / "x.onnx", dynamic=True)
    assert [(one.input, one.axis, one.size) for one in result.fixed] == [("x", 0, 2), ("x", 1, 3)]
    assert "math.cos(x.shape[1])" in result.fixed[1].reason


@pytest.mark.slow
def test_an_axis_that_the_capture_makes_constant_cannot_be_named(tmp_path: Path) -> None:
    named = RequestedNames(axes={("x", 1): "rows"})
    with pytest.raises(UsageError, match=r"rows: .*fixes it at 3 \(test_size_conditions.py:\d+: .*math.cos"):
        export(Constant().eval(), {"x": torch.rand(2, 3, 4)}, tmp_path / "y.onnx", dynamic=True, interface=named)


class Lookup(nn.Module):
    """Looks a size up: sizes of a capture have no hash, so dynamo interprets the code line by line."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * {8: 2.0, 16: 3.0}.get(x.shape[1], 1.0)


@pytest.mark.slow
def test_the_line_is_that_of_the_model_if_its_code_is_interpreted(tmp_path: Path) -> None:
    (fixed,) = export(Lookup().eval(), {"x": torch.rand(2, 8)}, tmp_path / "x.onnx", dynamic=True).fixed
    assert (fixed.input, fixed.axis, fixed.size) == ("x", 1, 8)
    assert ".get(x.shape[1], 1.0)" in fixed.reason


class Root(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / math.cos(x.shape[1]), y * 2


@pytest.mark.slow
def test_no_named_axis_becomes_constant(tmp_path: Path) -> None:
    named = RequestedNames(leading=["batch", "rows"])
    with pytest.raises(CheckError, match=r"rows \(axis 1 of x\): it is a constant of the file: test_size_con"):
        inputs = {"x": torch.rand(2, 3, 4), "y": torch.rand(2, 5)}
        export(Root().eval(), inputs, tmp_path / "y.onnx", dynamic=True, interface=named)


@pytest.mark.parametrize("frontend", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("decides", "excluded"),
    [
        (lambda n, m: n > 20 and m > 20, (21, 21)),
        pytest.param(lambda n, m: n == 33 and m == 2, (33, 2), marks=pytest.mark.slow),
        pytest.param(lambda n, m: min(n, m) > 20, (21, 21), marks=pytest.mark.slow),
        pytest.param(lambda n, m: n > 20 and m > 20 and n * m > 1000, (21, 60), marks=pytest.mark.slow),
    ],
)
def test_sizes_at_which_several_comparisons_together_decide_are_excluded(
    decides: Any, excluded: tuple[int, int], frontend: Any, tmp_path: Path
) -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2.0 if decides(x.shape[0], x.shape[1]) else 1.0)

    result = export(Both(), (torch.rand(2, 5, 4),), tmp_path / "x.onnx", frontend=frontend, dynamic=True)
    (shape,) = [value.shape for value in read_tagged(result.path).model.graph.inputs]
    sizes = {str(size): number for size, number in zip(shape or (), excluded, strict=False)}
    assert broken([SizeCondition(one.formula) for one in result.valid_if], sizes)


@pytest.mark.parametrize("rounds", [math.ceil, pytest.param(math.floor, marks=pytest.mark.slow)])
def test_a_number_that_a_trace_rounds_from_a_size_is_a_condition_beyond_the_sizes_tried(
    rounds: Any, tmp_path: Path
) -> None:
    class Rounds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * rounds(x.shape[1] / 30 + 1)

    result = export(Rounds(), (torch.rand(2, 5),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert [one.formula.split(" ", 1)[1] for one in result.valid_if] == [f"<= {30 if rounds is math.ceil else 29}"]


def test_the_sum_of_what_was_decided_by_tensors_of_sizes_is_found_in_a_trace(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if torch.arange(x.shape[1]).max() > 5 else x

    result = export(Counts().eval(), (torch.rand(2, 8),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert [one.formula for one in result.valid_if] == ["x_axis_1 >= 7"]


def test_sizes_of_which_onnx_runtime_has_another_mean_of_nothing_are_excluded(tmp_path: Path) -> None:
    class Later(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[2:].mean(0)

    result = export(Later(), (torch.rand(5, 4),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert [one.formula for one in result.valid_if] == ["x_axis_0 >= 3"]


@pytest.mark.slow
def test_an_axis_is_fixed_if_the_file_is_wrong_with_a_size_that_its_conditions_allow(tmp_path: Path) -> None:
    class InFours(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([part.sum(1) for part in x.split(4, 1)])  # the trace has the lengths 4 and 4

    result = export(InFours().eval(), (torch.rand(2, 8),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert [(one.axis, one.size) for one in result.fixed] == [(1, 8)]
    assert "Split" in result.fixed[0].reason


class DoublesMany(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.shape[0] > 3 else x + 1


@pytest.mark.slow
@pytest.mark.parametrize("example", [torch.ones(2, 8), torch.ones(2, 8, dtype=torch.int64)])
def test_a_condition_is_kept_if_the_numbers_of_the_example_do_not_show_it(
    example: torch.Tensor, tmp_path: Path
) -> None:
    result = export(DoublesMany(), (example,), tmp_path / "x.onnx", dynamic=True)
    assert [condition.formula for condition in result.valid_if] == ["x_axis_0 <= 3"]


@pytest.mark.slow
def test_a_condition_is_kept_if_only_the_shapes_of_the_outputs_show_it(tmp_path: Path) -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (int(x.shape[1] ** 0.5), -1))

    result = export(Square().eval(), (torch.rand(2, 9),), tmp_path / "x.onnx", frontend="dynamo", dynamic=True)
    assert [condition.formula for condition in result.valid_if] == ["9 <= x_axis_1 <= 15"]


@pytest.mark.parametrize(
    ("formula", "simple"),
    [
        ("(n % 2) <= 0", "n % 2 == 0"),
        ("((4 + (-1)*(n % 4)) % 4) == 0", "n % 4 == 0"),
        ("(2*(n // 2)) == n", "n % 2 == 0"),
        ("((3 + n) // 4) == 2", "5 <= n <= 8"),
        ("2*n < 20000", "n <= 9999"),
        ("(-4) + n >= 0", "n >= 4"),
        ("2 <= n", "n > 1"),
        ("max(n, 20) == 20", "n <= 20"),
        ("n % 3 != 1 or n < 0", "n % 3 != 1"),
        ("n != 8 and not n == 8", "n != 8"),
        ("n**0.5 > 3.0", "n >= 10"),
        ("2**n > 1000", "n >= 10"),
        ("(n // 2) <= n", None),
        ("(a + n) <= n + a", None),
        ("n*a <= 100", "n * a <= 100"),
    ],
)
def test_a_formula_gets_its_simplest_form(formula: str, simple: str | None) -> None:
    assert [one.formula for one in simplified([SizeCondition(formula)])] == ([simple] if simple else [])


def test_a_formula_is_not_executed() -> None:
    for formula in ("__import__('os').abort()", "n.__class__", "n <", "(" * 999, "(1 << n) < 9"):
        assert SizeCondition(formula).holds({"n": 9}) is True


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2 * n + 1", 11),
        ("Max(1, (n - 1) // 2)", 2),
        ("ceiling(n / 2)", 3),
        ("n**2", 25),
        ("(((n**9)**9)**9)**9", None),
        ("n % 0", None),
        ("n - 6", None),
        ("n/n", 1),
        ("n < 6", None),
        ("m", None),
        ("True", None),
    ],
)
def test_a_size_is_the_number_of_its_formula(text: str, size: int | None) -> None:
    assert evaluated_size(text, {"n": 5}) == size


def test_a_size_is_computed_without_rounding() -> None:
    assert evaluated_size("floor(n/3 - 1/3) + 1", {"n": 13}) == 5


@pytest.mark.parametrize("name", ["x and y", "not x", "a < b", "batch-size", "q-len", "x-axis", "min", "enc/fc_dim_0"])
def test_the_name_of_an_axis_is_not_taken_for_a_formula(name: str) -> None:
    assert symbols_in(name, ["len", "size", "x", "b"]) == [name]
    assert put_size(name, {"len": "3", "size": "4", "axis": "5", "fc_dim_0": "6"}) == name


@pytest.mark.parametrize("formula", ["(h-k)//2 + 1", "2*h-k", "h - k"])
def test_a_formula_without_spaces_is_not_taken_for_a_name(formula: str) -> None:
    assert sorted(symbols_in(formula)) == ["h", "k"]


@pytest.mark.parametrize("formula", ["h-k", "h/k", "total_length-past_length"])
def test_words_with_a_hyphen_or_a_slash_are_a_formula_if_each_is_the_size_of_an_axis(formula: str) -> None:
    names = re.findall(r"\w+", formula)
    assert symbols_in(formula, names) == names
    assert symbols_in(formula, names[:1]) == [formula]
    assert evaluated_size(formula, dict(zip(names, (12, 4), strict=True))) == (3 if "/" in formula else 8)


@pytest.mark.parametrize("declared", [["q", "len", "q-len"], ["q + len", "q-len"], ["q-len", "2*len", "q"]])
def test_a_difference_follows_the_size_of_one_of_its_axes(declared: list[str]) -> None:
    graph = ir.Graph([ir.val("x", ir.DataType.FLOAT, declared)], [], nodes=[], opset_imports={"": 18})
    model = ir.Model(graph, ir_version=10)
    assert {*symbols_of(declared)} == {"q", "len"}
    rename_sizes(model, {"q": "20"})
    assert [str(size) for size in graph.inputs[0].shape or ()] == [text.replace("q", "20") for text in declared]


@pytest.mark.parametrize("size", ["t-p", "t - p", "t // 16", "Max(0, t - p)"])
def test_random_inputs_are_not_empty_where_a_size_is_computed_of_others(size: str) -> None:
    shapes = {"ids": ["b", size], "mask": ["b", "t"], "past": ["b", 4, "p", 2]}
    inputs = [ir.val(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items()]
    nodes = [ir.Node("", "Abs", [value], outputs=[value_like(value, f"{value.name}_out")]) for value in inputs]
    graph = ir.Graph(inputs, [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 18}, name="g")
    model = ir.Model(graph, ir_version=10)
    feeds = make_random_inputs(model, open_session(model))
    sizes = {"t": feeds["mask"].shape[1], "p": feeds["past"].shape[2]}
    assert feeds["ids"].shape[1] == evaluated_size(size, sizes) == 1


def test_a_condition_that_does_not_hold_has_no_last_size_on_this_side() -> None:
    sizes = {"n": 2, "m": 2}
    assert all(other != sizes for other in limits_of([SizeCondition("n != m")], sizes))


def test_a_size_that_is_not_a_number_stays_text() -> None:
    assert put_size("n % 0", {"n": "5"}) == "5 % 0"


def test_sizes_on_both_sides_of_conditions() -> None:
    below, fourth = SizeCondition("n < 24"), SizeCondition("n % 4 == 0")
    assert next(sizes_against(below, {"n": 8, "m": 3})) == {"n": 24, "m": 3}
    assert fitting([below, fourth], {"n": 30, "m": 3}, ["n"]) == {"n": 20, "m": 3}
    assert fitting([SizeCondition("n == m")], {"n": 9, "m": 8}, ["m"]) == {"n": 9, "m": 9}
    assert fitting([SizeCondition("n < 1")], {"n": 9}, ["n"]) is None
    assert [one.formula for one in renamed([SizeCondition("a*b < 9"), below], {"a": "n", "b": "4", "n": "3"})] == [
        "n <= 2"
    ]


@pytest.mark.slow
def test_rotary_embeddings_that_scale_with_the_length_are_right_beyond_their_limit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    options = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 12, "rope_parameters": rope}

    def fresh() -> nn.Module:
        return Rotated(LlamaRotaryEmbedding(transformers.LlamaConfig(**options))).eval()

    result = export(fresh(), of_length(8), tmp_path / "x.onnx", frontend="dynamo", dynamic=True)
    assert not result.valid_if
    for length in (12, 13, 40):
        made = run_session(result.session(), {name: one.numpy() for name, one in of_length(length).items()})
        assert np.allclose(fresh()(**of_length(length)).numpy(), *made.values(), atol=1e-5)


class Rotated(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.rotary(x, position_ids)
        return cosine + 2 * sine + x[..., :8]


def of_length(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(1, length, 16), "position_ids": torch.arange(length)[None]}


def test_outputs_of_a_trace_declare_no_size_of_the_example(tmp_path: Path) -> None:
    class Pads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.pad(x, (0, (4 - x.shape[1] % 4) % 4)).unflatten(1, (-1, 4))

    export(Pads(), (torch.rand(2, 8),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    (output,) = onnx.load(tmp_path / "x.onnx").graph.output
    assert [size.dim_value for size in output.type.tensor_type.shape.dim] == [0, 0, 0]


def test_sizes_that_a_model_refuses_only_where_calls_are_compared_are_not_compared(exported: Any) -> None:
    def refuses(*arguments: Any) -> Any:
        raise RuntimeError("Expected i < index_size to be true")

    tagged = read_tagged(exported.path)
    sides: Any = SimpleNamespace(
        runs=ModelRuns(Decides()),
        tagged=tagged,
        returned=lambda inputs: [],
        agrees=lambda *arguments: False,
        compared=refuses,
    )
    sides.settled = lambda inputs: sides
    sizes = symbol_sizes(INPUTS, tagged.model)
    tried = SizeTrials(sides, INPUTS).run(sizes)
    assert tried is not None
    assert tried.status == "not compared"
    sides.compared = lambda *arguments: (sides, compared)
    compared = SimpleNamespace(failed=None, unknown=None, located=SimpleNamespace(pairs=()))
    tried = SizeTrials(sides, INPUTS).run(sizes)
    assert tried is not None
    assert tried.status == "agree"


def test_a_size_that_onnx_runtime_does_not_run_is_excluded_for_that_reason(exported: Any, monkeypatch: Any) -> None:
    def refuses(*arguments: Any) -> Any:
        raise RunError("ONNX Runtime cannot run the model: it has no rows")

    monkeypatch.setattr(ModelAndFile, "as_run", refuses)
    sides = ModelAndFile.of(ModelRuns(Decides()), INPUTS, read_tagged(exported.path))
    reason = sides.fault_beside_nan(INPUTS, [np.array([math.nan])])
    assert reason == "PyTorch returns NaN, and ONNX Runtime cannot run the model: it has no rows"


def test_a_model_runs_once_with_sizes_that_it_refuses(exported: Any) -> None:
    class Refuses(nn.Module):
        runs = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            Refuses.runs += 1
            raise RuntimeError("other sizes")

    tagged = read_tagged(exported.path)
    sides = ModelAndFile.of(ModelRuns(Refuses()), INPUTS, tagged)
    tried = SizeTrials(sides, INPUTS).run(symbol_sizes(INPUTS, tagged.model))
    assert tried is not None
    assert tried.status == "not compared"
    assert Refuses.runs == 1


class Shortens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.shape[0] * 0.75)]


@pytest.mark.slow
def test_a_product_with_a_fraction_that_is_rounded_fixes_the_axis_of_a_trace(tmp_path: Path) -> None:
    result = export(Shortens(), (torch.rand(8),), tmp_path / "x.onnx", frontend="torchscript", dynamic=True)
    assert [(axis.input, axis.axis) for axis in result.fixed] == [("x", 0)]


@pytest.mark.slow
def test_a_product_with_a_fraction_that_is_rounded_is_a_condition(tmp_path: Path) -> None:
    result = export(Shortens(), (torch.rand(8),), tmp_path / "x.onnx", frontend="dynamo", dynamic=True)
    (symbol,) = onnx.load(tmp_path / "x.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [one.formula for one in result.valid_if] == [f"8 <= {symbol.dim_param} <= 9"]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode="sum", include_last_offset=True)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> Any:
        return self.bag(ids, offsets)


def test_offsets_stay_within_what_they_point_into(tmp_path: Path) -> None:
    inputs = {"ids": torch.arange(40) % 37, "offsets": torch.tensor([0, 5, 11, 20, 28, 40])}
    result = export(Bag(), inputs, tmp_path / "m.onnx", dynamic=True, documents=False)
    assert result.check.status == "passed"
    model = read_tagged(tmp_path / "m.onnx").model
    ids, offsets = symbol_sizes(inputs, model)
    tried = [with_sizes(inputs, model, {ids: 8, offsets: 6}), with_sizes(inputs, model, {ids: 45, offsets: 8})]
    assert [other["offsets"].tolist() for other in tried] == [[0, 5, 8, 8, 8, 8], [0, 5, 11, 20, 28, 40, 40, 40]]
    assert without_parts(inputs, with_sizes(inputs, model, {ids: 40, offsets: 1}))


class Decided(nn.Module):
    """Decides by the number of steps behind a function of a recurrent layer and the input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.recurrent = function, nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.function(self.recurrent, x)
        return x * (2.0 if x.shape[1] < 1000 else 1.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda recurrent, x: recurrent(x)[0],
        lambda _, x: functional.interpolate(x, scale_factor=2.0, mode="linear"),
        lambda _, x: functional.pad(x, (0, 0, 2, 2)),
    ],
    ids=["recurrent", "interpolate", "pad"],
)
def test_a_trace_records_comparisons_behind_functions_that_take_numbers_for_sizes(function: Any) -> None:
    captured = capture(Decided(function), (torch.rand(2, 8, 4),), "torchscript", FrontEndOptions(dynamic=True))
    assert any(re.search("1000|499|99[56]", condition.formula) for condition in captured.conditions)


class Follows(nn.Module):
    """Compares a size with a number after a comparison with 6."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0 if x.shape[1] > 6 else x
        return x * (2.0 if x.shape[1] > self.number else 1.0)


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
@pytest.mark.parametrize(("number", "recorded"), [(4, True), (1, False)])
def test_an_answer_is_recorded_that_follows_from_an_earlier_one_but_not_from_sizes_above_1(
    frontend: Any, number: int, recorded: bool
) -> None:
    captured = capture(Follows(number), (torch.rand(2, 9),), frontend, FrontEndOptions(dynamic=True))
    assert any(f"> {number}" in condition.formula for condition in captured.conditions) == recorded


class FixedInBfloat16(nn.Module):
    """Makes a constant of a size; ONNX Runtime has no kernel for its product in bfloat16 on a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[: int(x.shape[0] * 0.5) + 1]


@pytest.mark.parametrize("frontend", ["dynamo", "torchscript"])
def test_sizes_are_tried_where_only_other_processors_run_the_file(frontend: Any, tmp_path: Path) -> None:
    model, inputs = FixedInBfloat16().bfloat16().eval(), (torch.randn(4, 8, dtype=torch.bfloat16),)
    result = export(model, inputs, tmp_path / "m.onnx", frontend=frontend, dynamic=True)
    assert result.tried_other_sizes
    assert "no other sizes were tried" not in " ".join(result.limits)
    assert verify(model, inputs, tmp_path / "m.onnx").verdict == "agree"
