"""``split``: the stages compute what the whole file does, and are as balanced as module boundaries allow."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import modelexport
from exports import Exporter
from graph_texts import written
from modelexport import load, verify, verify_against, verify_stages
from modelexport.errors import FileFormatError, InputsError, OutputError, UsageError
from modelexport.files.onnx_models import load_onnx, save_model
from modelexport.packages.stage_runs import read_stages, run_chain
from modelexport.runtime.sessions import open_session, run_session
from modelexport.tools.cut.node_timeline import Timeline
from modelexport.tools.cut.splitting import split
from modelexport.tools.cut.stage_balance import SLACK, Units, balanced_cuts, best_limit, fewest_stages

SPLIT = [
    "blocks",
    "residual-network",
    "unet",
    "torchvision-resnet18",
    "bert",
    "albert",
    "gpt2-cache",
    "llama",
    "t5",
    "bart",
    "mixtral",
    "swin",
]


def arrays(case: object) -> dict[str, np.ndarray]:
    """The inputs of a case, flat and in order."""
    found: list[np.ndarray] = []

    def walk(value: object) -> None:
        if hasattr(value, "numpy"):
            found.append(value.numpy())
        elif isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner)

    walk(case.inputs())
    return dict(enumerate(found))


def whole(path: Path, case: object) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs by their names in the file, and the outputs for them."""
    session = open_session(path)
    names = [value.name for value in session.get_inputs()]
    by_name = {name: value.numpy() for name, value in case.inputs().items() if hasattr(value, "numpy")}
    feeds = by_name if set(names) == set(by_name) else dict(zip(names, arrays(case).values(), strict=True))
    return feeds, run_session(session, feeds)


def check_chain(folder: Path, feeds: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    made = run_chain(folder, feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(made[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", SPLIT)
def test_the_chain_of_stages_is_the_whole(name: str, exported: Exporter, tmp_path: Path) -> None:
    file = exported(name)
    feeds, expected = whole(file.path, file.case)
    tagged = load(file.path)
    least = best_limit(_whole_units(Timeline(tagged)), 3)
    for folder, options in (
        ("2", {"stages": 2}),
        ("3", {"stages": 3}),
        ("5", {"stages": 5}),
        ("mb", {"max_bytes": least}),
    ):
        result = split(tagged, tmp_path / folder, **options)
        check_chain(tmp_path / folder, feeds, expected)
        assert result.largest <= (1 + SLACK) * result.best
        if folder == "mb":
            assert max(stage.bytes for stage in result.stages) <= least
        else:
            assert len(result.stages) == int(folder)
        for stage in result.stages:
            onnx.checker.check_model(tmp_path / folder / stage.file, full_check=True)
            assert load(tmp_path / folder / stage.file).coverage.untagged == 0


def _whole_units(timeline: Timeline) -> Units:
    ends = [0, *timeline.points, len(timeline.nodes)]
    items = [timeline.items(range(start, end), None) for start, end in itertools.pairwise(ends)]
    return Units(items, [0, *(timeline.crossing[point] for point in timeline.points)])


@pytest.mark.parametrize("name", ["blocks", "unet", "llama"])
def test_no_choice_of_module_boundaries_is_more_even(name: str, exported: Exporter) -> None:
    timeline = Timeline(load(exported(name).path))
    ends = [0, *timeline.points, len(timeline.nodes)]

    def weights(start: int, end: int) -> int:
        used = {value for node in timeline.nodes[start:end] for value in node.inputs if value is not None}
        return sum(value.const_value.nbytes for value in used if value.is_initializer())

    searched = min(
        max(weights(start, end) for start, end in itertools.pairwise((0, *cuts, ends[-1])))
        for cuts in itertools.combinations(ends[1:-1], 2)
    )
    assert best_limit(_whole_units(timeline), 3) == searched


@given(
    st.lists(st.dictionaries(st.sampled_from("abcdef"), st.just(3), max_size=3), min_size=2, max_size=8),
    st.data(),
)
def test_cuts_are_within_the_limit_and_nothing_cheaper_is(items: list[dict[str, int]], data: st.DataObject) -> None:
    crossing = [0, *(data.draw(st.integers(0, 9)) for _ in items[1:])]
    units = Units(items, crossing)
    stages = data.draw(st.integers(1, len(items)))
    every = list(itertools.combinations(range(1, len(items)), stages - 1))
    best = min(max(units.sizes(cuts)) for cuts in every)
    assert best_limit(units, stages) == best
    assert fewest_stages(units, best) <= stages
    limit = best + data.draw(st.integers(0, 3))
    cuts = balanced_cuts(units, stages, limit)
    assert max(units.sizes(cuts)) <= limit
    cheapest = min(sum(crossing[cut] for cut in each) for each in every if max(units.sizes(each)) <= limit)
    assert sum(crossing[cut] for cut in cuts) == cheapest


def test_stages_begin_where_they_are_told_to(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("llama").path)
    result = split(tagged, tmp_path / "at", at=["model.layers.*", "lm_head"])
    assert [stage.modules for stage in result.stages] == [
        ["model.embed_tokens", "model.rotary_emb"][: len(result.stages[0].modules)],
        ["model.layers.0"],
        ["model.layers.1", "model.norm"],
        ["lm_head"],
    ]
    few = split(tagged, tmp_path / "few", at=["model.layers.*", "lm_head"], stages=2)
    assert len(few.stages) == 2
    whole = split(tagged, tmp_path / "chosen", stages=2)
    assert few.best == whole.best, "an uneven cut that was asked for is not called as even as possible"
    assert "model.layers.0" in {module for stage in few.stages for module in stage.modules}


def test_one_stage_is_not_compared_as_if_it_were_the_whole_file(exported: Exporter, tmp_path: Path) -> None:
    source = exported("blocks").path
    split(load(source), tmp_path / "parts", stages=2)
    stage = tmp_path / "parts" / "stage_1.onnx"
    for first, second in ((stage, source), (source, stage)):
        with pytest.raises(UsageError, match=r"is a stage of a split file: .* modelexport compare .*parts/ "):
            verify_against(first, second)
    with pytest.raises(UsageError, match="is a stage of a split file"):
        verify(torch.nn.Linear(2, 2), (torch.ones(1, 2),), stage)
    assert verify_against(stage, stage).agrees, "two versions of one stage can be compared"


@pytest.mark.slow
def test_each_stage_has_its_layers_cache(exported: Exporter, tmp_path: Path) -> None:
    file = exported("gpt2-cache")
    result = split(load(file.path), tmp_path / "s", at=["transformer.h.1"])
    outputs = [value.name for value in load_onnx(file.path).graph.outputs]
    first, second = (set(stage.outputs) & set(outputs) for stage in result.stages)
    assert first
    assert first | second == set(outputs)
    assert not first & second


def test_tied_weights_are_in_each_stage_that_uses_them(exported: Exporter, tmp_path: Path) -> None:
    file = exported("tied-weights")
    split(load(file.path), tmp_path / "s", at=["lm_head"])
    feeds, expected = whole(file.path, file.case)
    check_chain(tmp_path / "s", feeds, expected)
    first, last = (load_onnx(tmp_path / "s" / f"stage_{index}.onnx") for index in (0, 1))
    assert set(first.graph.initializers) & set(last.graph.initializers)


@pytest.mark.slow  # a model of 45 MB
def test_weights_in_files_are_linked_and_each_stage_reads_its_own(exported: Exporter, tmp_path: Path) -> None:
    file = exported("torchvision-resnet18")
    model = load_onnx(file.path)
    big = tmp_path / "big.onnx"
    save_model(model, big, external=True)
    result = split(load(big), tmp_path / "s", stages=3, weights="link")
    assert result.weights == ["big.onnx.data"]
    assert {path.name for path in (tmp_path / "s").iterdir()} == {
        "modelexport.json", "big.onnx.data", "stage_0.onnx", "stage_1.onnx", "stage_2.onnx",
    }  # fmt: skip
    assert all((tmp_path / "s" / stage.file).stat().st_size < 10**6 for stage in result.stages)
    feeds, expected = whole(file.path, file.case)
    check_chain(tmp_path / "s", feeds, expected)
    stage = load(tmp_path / "s" / "stage_1.onnx")  # our reader accepts hard links
    assert all(value.const_value.numpy() is not None for value in stage.model.graph.initializers.values())
    (tmp_path / "s" / "big.onnx.data").unlink()  # onnx_ir does not read a file with two names
    copied = split(load(big), tmp_path / "copied", stages=3, weights="copy")
    assert copied.weights == ["stage_0.onnx.data", "stage_1.onnx.data", "stage_2.onnx.data"]
    check_chain(tmp_path / "copied", feeds, expected)


def test_a_second_split_replaces_the_first(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("blocks").path)
    split(tagged, tmp_path / "s", stages=4)
    split(tagged, tmp_path / "s", stages=2)
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"modelexport.json", "stage_0.onnx", "stage_1.onnx"}
    assert [part.name for part in read_stages(tmp_path / "s").parts] == ["stage_0", "stage_1"]


def test_the_manifest_names_what_crosses_alike_in_both_parts(exported: Exporter, tmp_path: Path) -> None:
    split(load(exported("unet").path), tmp_path / "s", stages=3)
    manifest = read_stages(tmp_path / "s")
    made: set[str] = {value.name for value in load_onnx(exported("unet").path).graph.inputs}
    for part in manifest.parts:
        graph = ir.load(tmp_path / "s" / part.file).graph
        assert [value.name for value in graph.inputs] == part.inputs
        assert set(part.inputs) <= made
        made |= set(part.outputs)


def test_an_input_that_the_model_returns_is_an_output_of_the_last_stage(tmp_path: Path) -> None:
    body = "a = Relu(x) b = Neg(a) y = Add(a, b)"
    path = written(tmp_path / "pass.onnx", f"g (float[2] x, float[1] k) => (float[2] y, float[1] k) {{ {body} }}")
    assert split(load(path), tmp_path / "stages", stages=2).stages[-1].outputs == ["y", "k"]
    given = {"x": np.ones(2, np.float32), "k": np.full(1, 7, np.float32)}
    assert read_stages(tmp_path / "stages").parts[-1].outputs == ["y", "k"]
    assert run_chain(tmp_path / "stages", given)["k"].tolist() == [7]
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    assert run_chain(tmp_path / "stages", tensors)["k"].tolist() == [7]
    with pytest.raises(InputsError, match="NumPy cannot read x"):
        run_chain(tmp_path / "stages", {**tensors, "x": torch.ones(2, requires_grad=True)})


def test_stages_return_sequences_and_outputs_that_cannot_be_compared(tmp_path: Path) -> None:
    text = """g (float[4] x) => (seq(float[1]) s, float[4] i, float[4] y) <float huge = {1e30}> {
        ["/a/Sinh"] a = Sinh (x)  ["/b/Abs"] b = Abs (a)  ["/b/Add"] i = Add (b, huge)
        ["/b/SplitToSequence"] s = SplitToSequence (a)  ["/c/Cosh"] y = Cosh (a) }"""
    file = written(tmp_path / "file.onnx", text)
    report = verify_stages(split(load(file), tmp_path / "stages", stages=2), file)
    assert report.agrees
    assert {output.name: output.status for output in report.outputs} == {
        **{f"s[{index}]": "agree" for index in range(4)},
        "i": "not compared",
        "y": "agree",
    }
    manifest = tmp_path / "stages" / "modelexport.json"
    manifest.write_text(manifest.read_text().replace('"stages"', '"whole"', 1))
    with pytest.raises(FileFormatError, match=r"of kind 'whole', not of stages: give a part \(stage_0.onnx, stage_1"):
        verify_stages(manifest.parent, file)


def test_what_cannot_be_split_is_said(exported: Exporter, tmp_path: Path) -> None:
    tagged = load(exported("blocks").path)
    with pytest.raises(UsageError, match="places for a cut"):
        split(tagged, tmp_path / "s", stages=1000)
    with pytest.raises(UsageError, match=r"no stage of .* is within .* MB: '.*' alone has"):
        split(tagged, tmp_path / "s", max_bytes=10)
    with pytest.raises(UsageError, match="--max-mb bounds the bytes of weights, and --by flops balances other figures"):
        modelexport.split(tagged, tmp_path / "s", max_bytes=10**9, by="flops")
    with pytest.raises(UsageError, match="'nothing'"):
        split(tagged, tmp_path / "s", at=["nothing"])
    with pytest.raises(UsageError, match="the model begins with"):
        split(tagged, tmp_path / "s", at=["stem"])
    with pytest.raises(UsageError, match=r"\(--stages\), the largest .* \(--max-mb\), or the modules .* \(--at\)"):
        split(tagged, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("keep")
    with pytest.raises(OutputError, match="other files"):
        split(tagged, tmp_path / "other", stages=2)
    with pytest.raises(FileFormatError, match=r"no modelexport.json"):
        run_chain(tmp_path / "other", {})


def test_operations_are_counted_for_the_sizes_that_are_given(tmp_path: Path) -> None:
    """Of a few rows the wide layer takes most operations, of many the product of all rows with all."""
    numbers = ", ".join(str(index % 5 - 2) for index in range(256))
    text = f"""g (float[n,4] x) => (float[n,n] y) <float[4,64] w = {{{numbers}}}, float[64,4] v = {{{numbers}}}> {{
        ["/a/MatMul"] a = MatMul (x, w)  ["/b/MatMul"] b = MatMul (a, v)  ["/c/Transpose"] t = Transpose (b)
        ["/d/MatMul"] y = MatMul (b, t) }}"""
    file = written(tmp_path / "file.onnx", text)
    stages = {}
    for rows in (7, 900):
        result = modelexport.split(file, tmp_path / f"{rows}", stages=2, by="flops", sizes={"n": rows})
        assert result.by == "flops"
        assert result.largest <= (1 + SLACK) * result.best
        stages[rows] = [stage.modules for stage in result.stages]
    assert stages == {7: [["a"], ["b", "c", "d"]], 900: [["a", "b"], ["c", "d"]]}
    feeds = {"x": np.ones((5, 4), np.float32)}
    check_chain(tmp_path / "7", feeds, run_session(open_session(file), feeds))
    with pytest.raises(UsageError, match="no dynamic axis 'nothing'"):
        modelexport.split(file, tmp_path / "other", stages=2, by="flops", sizes={"nothing": 7})


def test_what_the_commands_do_has_public_names() -> None:
    commands = {"split", "replace", "place", "rename", "extract", "update_weights"}
    others = {"run_chain", "CustomOperator", "FromModel", "Identity"}
    others |= {"merge_adapters", "adapters_as_inputs", "write_adapter"}
    assert commands | others <= set(modelexport.__all__)
    assert all(callable(getattr(modelexport, name)) for name in commands | others)
