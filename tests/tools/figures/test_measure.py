"""Figures by module: they add up exactly, and agree with PyTorch's counter and with ONNX Runtime's arena."""

from __future__ import annotations

import csv
import json
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import modelexport
import models
from commands import run
from exports import Exporter
from graph_texts import written
from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.selectors import select_calls
from modelexport.core.text import printable
from modelexport.errors import UsageError
from modelexport.pytorch.calls.module_tree_of_model import module_tree
from modelexport.pytorch.nested_tensors import run_arguments
from modelexport.runtime.shapes import find_shapes
from modelexport.tables.columns import Column, Kind
from modelexport.tables.costs import constant_values, cost
from modelexport.tables.model_explorer import node_data_document
from modelexport.tables.operator_costs import COMPOSITES, ELEMENTWISE, REDUCTIONS, WITHOUT_ARITHMETIC
from modelexport.tables.table import NodeFigures, Table, share_out
from modelexport.tagged.file import read_tagged
from modelexport.terminal.printing import rendered
from modelexport.terminal.show_table import Screen, format_csv, format_table
from modelexport.tools.optimizers.optimize_tools import optimize_file

COUNTED = (
    "blocks", "bert", "albert", "gpt2-cache", "llama", "t5", "whisper", "vit", "resnet", "unet", "residual-network",
    "tied-weights", "nested-structures",
)  # fmt: skip
"""Models without recurrences or bilinear forms, which PyTorch's counter leaves out, without experts, whose sizes depend
on the data, and without modules that it names differently."""


def small_table() -> Table:
    """A root with two blocks, a node that both own, and one that belongs to no call."""
    root, a, b, inner = ModuleCall(""), ModuleCall("a"), ModuleCall("a", 1), ModuleCall("b.inner")
    other = ModuleCall("b")
    calls = CallTree(
        (
            TracedCall(root, None, 0, 0, 9),
            TracedCall(a, root, 1, 1, 2),
            TracedCall(other, root, 1, 3, 6),
            TracedCall(inner, other, 2, 4, 5),
            TracedCall(b, root, 1, 7, 8),
        )
    )
    tags = {root: "/Net", a: "/Net/Block", b: "/Net/Block@1", other: "/Net/Other", inner: "/Net/Other/Block"}
    nodes = (
        NodeFigures("n0", "Add", (root,), {"work": 10, "most": 5}, (1, 2, 3)),
        NodeFigures("n1", "Mul", (a, inner, b), {"work": 100, "most": 7}, (30, 30, 60)),
        NodeFigures("n2", "Mul", (other,), {"work": 1, "most": 9}, (4, 4, 4)),
        NodeFigures("copy", "MemcpyToHost", (), {"work": 3}, (9, 9, 9)),
    )
    columns = (
        Column("work", "steps"),
        Column("most", "bytes", Kind.LARGEST),
        Column("part", "of all", Kind.RATIO, of=("work", "work"), share=True),
        Column("range", "steps", Kind.SPREAD, of=("work", "")),
    )
    return Table(calls, tags, columns, nodes)


def test_shares_and_bars_are_of_totals_or_of_own_figures_if_sorted_by_these() -> None:
    def cells(name: str, **options: Any) -> list[str]:
        lines = format_table(small_table(), "work", **options).splitlines()
        assert ("PART OWN" in lines[0]) == bool(options)
        return next(line.split() for line in lines if line.split()[0] == name)

    assert cells("Net") == ["Net", "111", "███████████▋", "10", "9", "0.974", "16"]
    assert cells(".", sort="work") == [".", "10", "█", "111", "9", "0.0877", "16"]


def test_what_a_table_is_sorted_by_is_its_first_column_and_has_the_bars() -> None:
    def lines(sort: str) -> tuple[str, list[str]]:
        header, *rows = format_table(small_table(), "work", sort=sort).splitlines()
        return " ".join(header.split()[:5]), [" ".join(row.split()[:2]) for row in rows[:3]]

    assert lines("work") == lines("own.work") == ("MODULE WORK OWN WORK TOTAL", ["a 34", "b.inner 33", "a@1 33"])
    assert lines("total.work") == ("MODULE WORK TOTAL WORK OWN", [". 111", "a 34", "b 34"])
    assert lines("most") == ("MODULE MOST OWN MOST TOTAL", ["b 9", "a 7", "b.inner 7"])


def test_a_node_with_several_owners_is_shared_out_without_remainder() -> None:
    assert share_out(100, 3) == [34, 33, 33]
    assert share_out(2, 3) == [1, 1, 0]
    rows = {row.address: row for row in small_table().rows()}
    assert [rows[call].own["work"] for call in ("a", "b.inner", "a@1")] == [34, 33, 33]
    assert sum(row.own["work"] for row in rows.values()) == 111
    assert rows["."].total["work"] == 111
    assert small_table().outside["work"] == 3
    assert small_table().whole["work"] == 114


def test_a_total_is_its_own_figures_and_those_inside() -> None:
    rows = {row.address: row for row in small_table().rows()}
    assert (rows["b"].own["work"], rows["b"].total["work"]) == (1, 34)
    assert (rows["."].own["most"], rows["."].total["most"], rows["b"].total["most"]) == (5, 9, 9)
    assert rows["b"].total["part"] == Fraction(34, 114) or rows["b"].total["part"] == 34 / 114


def test_calls_of_a_module_and_modules_of_a_class_are_put_together() -> None:
    modules = {row.address: row for row in small_table().rows("module")}
    assert list(modules) == [".", "a", "b", "b.inner"]
    assert modules["a"].own["work"] == 67
    classes = {row.address: row for row in small_table().rows("class")}
    assert list(classes) == ["class:Net", "class:Block", "class:Other"]
    assert classes["class:Block"].own["work"] == 100
    assert classes["class:Other"].total["work"] == 34


def test_rows_are_sorted_by_what_is_their_own() -> None:
    table = small_table()
    assert [row.address for row in table.sorted(table.rows(), "work")][:2] == ["a", "b.inner"]
    with pytest.raises(UsageError, match="no column 'works'; did you mean work"):
        table.sorted(table.rows(), "works")


def test_the_document_is_as_it_was_agreed() -> None:
    document = small_table().document()
    assert list(document) == ["columns", "rows", "outside"]
    assert document["columns"] == {"work": "steps", "most": "bytes", "part": "of all", "range": "steps"}
    assert document["rows"][0]["address"] == ""
    assert list(document["rows"][0]) == ["address", "tag", "class", "depth", "own", "total"]
    assert document["rows"][1]["own"]["work"] == 34


def test_a_source_adds_a_column_of_figures_of_calls_without_a_change_to_the_table(tmp_path: Path) -> None:
    from modelexport.tables.columns import SENSITIVITY
    from modelexport.tables.html_page import Page, write_page

    table = small_table().with_column(SENSITIVITY, {ModuleCall("a"): 0.25, ModuleCall("b.inner"): 0.5})
    rows = {row["address"]: row for row in table.document()["rows"]}
    assert rows["a"]["own"]["sensitivity"] == 0.25
    assert "sensitivity" not in rows["b"]["own"]
    assert (rows["b"]["total"]["sensitivity"], rows[""]["total"]["sensitivity"]) == (0.5, 0.5)
    assert table.sorted(table.rows(), "sensitivity")[0].address == "b.inner"
    assert "SENSITIVITY TOTAL" in format_table(table, "sensitivity")
    write_page(tmp_path / "page.html", Page(table, "sensitivity"))
    assert "sensitivity" in format_csv({"": (table, table.rows())})


def test_csv_has_own_and_total_of_each_column() -> None:
    table = small_table()
    lines = list(csv.DictReader(format_csv({"": (table, table.rows())}).splitlines()))
    assert lines[2]["address"] == "b"
    assert (lines[2]["own.work"], lines[2]["total.work"]) == ("1", "34")
    assert lines[-1]["address"] == "(outside of modules)"


def test_a_tree_has_bars_and_colour_only_where_asked() -> None:
    table = small_table()
    plain = format_table(table, "work")
    assert "\x1b" not in plain
    assert "█" in plain
    assert "\x1b[31m" in rendered(format_table(table, "work", screen=Screen(colour=True)), printable)
    assert "#" in format_table(table, "work", screen=Screen(blocks=False))
    assert "█" not in format_table(table, "work", screen=Screen(blocks=False))


def test_modules_that_are_selected_are_shown_with_their_addresses() -> None:
    table = small_table()
    only = select_calls(["b"], table.calls, table.tags, where="x.onnx")
    assert [line.split()[0] for line in format_table(table, "work", only=only).splitlines()[1:3]] == ["b", "b.inner"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", COUNTED)
def test_multiply_adds_are_half_of_what_pytorch_counts(exported: Exporter, name: str) -> None:
    table = cost(exported(name).path)
    ours = {row.address: 2 * row.total["macs"] for row in table.rows("module")}
    case = models.case(name)
    model, (args, kwargs) = case.build(), run_arguments(case.inputs())
    counter = FlopCounterMode(display=False)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # it does not count the CPU's own kernel
    with warnings.catch_warnings(), torch.no_grad(), math, counter:
        warnings.simplefilter("ignore")
        model(*args, **kwargs)
    root = type(model).__name__
    theirs = {
        "." if path in ("Global", root) else path.removeprefix(f"{root}."): sum(counts.values())
        for path, counts in counter.get_flop_counts().items()
    }
    assert theirs["."] > 0
    assert {path: ours[path] for path in theirs} == theirs


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["blocks", "bert", "t5", "condition", "recurrent", "resnet"])
def test_own_figures_add_up_to_the_file(exported: Exporter, name: str) -> None:
    table = cost(exported(name).path)
    rows = table.rows()
    stored = sum(
        value.const_value.nbytes
        for graph in read_tagged(exported(name).path).model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    )
    assert sum(row.own.get("bytes", 0) for row in rows) + table.outside.get("bytes", 0) == stored
    for column in ("parameters", "macs", "flops", "activation_bytes"):
        assert sum(row.own[column] for row in rows) == rows[0].total[column]
        for traced in table.calls:
            inside = [row for row in rows if row.calls[0] in table.calls.children[traced.call]]
            row = next(row for row in rows if row.calls == (traced.call,))
            assert row.total[column] == row.own[column] + sum(child.total[column] for child in inside)


NORMALIZED = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)).eval()


@pytest.fixture(scope="module")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, inputs = tmp_path_factory.mktemp("normalized") / "own.onnx", {"input": torch.ones(1, 1, 4, 4)}
    return modelexport.export(NORMALIZED, inputs, path, documents=False, check=False).path


def test_statistics_of_a_normalization_are_buffers_not_parameters(normalized: Path) -> None:
    """As the list of modules has it; a file of another exporter does not know."""
    whole = cost(normalized).whole
    assert whole["parameters"] == module_tree(NORMALIZED).root.parameters == 6 + 6
    assert whole["buffers"] == 2 * 3


def test_tied_parameters_are_counted_once_for_their_own_module(exported: Exporter) -> None:
    case = exported("tied-weights")
    model = case.case.build()
    rows = {row.address: row for row in cost(case.path).rows()}
    assert rows["."].total["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert rows["embedding"].own["parameters"] == model.embedding.weight.numel()
    assert rows["lm_head"].own["parameters"] == 0


@pytest.mark.parametrize(
    "name", ["blocks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "unet", "gpt2-cache"))]
)
def test_a_dynamic_file_has_the_figures_of_a_file_of_fixed_sizes(exported: Exporter, name: str) -> None:
    fixed, path = cost(exported(name).path), exported(name, dynamic=True).path
    sizes: dict[str, int] = {}
    here, there = (read_tagged(p).model.graph.inputs for p in (path, exported(name).path))
    for value, given in zip(here, there, strict=True):
        sizes.update(
            (str(dim.value), int(str(size)))
            for dim, size in zip(value.shape or (), given.shape or (), strict=True)
            if not isinstance(dim, int) and not str(dim.value).isdecimal()
        )
    assert sizes
    assert cost(path, sizes).whole["macs"] == fixed.whole["macs"]


def test_a_dynamic_axis_that_is_not_there_is_an_error(exported: Exporter) -> None:
    with pytest.raises(UsageError, match="no dynamic axis 'rows'; it has "):
        cost(exported("blocks", dynamic=True).path, {"rows": 8})


def of_one_axis(size: str) -> ir.Model:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size, 4]))
    node = ir.node("Relu", [value])
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "y", value.shape, value.type
    return ir.Model(ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 20}), ir_version=10)


def test_a_formula_in_a_file_is_never_executed(tmp_path: Path) -> None:
    evil = f"__import__('pathlib').Path({str(tmp_path / 'seen')!r}).touch()"
    assert "y" not in find_shapes(of_one_axis(evil)).sizes
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("name", ["Compress/enc/pick/Compress_output_0_dim_0", "x.batch", "x[0]"])
def test_a_name_that_is_not_arithmetic_is_a_name_and_its_size_can_be_given(name: str) -> None:
    """TorchScript's exporter calls unknown sizes so, with slashes."""
    assert name in find_shapes(of_one_axis(name)).symbols
    assert find_shapes(of_one_axis(name), {name: 5}).sizes["y"] == (5, 4)
    assert find_shapes(of_one_axis("s0 / 2"), {"s0": 6}).sizes["y"] == (3, 4)


@pytest.mark.parametrize(
    ("size", "number"),
    [
        *[("2*n - 1", 9), ("(n - 1)//2", 2), ("Max(n, 7) % 4", 3), ("floor(n/2) + ceiling(n*0.5)", 5), ("n**2", 25)],
        *[("n/2", None), ("-n", None), ("m + n", None), ("n + 9**40**40", None)],
    ],
)
def test_a_formula_gives_a_size_or_none(size: str, number: int | None) -> None:
    shape = find_shapes(of_one_axis(size), {"n": 5}).sizes.get("y")
    assert shape == (None if number is None else (number, 4))


def test_no_operator_has_two_rules() -> None:
    kinds = [WITHOUT_ARITHMETIC, ELEMENTWISE, REDUCTIONS, frozenset(COMPOSITES)]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))


def test_what_is_drawn_from_weights_alone_is_not_computed_in_advance() -> None:
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float half = {0.5}, bool yes = {1}> {
            kept = Dropout (w)  dropped = Dropout (w, half, yes)  drawn = RandomNormalLike (w)
            y = Sum (x, kept, dropped, drawn)
        }""")
    assert constant_values(model) == {"w", "half", "yes", "kept"}


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "resnet", "t5", "unet", "vit", "gpt2-cache"])
def test_peak_memory_is_within_a_fifth_of_the_arena(exported: Exporter, name: str) -> None:
    from modelexport.tables.profiles import profile

    measured = profile(exported(name).path, runs=1, warmup=1, level="none").table.whole["peak_bytes"]
    assert cost(exported(name).path).whole["peak_bytes"] == pytest.approx(measured, rel=0.2)


def test_node_data_has_no_key_that_the_file_does_not_have(exported: Exporter) -> None:
    path = exported("bert").path
    graph = read_tagged(path).model.graph
    data = node_data_document(cost(path), "flops")
    assert list(data) == [graph.name]
    results: dict[str, Any] = data[graph.name]["results"]
    assert set(results) <= {node.name for node in graph}
    assert sum(one["value"] for one in results.values()) == cost(path).whole["flops"]
    assert [stop["stop"] for stop in data[graph.name]["gradient"]] == [0, 0.5, 1]


def test_the_command_prints_a_tree_json_or_csv(exported: Exporter) -> None:
    path = exported("bert").path
    assert "BertSelfAttention" in run("cost", path).stdout
    document = json.loads(run("cost", path, "--json").stdout, parse_float=Decimal)
    assert list(document) == ["columns", "rows", "outside"]
    assert sum(row["own"]["flops"] for row in document["rows"]) == document["rows"][0]["total"]["flops"]
    only = json.loads(run("cost", path, "encoder.layer.0.**", "!class:Linear", "--json").stdout)
    addresses = [row["address"] for row in only["rows"]]
    assert addresses[0] == "encoder.layer.0.attention"
    assert not any(row["class"] == "Linear" for row in only["rows"])
    assert run("cost", path, "--csv", "--by", "class").stdout.splitlines()[1].startswith("class:BertModel,BertModel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort", "flop"], "there is no column 'flop'; did you mean flops"),
        (["--size", "batch"], "'batch' is not NAME=N"),
        (["--size", "batch=0"], "'batch=0': a size is at least 1"),
        (["--size", "batch=8"], "no dynamic axis 'batch': all of its sizes are fixed"),
        (["encoder.layers.0"], "did you mean encoder.layer.0"),
        (["--json", "--csv"], "not both"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(exported: Exporter, arguments: list[str], message: str) -> None:
    done = run("cost", exported("bert").path, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def test_the_shapes_of_inputs_of_nested_graphs_are_known(tmp_path: Path) -> None:
    inner = "(int64 i, bool c, float[2, 8] s) => (bool d, float[2, 8] t) { d = Identity(c) t = MatMul(s, w) }"
    text = "g (int64 n, bool go, float[2, 8] x, float[8, 8] w) => (float[2, 8] y)"
    table = cost(written(tmp_path / "loop.onnx", f"{text} {{ y = Loop <body = inner {inner}> (n, go, x) }}"))
    assert table.numbers(table.whole)["macs"] == 2 * 8 * 8


def test_shapes_are_known_up_to_a_node_that_the_tool_gives_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx import TensorProto, helper

    monkeypatch.chdir(tmp_path)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["made"]),
        helper.make_node("ReduceL2", ["made", "axes"], ["norm"], keepdims=1),  # its axes are an input
        helper.make_node("Shape", ["made"], ["sizes"]),
        helper.make_node("Expand", ["norm", "sizes"], ["wide"]),
        helper.make_node("Div", ["made", "wide"], ["y"]),
    ]
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [4, 1500], [0.0] * 6000)
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [-1])
    graph = helper.make_graph(
        nodes,
        "main_graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight, axes],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    assert find_shapes(model, {"batch": 2, "length": 3}).sizes["made"] == (2, 3, 1500)
    assert not list(tmp_path.iterdir())


def test_small_weights_in_a_linked_file_do_not_hide_shapes(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    (tmp_path / "real.bin").write_bytes(bytes(16))
    path.symlink_to("real.bin")  # the tool does not read such files
    tensor = ir.ExternalTensor(
        "weights.bin", 0, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name="w", base_dir=tmp_path
    )
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 4]))
    weight = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4]), const_value=tensor)
    node = ir.node("Mul", [x, weight])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 20}, name="g")
    assert find_shapes(ir.Model(graph, ir_version=10), {"batch": 2}).sizes["y"] == (2, 4)


def test_the_precision_of_a_module_is_what_the_file_has_for_each_of_its_parameters(
    exported: Exporter, tmp_path: Path
) -> None:
    for name in ("bert", "tied-weights"):
        rows = cost(exported(name).path).rows()
        assert {row.own.get("precision", 32) for row in rows if row.class_name in ("Linear", "LayerNorm")} == {32}
    case, kept, out = exported("bert"), "encoder.layer.0.attention.self", tmp_path / "out.onnx"
    for method, low, high in (("int4", 4, 8), ("int8-weights", 8, 16), ("float16", 16, 16)):
        modelexport.quantize(case.path, out, to=method, only=["encoder"], keep=[kept])
        found = {row.address: row.total.get("precision") for row in cost(out).rows()}
        assert found[kept] == found["embeddings"] == 32
        assert low <= found["encoder.layer.0.output.dense"] <= high


def test_parameters_that_a_tool_made_one_weight_share_its_bits(normalized: Path, tmp_path: Path) -> None:
    """ONNX Runtime folds a normalization into the weight of the convolution before it."""
    optimize_file(normalized, "ort-basic", tmp_path / "out.onnx")
    rows = [row for row in cost(tmp_path / "out.onnx").rows() if row.own["parameters"]]
    assert all(0 < row.own["precision"] <= 32 for row in rows)


@pytest.mark.parametrize(
    "operator",
    [
        "Attention <q_num_heads = 2, kv_num_heads = 2>(q, k, v, , pk, pv)",
        "com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2>(q, k, v, pk, pv, n, t)",
    ],
)
def test_a_step_of_an_attention_multiplies_with_all_keys_of_its_past(tmp_path: Path, operator: str) -> None:
    text = f"""g (float[1,1,16] q, float[1,1,16] k, float[1,1,16] v, float[1,2,9,8] pk, float[1,2,9,8] pv, int32[1] n,
        int32[1] t) => (float[1,1,16] y, float[1,2,10,8] a, float[1,2,10,8] b)
        {{ ["/attention/Attention"] y, a, b = {operator} }}"""
    table = cost(written(tmp_path / "step.onnx", text, 23, **{"com.microsoft": 1}))
    assert table.numbers(table.whole)["macs"] == 2 * 16 * 10


@pytest.mark.parametrize(("total", "keys"), [("", 4096), ("<int32[1] t = {8}>", 8)])
def test_a_static_cache_counts_whole_unless_the_file_says_how_much_of_it_is_used(
    tmp_path: Path, total: str, keys: int
) -> None:
    inputs = (
        "float[1,1,32] q, float[1,1,32] k, float[1,1,32] v, float[1,2,4096,16] pk, float[1,2,4096,16] pv, int32[1] n"
    )
    text = f"""g ({inputs}{"" if total else ", int32[1] t"}) =>
        (float[1,1,32] y, float[1,2,4096,16] a, float[1,2,4096,16] b) {total}
        {{ y, a, b = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2>(q, k, v, pk, pv, n, t) }}"""
    table = cost(written(tmp_path / "step.onnx", text, 17, **{"com.microsoft": 1}))
    assert table.numbers(table.whole)["macs"] == 2 * 32 * keys
