"""One test for each promise of docs/security.md that is not covered by a sweep."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers.dynamic_module_utils
from safetensors.numpy import load_file, save_file

import commands
from corpus import Tiny, copied, tiny
from limited import run
from modelexport import export, load
from modelexport.core.calls import CallTree, ModuleCall, TracedCall
from modelexport.core.selectors import select_calls
from modelexport.core.text import as_markdown, printable, text_without_paths
from modelexport.errors import FileFormatError, UsageError
from modelexport.runtime import input_files
from modelexport.tables import html_page
from modelexport.tagged.documents.reader import load_dag
from mutators import FORMULAS

READERS = [
    ["tree", "FILE", "--check"],
    ["nodes", "FILE", "."],
    ["compare", "FILE", "plain.onnx"],
    ["extract", "FILE", "blocks.0", "-o", "out.onnx"],
    ["adopt", "FILE", "-o", "out.onnx"],
    ["retag", "FILE", "--from", "plain.onnx", "-o", "out.onnx"],
    ["retag", "plain.onnx", "--from", "FILE", "-o", "out.onnx"],
    ["update-weights", "FILE", "new.safetensors", "-o", "out.onnx"],
    ["optimize", "FILE", "--with", "onnxscript", "-o", "out.onnx"],
    ["verify", "FILE", "--against", "plain.onnx"],
]


@pytest.fixture
def place(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = copied(corpus, tmp_path / "place")
    monkeypatch.chdir(folder)
    return folder


# --- nobody is let in -------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_the_models_folder_runs_no_code(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(corpus / "checkpoint", tmp_path / "model"))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    yes = commands.run("hierarchy", "model", "--mode", "traced", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    assert yes.returncode == 0, yes.stderr


def test_transformers_still_has_the_time_to_wait_that_makes_its_question_impossible() -> None:
    assert transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0


def rewritten(file: Path) -> None:
    """The same tensors at other offsets: longer metadata moves them."""
    save_file(load_file(file), file, metadata={"more": "x" * 80})


def swapped(file: Path) -> None:
    """Another header of the same length, and a file of the same size."""
    file.write_bytes(file.read_bytes().replace(b"blocks.0", b"blocks.9"))


@pytest.mark.sweep
@pytest.mark.parametrize("change", [rewritten, swapped])
@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_linked_weights_that_changed_are_refused(
    command: list[str], change: Callable[[Path], None], place: Path
) -> None:
    change(place / "linked.safetensors")
    ended = run(*(part.replace("FILE", "linked.onnx") for part in command))
    assert ended.status == (1 if command[0] == "tree" else 2)
    assert "linked.safetensors was changed after the export" in ended.out + ended.err
    with pytest.raises(FileFormatError, match="was changed after the export"):
        load(place / "linked.onnx")


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_data_of_another_run_is_refused(command: list[str], place: Path) -> None:
    data = place / "copied.onnx.data"
    data.write_bytes(bytes(len(data.read_bytes())))
    ended = run(*(part.replace("FILE", "copied.onnx") for part in command))
    if command[:2] == ["retag", "FILE"]:  # written by another tool under the same name
        return
    assert ended.status == (1 if command[0] == "tree" else 2)
    assert "copied.onnx.data does not belong to the model beside it" in ended.out + ended.err


def test_tensors_are_checked_again_when_their_file_changes_after_it_was_loaded(place: Path) -> None:
    parameters = load("linked.onnx")["blocks.0"].parameters
    rewritten(place / "linked.safetensors")
    with pytest.raises(FileFormatError, match="was changed after the export"):
        parameters["blocks.0.inner.weight"].const_value.numpy()


def test_our_own_hard_links_are_read_and_others_are_not(place: Path) -> None:
    os.link("linked.safetensors", "second-name")
    assert run("extract", "linked.onnx", "blocks.0", "-o", "out.onnx").status == 0
    model = (place / "copied.onnx").read_bytes().replace(b"modelexport.data", b"modelexport.nope")
    (place / "copied.onnx").write_bytes(model)
    os.link("copied.onnx.data", "third-name")
    ended = run("extract", "copied.onnx", "blocks.0", "-o", "other.onnx")
    assert ended.status == 2
    assert "a hard link" in ended.err


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\u202eb", "\x9b2J", "\x07", "\ud800", "a\u200bb", "\r"])
def test_what_controls_a_terminal_is_shown_as_an_escape(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_printable_text_stays() -> None:
    assert printable("Größe\t层 \N{GRINNING FACE}\n") == "Größe\t层 \N{GRINNING FACE}\n"


def test_folders_of_this_machine_are_not_in_an_exporters_message(tmp_path: Path) -> None:
    text = f'File "{tmp_path}/site-packages/torch/x.py", line 3, in /BertModel/BertLayer.0 at {tmp_path}/a b/model.py:4'
    assert text_without_paths(text) == 'File "x.py", line 3, in /BertModel/BertLayer.0 at model.py:4'


def test_what_a_front_end_said_has_no_folders_of_this_machine_in_the_files_of_the_export(place: Path) -> None:
    (place / "failing.py").write_text(FAILING.replace("HERE", str(place)))
    assert run("export", "failing.py:make", "-o", "out.onnx").status == 0
    for file in place.glob("out.*"):
        assert str(place).encode() not in file.read_bytes(), file
    assert "cannot open thing.txt" in (place / "out.hierarchy.json").read_text()


FAILING = """
import warnings
import torch
from torch import nn

class Failing(nn.Module):
    def forward(self, x):
        warnings.warn("see HERE/failing.py and file://HERE/x y/z.py")
        if torch.compiler.is_exporting():
            raise RuntimeError("cannot open HERE/thing.txt")
        return x + 1

def make():
    return Failing(), {"x": torch.rand(2, 4)}
"""


@pytest.mark.sweep
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula[:20])
def test_a_size_that_is_a_formula_is_never_executed_and_takes_no_time(formula: str, place: Path) -> None:
    model = onnx.load("plain.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = formula
    (place / "formula.onnx").write_bytes(model.SerializeToString())
    assert run("cost", "formula.onnx").status == 0
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "glob", ["*a" * 60 + "b", "**." * 60 + "x", "a.**.a.**.a.**.a.**.z", "*a[ab]*a*a*a*a*a*a", "[0-9999]" * 9]
)
def test_no_glob_takes_long(glob: str) -> None:
    names = {ModuleCall(".".join(["a" * 40] * 4) + f".{n}", 0): f"/{n}" for n in range(50)}
    calls = CallTree(tuple(TracedCall(call, None, 0, None, None) for call in names))
    before = time.process_time()
    with pytest.raises(UsageError):
        select_calls([glob], calls, names)
    assert time.process_time() - before < 5


def test_a_file_of_inputs_is_not_unpacked_beyond_its_limit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed("zeros.npz", x=np.zeros((1000, 1000)))
    monkeypatch.setattr(input_files, "INPUT_BYTES", 10**6)
    ended = run("profile", "plain.onnx", "--inputs", "zeros.npz")
    assert ended.status == 2
    assert "holds 8,000,128 bytes, and at most 1,000,000 are read" in ended.err


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", "a`b", "![x](http://x)", "a|b", "@someone", "a\nb", "\x1b[31m"]
)
def test_a_name_in_markdown_is_code(name: str) -> None:
    shown = as_markdown(name)
    ticks = shown[: len(shown) - len(shown.lstrip("`"))]
    assert ticks
    assert shown.endswith(ticks)
    assert ticks not in shown[len(ticks) : -len(ticks)]
    assert "|" not in shown.replace("\\|", "")
    assert shown.isprintable()


def test_scripts_of_a_page_write_no_name_as_html() -> None:
    parts = [path for path in Path(html_page.__file__).with_name("page").iterdir() if path.name != "dagre.min.js"]
    assert len(parts) > 10
    for part in parts:
        assert not re.findall(r"\b(?:inner|outer)HTML\b|\binsertAdjacentHTML\b|\bdocument\.write", part.read_text())


def test_a_name_in_a_page_ends_no_script(place: Path) -> None:
    model = onnx.load("flat.onnx")
    model.graph.node[0].name = "</script><script>alert(1)</script>"
    (place / "evil.onnx").write_bytes(model.SerializeToString())
    assert run("report", "evil.onnx", "-o", "out.html").status == 0
    assert "alert(1)" in Path("out.html").read_text()
    assert "<script>alert" not in Path("out.html").read_text()


# --- nothing is lost --------------------------------------------------------------------------------------------------

OUTPUTS = [
    ["extract", "copied.onnx", "blocks.0"],
    ["adopt", "copied.onnx"],
    ["retag", "copied.onnx", "--from", "plain.onnx"],
    ["optimize", "copied.onnx", "--with", "onnxscript"],
    ["update-weights", "copied.onnx", "new.safetensors"],
    ["strip", "copied.onnx"],
    ["inline", "copied.onnx"],
    ["export", "factory.py:make"],
]


@pytest.mark.parametrize("command", OUTPUTS, ids=lambda command: command[0])
def test_an_output_that_would_destroy_something_is_refused(command: list[str], place: Path) -> None:
    os.mkfifo("fifo")
    (place / "link").symlink_to("plain.onnx")
    (place / "x.onnx.data").mkdir()
    inputs = ["factory.py"] if command[0] == "export" else [command[1], f"{command[1]}.data"]
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}
    for output in ("/dev/null", "fifo", "link", "x.onnx", "y.onnx.data", "y.hierarchy.json", ".", *inputs):
        ended = run(*command, "-o", output)
        assert ended.status == 2, output
        assert ended.err.startswith("modelexport: "), output
        assert ended.err.count("\n") == 1, ended.err
    assert {path: path.read_bytes() for path in place.iterdir() if path.is_file()} == before
    assert Path("/dev/null").is_char_device()


def test_an_output_beside_which_the_data_of_an_input_would_be_replaced_is_refused(place: Path) -> None:
    (place / "a.onnx").write_bytes((place / "copied.onnx").read_bytes())
    ended = run("adopt", "a.onnx", "-o", "copied.onnx")
    assert ended.status == 2
    assert "holds weights of a.onnx" in ended.err


@pytest.mark.parametrize("suffix", [".hierarchy.json", ".dag.json", ".operations.json"])
def test_documents_of_another_export_are_not_used(suffix: str, place: Path) -> None:
    """The model is read without them: they never make a command refuse it."""
    shutil.copy(f"copied{suffix}", f"functions{suffix}")
    shutil.copy(f"functions{suffix}", f"plain{suffix}")
    (place / f"plain{suffix}").write_bytes((place / f"plain{suffix}").read_bytes() + b"\n")
    for command in (["tree", "plain.onnx"], ["nodes", "plain.onnx", "."], ["compare", "plain.onnx", "flat.onnx"]):
        ended = run(*command)
        assert ended.status == 0, ended.err
        is_told = f"not used: plain{suffix} does not belong to plain.onnx" in ended.err
        assert is_told == (suffix == ".hierarchy.json" and command[0] == "compare")
    assert (load("plain.onnx").hierarchy is None) == (suffix == ".hierarchy.json")
    if suffix == ".dag.json":
        with pytest.raises(FileFormatError, match="does not belong"):
            load_dag("plain.dag.json")


def test_reference_values_of_another_export_are_refused(place: Path) -> None:
    assert run("verify", "plain.onnx").status == 0
    assert run("update-weights", "plain.onnx", "new.safetensors", "-o", "new.onnx").status == 0
    shutil.copy("plain.reference.safetensors", "new.reference.safetensors")
    ended = run("verify", "new.onnx")
    assert ended.status == 2
    assert "was made with other weights" in ended.err


# --- it stands firm ---------------------------------------------------------------------------------------------------


def test_loading_in_a_loop_needs_no_more_file_descriptors(place: Path) -> None:
    import gc

    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    load("plain.onnx")
    before = opened()
    gc.disable()
    try:
        for _ in range(30):
            load("plain.onnx")
        assert opened() <= before
        parameters = load("plain.onnx").model.graph.initializers  # the tensors outlive their model
        arrays = [value.const_value.numpy() for value in parameters.values()]
    finally:
        gc.enable()
    assert all(array.size for array in arrays)


def test_two_threads_that_export_get_their_own_call_trees(tmp_path: Path) -> None:
    class Other(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[1](x))

    state = sys.stdout, sys.stderr, logging.root.manager.disable, torch.is_grad_enabled()
    calls: dict[str, int] = {}

    def work(name: str, model: torch.nn.Module) -> None:
        result = export(
            model,
            tiny()[1],
            tmp_path / f"{name}.onnx",
            frontend="torchscript",
            granularity="all",
            verify=True,
            check=False,
        )
        assert result.verified is not None
        assert result.verified.agrees
        calls[name] = len(load(tmp_path / f"{name}.onnx"))

    threads = [threading.Thread(target=work, args=(kind.__name__, kind())) for kind in (Tiny, Other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == {"Tiny": 8, "Other": 4}
    assert state == (sys.stdout, sys.stderr, logging.root.manager.disable, torch.is_grad_enabled())


@pytest.mark.parametrize("opset", [5, 0, 9999, -1])
def test_an_opset_that_no_front_end_writes_is_refused_before_the_model_runs(opset: int, tmp_path: Path) -> None:
    ended = run("export", "nowhere", "-o", tmp_path / "x.onnx", "--opset", str(opset))
    assert ended.status == 2
    assert f"no front end writes opset {opset}: choose one from 9" in ended.err
    with pytest.raises(UsageError, match="no front end writes opset" if opset >= 0 else "opset takes int of 0 or more"):
        export(Tiny(), tiny()[1], tmp_path / "x.onnx", opset=opset)
