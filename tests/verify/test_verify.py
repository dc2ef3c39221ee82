"""Verification: correct files agree call by call, and a fault is found in the call that has it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch
from modelexport.verify.differences import Difference, compare_arrays
from modelexport.verify.kept import KeptRuns
from modelexport.verify.model import record_reference, verify_sample
from modelexport.verify.model import verify as run_verify
from safetensors.numpy import load_file

import commands
import models
from modelexport import export, load, update_weights, verify, verify_against, verify_reference
from modelexport.api import TaggedModel
from modelexport.errors import FileFormatError, InputsError, UsageError
from modelexport.format import keys
from modelexport.graph.owners import owner_of
from modelexport.lineage.tools import optimize_file
from modelexport.pytorch.repeatability import find_unrepeatable
from modelexport.runtime.sessions import open_session, run_session, with_outputs
from modelexport.traces.reference import open_reference, reference_path
from modelexport.verify.verdicts import CallVerdict, VerifyReport

AGREEING = (
    "blocks",
    "nested-structures",
    "recurrent",
    "tied-weights",
    "unet",
    "bert",
    "gpt2",
    "llama",
    "t5",
    "mixtral",
    "vit",
    "resnet",
)
FAULTY = ("blocks", "bert", "gpt2", "vit", "resnet")
FAULTS_PER_MODEL = 6

Proven = Callable[[str], Path]


@pytest.fixture(scope="session")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Proven:
    """``proven(name)``: the export of a case with reference values."""
    folder = tmp_path_factory.mktemp("proven")

    def get(name: str) -> Path:
        path = folder / f"{name}.onnx"
        if not path.exists():
            case = models.case(name)
            export(case.build(), case.inputs(), path, reference=True)
        return path

    return get


def copied(path: Path, folder: Path) -> Path:
    """A copy of the file, to be changed."""
    for suffix in (".onnx", ".hierarchy.json", ".reference.safetensors"):
        shutil.copyfile(path.with_suffix(suffix), folder / path.with_suffix(suffix).name)
    return folder / path.name


# --- files that are right -------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("name", AGREEING)
def test_every_call_with_nodes_is_comparable_and_agrees(name: str, proven: Proven) -> None:
    report = verify_reference(proven(name))
    assert {call.status for call in report.calls} <= {"agree", "no nodes"}
    assert report.agrees
    assert report.diverging is None
    # Every call with nodes, except the root's own, is also compared per module.
    assert any(call.per_module is not None for call in report.calls)


@pytest.mark.parametrize("name", ["blocks", "bert", "nested-structures"])
def test_reference_values_give_the_verdicts_that_the_model_gives(name: str, proven: Proven) -> None:
    case, path = models.case(name), proven(name)
    with_model, without = verify(case.build(), case.inputs(), path, perturb=False), verify_reference(path)
    assert without.calls == with_model.calls
    assert [one.relative for one in without.outputs] == [one.relative for one in with_model.outputs]
    assert with_model.parameters is not None
    assert without.parameters is None


# --- planted faults -------------------------------------------------------------------------------------------------


def changed_constant(node: ir.Node) -> bool:
    """Give a node an initializer of its own with other numbers."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.is_initializer() and value.dtype is ir.DataType.FLOAT and value.const_value:
            array = value.const_value.numpy()
            other = ir.Value(
                name=f"{value.name}.faulty", const_value=ir.tensor(array * np.float32(0.5) + np.float32(0.25))
            )
            other.type, other.shape = value.type, value.shape
            assert isinstance(node.graph, ir.Graph)
            node.graph.initializers.add(other)
            node.replace_input_with(index, other)
            return True
    return False


def swapped_inputs(node: ir.Node) -> bool:
    if node.op_type not in ("Sub", "Div", "Pow", "MatMul") or len(node.inputs) != 2:
        return False
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)
    return True


def wrong_axis(node: ir.Node) -> bool:
    """Another axis or another permutation, if there is one."""
    if "perm" in node.attributes:
        perm = list(node.attributes["perm"].as_ints())
        node.attributes["perm"] = ir.AttrInt64s("perm", [*perm[:-2], perm[-1], perm[-2]])
        return True
    if node.op_type in ("Softmax", "LogSoftmax") and "axis" in node.attributes:
        node.attributes["axis"] = ir.AttrInt64("axis", node.attributes["axis"].as_int() - 1)
        return True
    return False


def computed(tagged: TaggedModel, position: int) -> Any:
    """The first output of a node in a run of the whole file; ``None`` if ONNX Runtime refuses it."""
    value = tagged.model.graph[position].outputs[0]
    inputs = {k.removeprefix("inputs/"): a for k, a in load_file(reference_path(tagged.path)).items() if "inputs/" in k}
    try:
        return run_session(open_session(with_outputs(tagged.model, [value]), folder=tagged.path.parent), inputs)[
            value.name or ""
        ]
    except UsageError:
        return None


@dataclass(frozen=True)
class Fault:
    """A file with one wrong node, in memory."""

    what: str
    address: str
    """The address of the call that owns the node."""
    tagged: TaggedModel


def faults(path: Path) -> Iterator[Fault]:
    """One fault at a time that changes its node's output: each kind where the graph allows it."""
    places: dict[Callable[[ir.Node], bool], list[int]] = {changed_constant: [], swapped_inputs: [], wrong_axis: []}
    for position, node in enumerate(load(path).model.graph):
        owner = owner_of(node)
        kind = next((kind for kind in (wrong_axis, swapped_inputs, changed_constant) if kind(node)), None)
        if owner is not None and len(owner.calls) == 1 and kind is not None:
            places[kind].append(position)
    original = load(path)
    planted = 0
    for kind, quota in ((wrong_axis, 2), (swapped_inputs, 4), (changed_constant, FAULTS_PER_MODEL)):
        for position in places[kind][:: max(1, len(places[kind]) // FAULTS_PER_MODEL)]:
            if planted >= quota:
                break
            tagged = load(path)
            node = tagged.model.graph[position]
            kind(node)
            right, wrong = computed(original, position), computed(tagged, position)
            if wrong is not None and right.shape == wrong.shape and abs(right - wrong).max() > 0.02 * abs(right).max():
                planted += 1
                owner = owner_of(node)
                assert owner is not None
                yield Fault(f"{kind.__name__} at {node.name}", owner.call.address, tagged)


def wrong_of_their_own(report: VerifyReport) -> list[str]:
    return [
        c.address for c in report.calls if c.status == "differ" and c.per_module and c.per_module.status == "differ"
    ]


@pytest.mark.parametrize("name", FAULTY)
def test_a_wrong_node_is_found_in_the_call_that_owns_it(name: str, proven: Proven, tmp_path: Path) -> None:
    planted = list(faults(proven(name)))
    assert len(planted) >= 4
    for fault in planted:
        path = copied(proven(name), tmp_path)
        ir.save(fault.tagged.model, path)
        report = verify_reference(path)
        # If no PyTorch value is between two calls, the numbers cannot show which of the two is wrong.
        assert fault.address in wrong_of_their_own(report), fault.what
        assert len(wrong_of_their_own(report)) <= 2, fault.what
        assert report.diverging is not None
        assert report.diverging.address == fault.address, fault.what
        assert not report.agrees


def test_at_least_twenty_faults_are_planted(proven: Proven) -> None:
    assert sum(1 for name in FAULTY for _ in faults(proven(name))) >= 20


@pytest.mark.parametrize("name", FAULTY)
def test_a_tag_moved_to_another_call_is_found(name: str, proven: Proven, tmp_path: Path) -> None:
    path = copied(proven(name), tmp_path)
    tagged = load(path)
    nodes = [(n, owner) for n in tagged.model.graph if (owner := owner_of(n)) is not None and len(owner.calls) == 1]
    moved, owner = nodes[len(nodes) // 2]
    target = next(other for _, other in reversed(nodes) if other.call != owner.call)
    moved.metadata_props[keys.CALL] = target.call.address
    moved.metadata_props[keys.SOURCE_MODULE] = next(
        n.metadata_props[keys.SOURCE_MODULE] for n, other in nodes if other.call == target.call
    )
    ir.save(tagged.model, path)
    path.with_suffix(".hierarchy.json").unlink()  # only the numbers can show it
    report = verify_reference(path)
    wrong = {call.address for call in report.calls if "tags are wrong" in call.reason}
    assert target.call.address in wrong
    assert not report.agrees


# --- reference values -----------------------------------------------------------------------------------------------


def test_reference_values_have_the_inputs_and_the_values_by_their_names_in_the_file(proven: Proven) -> None:
    path = proven("bert")
    kept, tagged = load_file(reference_path(path)), load(path)
    made = {value.name for node in tagged.model.graph for value in node.outputs}
    inputs = models.case("bert").inputs()
    assert {key for key in kept if key.startswith("inputs/")} == {f"inputs/{v.name}" for v in tagged.model.graph.inputs}
    assert {key.removeprefix("values/") for key in kept if key.startswith("values/")} <= made
    assert (kept["inputs/input_ids"] == inputs["input_ids"].numpy()).all()
    assert tagged.hierarchy is not None
    values = {t.value for call in tagged.hierarchy.calls for t in call.outputs if t.value in made}
    assert {f"values/{value}" for value in values} <= set(kept)


def test_the_same_run_gives_the_same_bytes(proven: Proven, tmp_path: Path) -> None:
    case = models.case("blocks")
    export(case.build(), case.inputs(), tmp_path / "blocks.onnx", reference=True)
    assert reference_path(tmp_path / "blocks.onnx").read_bytes() == reference_path(proven("blocks")).read_bytes()


def test_reference_values_of_chosen_modules_are_smaller_and_verify_those(proven: Proven, tmp_path: Path) -> None:
    case = models.case("bert")
    path = tmp_path / "bert.onnx"
    export(case.build(), case.inputs(), path, reference=["encoder.layer.1"])
    assert reference_path(path).stat().st_size < reference_path(proven("bert")).stat().st_size
    report = verify_reference(path)
    everything = {call.address: call for call in verify_reference(proven("bert")).calls}
    assert report.calls == [everything[call.address] for call in report.calls]
    assert [call.address for call in report.calls if "." not in call.address.removeprefix("encoder.layer.1")]
    assert all(call.address.startswith("encoder.layer.1") for call in report.calls)
    with pytest.raises(UsageError, match=r"has no values of encoder.layer.0: it has those of encoder.layer.1"):
        verify_reference(path, modules=["encoder.layer.0"])


def test_the_size_is_told_before_anything_is_written(proven: Proven, tmp_path: Path) -> None:
    case, path = models.case("blocks"), copied(proven("blocks"), tmp_path)
    reference_path(path).unlink()
    told = []
    record_reference(
        case.build(), case.inputs(), path, announce=lambda size: told.append((size, reference_path(path).exists()))
    )
    assert told == [(reference_path(path).stat().st_size, False)]


def test_bfloat16_values_are_kept(tmp_path: Path) -> None:
    class Net(torch.nn.Sequential):
        pass

    model = Net(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to(torch.bfloat16).eval()
    path = tmp_path / "net.onnx"
    export(model, (torch.ones(2, 4, dtype=torch.bfloat16),), path, reference=True)
    with open_reference(load(path)) as reference:
        assert {str(reference.read(name).dtype) for name in reference.available} == {"bfloat16"}
        assert [array.dtype.name for array in reference.inputs.values()] == ["bfloat16"]


@pytest.mark.parametrize("arguments", [[], ["--against", "bert.onnx"]], ids=["reference values", "against"])
def test_files_are_verified_without_torch(arguments: list[str], proven: Proven) -> None:
    code = (
        "import sys; from modelexport.cli.app import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "verify", "bert.onnx", *arguments, "--json"]
    done = subprocess.run(command, cwd=proven("bert").parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["agrees"] is True


# --- two files ------------------------------------------------------------------------------------------------------


def perturbed(path: Path, output: Path, module: str) -> None:
    """A copy of a file of ``bert`` with other weights in one module."""
    model = models.case("bert").build()
    with torch.no_grad():
        model.get_submodule(module).weight.mul_(1.1)
    update_weights(path, model.state_dict(), output)


@pytest.mark.parametrize("module", ["embeddings.word_embeddings", "encoder.layer.1.attention.output.dense"])
def test_the_module_with_other_weights_loses_most(module: str, proven: Proven, tmp_path: Path) -> None:
    perturbed(proven("bert"), tmp_path / "other.onnx", module)
    report = verify_against(proven("bert"), tmp_path / "other.onnx")
    assert report.inputs == "reference values"
    assert report.ranked[0].address == module
    assert [c.address for c in report.calls if c.per_module and c.per_module.difference.status == "differ"] == [module]
    assert report.ranked[0].per_module is not None
    assert report.ranked[0].per_module.norm == pytest.approx(0.1, abs=0.05)
    assert not report.agrees


def test_a_file_loses_nothing_against_itself_with_random_inputs(proven: Proven, tmp_path: Path) -> None:
    path = copied(proven("bert"), tmp_path)
    reference_path(path).unlink()
    report = verify_against(path, path)
    assert report.inputs == "random"
    assert report.agrees
    assert {call.status for call in report.calls} == {"agree", "no nodes"}


def half(path: Path, output: Path) -> None:
    """A tagged file whose weights, inputs and results are in half precision."""
    model = ir.load(path)
    for value in (
        *model.graph.initializers.values(),
        *model.graph.inputs,
        *(v for n in model.graph for v in n.outputs),
    ):
        if value.dtype is ir.DataType.FLOAT:
            value.dtype = ir.DataType.FLOAT16
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float16), name=value.name)
    ir.save(model, output)
    shutil.copyfile(path.with_suffix(".hierarchy.json"), output.with_suffix(".hierarchy.json"))


def test_half_precision_is_compared_in_its_own_tolerance(proven: Proven, tmp_path: Path) -> None:
    half(proven("blocks"), tmp_path / "half.onnx")
    report = verify_against(proven("blocks"), tmp_path / "half.onnx")
    assert report.agrees
    losses = [call.per_module for call in report.ranked if call.per_module is not None]
    assert {loss.difference.dtype for loss in losses} == {"float16"}
    assert all(loss.norm is not None and 0 < loss.norm < 1e-2 for loss in losses[:3])
    assert [loss.norm for loss in losses] == sorted((loss.norm for loss in losses), reverse=True)


# --- what cannot be verified ----------------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return commands.run("verify", *arguments, cwd=cwd)


def test_a_mismatch_ends_with_status_1_and_names_the_module_first(proven: Proven, tmp_path: Path) -> None:
    path = copied(proven("bert"), tmp_path)
    fault = next(faults(proven("bert")))
    ir.save(fault.tagged.model, path)
    done = command("bert.onnx", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith(f"first diverging: {fault.address} ")
    assert re.search(r"^differ: \d+ of \d+ calls with nodes agree, .*largest error", done.stdout.splitlines()[-1])
    document = json.loads(command("bert.onnx", "--json", cwd=tmp_path).stdout)
    assert document["agrees"] is False
    assert document["diverging"]["address"] == fault.address
    assert msgspec.convert(document, VerifyReport).diverging is not None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--provider", "NoSuchProvider"], "this ONNX Runtime does not have NoSuchProvider: it has "),
        (["--module", "encoder.layer.7"], "did you mean encoder.layer."),
        (["--model", "bert-tiny", "--against", "bert.onnx"], "give --model or --against, not both"),
        (["--inputs", "spec.json"], "go with --model"),
        (["--against", "nowhere.onnx"], "there is no file nowhere.onnx"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_one_line(arguments: list[str], told: str, proven: Proven) -> None:
    done = command("bert.onnx", *arguments, cwd=proven("bert").parent)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("suffix", "told"),
    [
        (".reference.safetensors", "--model, another file with --against, or export with --reference"),
    ],
)
def test_a_missing_document_is_named(suffix: str, told: str, proven: Proven, tmp_path: Path) -> None:
    path = copied(proven("blocks"), tmp_path)
    path.with_suffix(suffix).unlink()
    with pytest.raises(FileFormatError, match=re.escape(told)):
        verify_reference(path)


def test_the_sidecar_is_not_needed(proven: Proven, tmp_path: Path) -> None:
    case, path = models.case("bert"), copied(proven("bert"), tmp_path)
    path.with_suffix(".hierarchy.json").unlink()
    assert verify(case.build(), case.inputs(), path).agrees
    assert verify_reference(path).agrees


def test_values_of_other_weights_are_refused_by_name(proven: Proven, tmp_path: Path) -> None:
    path = copied(proven("blocks"), tmp_path)
    weights = {key: tensor * 1.5 for key, tensor in models.case("blocks").build().state_dict().items()}
    update_weights(path, weights, tmp_path / "new.onnx")
    shutil.copyfile(reference_path(path), tmp_path / "new.reference.safetensors")
    with pytest.raises(FileFormatError, match=r"new.reference.safetensors was made with other weights"):
        verify_reference(tmp_path / "new.onnx")


# --- a proof that cannot be fooled ----------------------------------------------------------------------------------


def report_of(*calls: CallVerdict, outputs: tuple[Difference, ...] = ()) -> VerifyReport:
    return VerifyReport(outputs=list(outputs), calls=list(calls), provider="", units={}, parameters=None)


def test_a_report_of_nothing_does_not_agree() -> None:
    assert report_of().verdict == "not compared"
    assert not report_of().agrees
    assert report_of(CallVerdict(address="a", tag="/A", status="not compared")).verdict == "not compared"
    assert report_of(CallVerdict(address="a", tag="/A", status="no nodes")).verdict == "not compared"
    assert report_of(CallVerdict(address="a", tag="/A", status="agree")).agrees


def test_a_check_of_no_calls_ends_with_status_1(proven: Proven) -> None:
    done = command("bert.onnx", "--model", "bert-tiny", "--weights-sample", "0", cwd=proven("bert").parent)
    assert done.returncode in (1, 2)
    case = models.case("bert")
    report = verify_sample(case.build(), case.inputs(), proven("bert"), count=0)
    assert report.verdict == "not compared"
    assert "no call was chosen" in report.notes[0]


def many_classes() -> Any:
    logits = np.random.default_rng(0).standard_normal((2, 100_000)).astype(np.float32)
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize(
    "change",
    [lambda p: p * 0, lambda p: p[:, ::-1], lambda p: -p, lambda p: p * np.float32(1.0009)],
    ids=["zero", "reversed", "signs", "1.0009"],
)
def test_small_numbers_are_not_equal_for_being_small(scale: float, change: Callable[[Any], Any]) -> None:
    right = (many_classes() * np.float32(scale)).astype(np.float32)
    assert compare_arrays("p", right, np.ascontiguousarray(change(right))).status == "differ"
    nearly = right * (1 + np.float32(2**-23) * np.resize([1, -1], right.shape).astype(np.float32))
    assert compare_arrays("p", right, nearly).status == "agree"


def test_what_a_mask_makes_huge_does_not_hide_the_rest() -> None:
    right = np.array([1.0, 2.0, 3.0, 4.0, np.finfo(np.float32).min, -1e9], dtype=np.float32)
    wrong = right.copy()
    wrong[1] = 2.5
    assert compare_arrays("scores", right, right).status == "agree"
    assert compare_arrays("scores", right, wrong).status == "differ"


def test_noise_that_was_measured_is_allowed_and_no_more() -> None:
    exact = np.linspace(1, 2, 100)
    right = (exact * (1 + 1e-4)).astype(np.float32)
    assert compare_arrays("x", right, (exact * (1 - 1e-4)).astype(np.float32), exact=exact).status == "agree"
    assert compare_arrays("x", right, (exact * 1.01).astype(np.float32), exact=exact).status == "differ"
    assert compare_arrays("x", right, (exact * (1 - 1e-4)).astype(np.float32)).status == "differ"


@pytest.mark.parametrize("name", ["blocks", "bert"])
def test_everything_given_to_the_root_is_found_without_documents(name: str, proven: Proven, tmp_path: Path) -> None:
    case, tagged = models.case(name), load(proven(name))
    root = tagged.calls.calls[0].call
    for node in tagged.nodes:
        for key in (keys.CALLS, keys.HIERARCHY_TAGS):
            node.metadata_props.pop(key, None)
        node.metadata_props.update({keys.CALL: root.address, keys.SOURCE_MODULE: tagged.tags[root]})
        node.metadata_props[keys.NAMESPACE] = tagged.tags[root][1:]
    ir.save(tagged.model, tmp_path / "x.onnx")
    report = verify(case.build(), case.inputs(), tmp_path / "x.onnx")
    assert report.verdict == "differ"
    assert sum("tags are wrong" in call.reason for call in report.calls) > len(report.calls) // 2


def test_weights_that_start_out_equal_are_told_apart(proven: Proven, tmp_path: Path) -> None:
    case, tagged = models.case("blocks"), load(proven("blocks"))
    users = {value.name: node for node in tagged.model.graph for value in node.inputs if value is not None}
    one, other = users["up.0.norm.weight"], users["up.1.norm.weight"]
    first, second = one.inputs[1], other.inputs[1]
    one.replace_input_with(1, second)
    other.replace_input_with(1, first)
    ir.save(tagged.model, tmp_path / "x.onnx")
    assert verify(case.build(), case.inputs(), tmp_path / "x.onnx").verdict == "differ"
    assert verify(case.build(), case.inputs(), tmp_path / "x.onnx", perturb=False).verdict != "not compared"


class Masked(torch.nn.Module):
    def __init__(self, ignore: bool) -> None:
        super().__init__()
        self.linear, self.ignore = torch.nn.Linear(4, 4), ignore

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (mask * 0 + 1 if self.ignore else mask)[..., None]


def test_a_mask_of_ones_does_not_hide_that_it_is_ignored(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 6, 4), "mask": torch.ones(2, 6, dtype=torch.long)}
    torch.manual_seed(0)
    right = Masked(ignore=False).eval()
    wrong = Masked(ignore=True).eval()
    wrong.load_state_dict(right.state_dict())
    export(wrong, inputs, tmp_path / "x.onnx")
    report = verify(right, inputs, tmp_path / "x.onnx")
    assert {one.what: one.status for one in report.others} == {
        "padded masks": "differ",
        "other numbers": "agree",
        "larger and smaller numbers": "agree",
    }
    assert report.verdict == "differ"


def test_what_is_not_repeatable_is_named_before_an_export() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return x + self.steps

    class Random(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.nn.functional.dropout(x, training=True), x[:0]

    x = torch.ones(4, 4)
    assert [(one.kind, one.where) for one in find_unrepeatable(Counting(), (x,))] == [("buffer", "steps")]
    found = {(one.kind, one.where) for one in find_unrepeatable(Random(), (x,))}
    assert found == {("empty output", "output.1"), ("random", "output.0")}
    assert find_unrepeatable(models.case("blocks").build(), models.case("blocks").inputs()) == []


def test_reference_values_of_another_file_are_refused(proven: Proven, tmp_path: Path) -> None:
    path = copied(proven("blocks"), tmp_path)
    shutil.copyfile(reference_path(proven("bert")), reference_path(path))
    with pytest.raises(FileFormatError, match="does not belong to"):
        verify_reference(path)


def test_damaged_reference_values_are_refused(proven: Proven, tmp_path: Path) -> None:
    path = copied(proven("blocks"), tmp_path)
    reference_path(path).write_bytes(reference_path(path).read_bytes()[:-1])
    with pytest.raises(FileFormatError, match="is damaged"):
        verify_reference(path)


def test_a_model_that_is_not_the_exported_one_is_refused_before_anything_runs(proven: Proven) -> None:
    other = models.case("blocks")
    with pytest.raises(UsageError, match=r"this is not the model that .* was exported from"):
        verify(other.build(), other.inputs(), proven("bert"))


def test_inputs_that_do_not_fit_are_refused(proven: Proven) -> None:
    case = models.case("bert")
    with pytest.raises(InputsError, match="the file takes 2 inputs"):
        verify(case.build(), {"input_ids": case.inputs()["input_ids"]}, proven("bert"))
    wrong = {name: tensor[:, :5] for name, tensor in case.inputs().items()}
    with pytest.raises(UsageError, match="ONNX Runtime"):
        verify(case.build(), wrong, proven("bert"))


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    case = models.case("bert")
    path = tmp_path / "bert.onnx"
    export(case.build(), case.inputs(), path, reference=True, weights="copy")
    assert verify_reference(path).agrees
    path.with_name("bert.onnx.data").unlink()
    with pytest.raises(UsageError, match=r"bert\.onnx\.data"):
        verify_reference(path)


def test_a_file_that_is_not_a_descendant_is_refused(proven: Proven) -> None:
    with pytest.raises(UsageError, match="not a descendant"):
        verify_against(proven("bert"), proven("blocks"))


# --- what a tool changed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["onnxscript", "ort-extended"])
def test_a_sound_file_that_a_tool_folded_is_not_accused(tool: str, proven: Proven, tmp_path: Path) -> None:
    case = models.case("equal-values")
    optimize_file(proven("equal-values"), tool, tmp_path / "x.onnx")
    report = verify(case.build(), case.inputs(), tmp_path / "x.onnx")
    assert report.verdict == "agree"
    assert not report.perturbed
    assert re.search("another tool folded or merged", report.notes[0])


def test_a_parameter_that_lost_its_name_is_accused(proven: Proven, tmp_path: Path) -> None:
    case, path = models.case("blocks"), copied(proven("blocks"), tmp_path)
    tagged = load(path)
    for key in (keys.PARAMETER, keys.TRANSFORM):
        tagged.model.graph.initializers["up.0.linear.weight"].metadata_props.pop(key, None)
    ir.save(tagged.model, tmp_path / "x.onnx")
    report = verify(case.build(), case.inputs(), tmp_path / "x.onnx")
    assert report.parameters is not None
    assert report.parameters.unaccounted == ["up.0.linear.weight"]
    assert report.verdict == "differ"


def test_a_recurrence_in_another_layout_is_compared_and_its_batch_is_not_reversed(
    proven: Proven, tmp_path: Path
) -> None:
    case, tagged = models.case("recurrent"), load(proven("recurrent"))
    report = verify(case.build(), case.inputs(), proven("recurrent"))
    assert {call.address: call.status for call in report.calls} == {"": "agree", "lstm": "agree", "gru": "agree"}
    lstm = next(node for node in tagged.model.graph if node.op_type == "LSTM")
    value = lstm.outputs[0]
    backwards = ir.Value(name="backwards", const_value=ir.tensor(np.array([1, 0])))
    backwards.type, backwards.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([2])
    tagged.model.graph.initializers.add(backwards)
    uses = list(value.uses())
    turned = ir.Node("", "Gather", [value, backwards], [ir.AttrInt64("axis", 2)], metadata_props=lstm.metadata_props)
    tagged.model.graph.insert_after(lstm, turned)
    for user, index in uses:
        user.replace_input_with(index, turned.outputs[0])
    turned.outputs[0].name, turned.outputs[0].type, turned.outputs[0].shape = "turned", value.type, value.shape
    ir.save(tagged.model, tmp_path / "x.onnx")
    report = verify(case.build(), case.inputs(), tmp_path / "x.onnx")
    assert report.diverging is not None
    assert report.diverging.address == "lstm"


def put_after(value: ir.Value, operator: str, operand: Any) -> None:
    """Let the users of a value take the result of an operation on it and a constant, in the same call."""
    node = value.producer()
    assert node is not None and isinstance(node.graph, ir.Graph)
    constant = ir.Value(name="planted.constant", const_value=ir.tensor(operand))
    node.graph.initializers.add(constant)
    uses = list(value.uses())
    planted = ir.Node("", operator, [value, constant], metadata_props=node.metadata_props, name="planted")
    node.graph.insert_after(node, planted)
    for user, index in uses:
        user.replace_input_with(index, planted.outputs[0])
    result = planted.outputs[0]
    result.name, result.type, result.shape = "planted.result", value.type, value.shape


def test_a_fault_among_tokens_in_the_order_of_their_experts_is_found_in_its_call(
    proven: Proven, tmp_path: Path
) -> None:
    """A wrong activation of rows in another order than PyTorch's, one behind it, and a wrong order of the rows."""
    case, address = models.case("mixtral"), "model.layers.1.mlp.experts"

    def with_fault(plant: Callable[[ir.Node], None]) -> VerifyReport:
        file = load(proven("mixtral")).model
        owned = (one for one in file.graph if one.metadata_props[keys.CALL] == f"{address}.act_fn")
        plant(next(one for one in owned if one.op_type == "Sigmoid"))
        ir.save(file, tmp_path / "x.onnx")
        return verify(case.build(), case.inputs(), tmp_path / "x.onnx")

    def other(sigmoid: ir.Node) -> None:
        sigmoid.op_type = "Tanh"

    def scaled(sigmoid: ir.Node) -> None:
        (product,) = sigmoid.outputs[0].consumers()
        put_after(product.outputs[0], "Mul", np.float32(1.0009))

    def turned(sigmoid: ir.Node) -> None:
        value = sigmoid.inputs[0]
        assert value is not None and value.shape is not None
        put_after(value, "Gather", np.arange(int(value.shape[0]))[::-1].copy())

    for plant in (other, scaled):
        report = with_fault(plant)
        assert {call.address for call in report.calls if call.status == "differ"} == {f"{address}.act_fn"}
    report = with_fault(turned)
    assert report.diverging is not None
    assert report.diverging.address == address


def test_runs_that_are_kept_give_the_same_report(proven: Proven) -> None:
    case, kept = models.case("bert"), KeptRuns()
    model, inputs = case.build(), case.inputs()
    first, second = (run_verify(model, inputs, proven("bert"), kept=kept) for _ in range(2))
    assert first == second == verify(model, inputs, proven("bert"))
