"""The documentation is right about links, commands, options, Python names and modules."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

import modelexport
from modelexport.capture.patches import TABLE
from modelexport.cli.command_parsers import app
from modelexport.format.package_manifest import UNFINISHED, Generation, Manifest, PartEntry, Start
from modelexport.packages.package_kinds import package_kinds
from pictures import IMAGES, TERMINALS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shown(text: str) -> Iterator[list[str]]:
    """The arguments of every command line in a block, without brackets, alternatives and remarks."""
    for _, block in BLOCK.findall(text):
        for line in block.splitlines():
            if match := re.match(r"(?:\$ )?modelexport (.*)", line):
                yield arguments(re.split(r"\s{2,}|\s#", match[1])[0])


def mentioned(text: str) -> Iterator[list[str]]:
    """The arguments of every command in running text and tables."""
    for code in re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)):
        words = arguments(code.replace("\\|", "|"))
        if words[:1] == ["modelexport"]:
            yield words[1:]
        elif words and words[0] in COMMANDS and any(word.startswith("-") for word in words):
            yield words


def arguments(line: str) -> list[str]:
    words = shlex.split(re.sub(r"[\[\]]", "", line).replace(" | ", " "))
    return [word.split("|")[0] for word in words if word != "..."]


def known_options(command: str) -> set[str]:
    return {name for parameter in COMMANDS[command].params for name in parameter.opts} | {"--help"}


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} does not exist"
        assert path.is_relative_to(ROOT), f"{target} is outside of the project"
        assert not anchor or anchor in anchors(path), f"{target}: there is no such heading"


@by_page
def test_every_command_line_shown_parses(page: Path) -> None:
    for words in shown(page.read_text()):
        assert words[0] in COMMANDS, f"there is no command {words[0]}"
        COMMANDS[words[0]].make_context(words[0], words[1:])


@by_page
def test_every_command_mentioned_has_the_options_it_is_given(page: Path) -> None:
    for words in mentioned(page.read_text()):
        if words and not words[0].startswith("-"):
            assert words[0] in COMMANDS, f"there is no command {words[0]}"
            unknown = {word for word in words if word.startswith("-")} - known_options(words[0])
            assert not unknown, f"{words[0]} has no {unknown}"


@by_page
def test_python_is_python_and_uses_public_names(page: Path) -> None:
    for language, block in BLOCK.findall(page.read_text()):
        if language == "python":
            ast.parse(block)
            assert set(re.findall(r"\bmodelexport\.(\w+)\(", block)) <= set(modelexport.__all__)


def test_a_wrong_command_line_is_found() -> None:
    line = next(shown("```\n$ modelexport tree FILE.onnx --deep 2    wrong\n```\n"))
    with pytest.raises(typer.exceptions.TyperException, match="--deep"):
        COMMANDS[line[0]].make_context(line[0], line[1:])


def test_the_export_page_has_every_option_of_export() -> None:
    page = (ROOT / "docs" / "export.md").read_text()
    options = {name for name in known_options("export") if name.startswith("--")} - {"--help", "--output"}
    assert {option for option in options if option not in page} == set()


def test_the_format_page_has_every_key_of_the_manifest_and_every_kind_of_packages() -> None:
    _, _, section = (ROOT / "docs" / "format.md").read_text().partition("## `modelexport.json`")
    entries = (Manifest, PartEntry, Start, Generation)
    fields = {field.encode_name for entry in entries for field in msgspec.structs.fields(entry)}
    kinds = {kind.name for kind in package_kinds()} | {"stages", UNFINISHED}
    assert {name for name in fields | kinds if f"`{name}`" not in section} == set()


def test_the_architecture_page_has_every_room_in_the_order_that_lint_checks() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "modelexport"
    here = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()} | {
        "errors.py",
        "tagged_model.py",
        "testing.py",
    }
    listed = [room for room in re.findall(r"^\| `([\w/.]+)` \|", page, re.M) if room in here]
    assert set(listed) == here
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    rooms = [room.removesuffix(".py").removesuffix("/") for room in listed]
    assert rooms == [layer for layer in reversed(contract["layers"]) if layer != "__main__"]


def test_every_file_that_the_architecture_page_names_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "modelexport"
    named = set(re.findall(r"`((?:\w+/)+\w+\.py|(?:\w+/)+)`", page))
    assert [
        name for name in named if not any((base / name).exists() for base in (package, ROOT, package / "capture"))
    ] == []


def test_every_name_that_the_architecture_page_says_is_in_a_file_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    names = r"(?:`[\w.]+`(?:, | and ))*`[\w.]+`"
    places = re.findall(rf"({names}) (?:of|in) `((?:\w+/)*\w+\.py)`", page)
    stored = {file: (ROOT if file.startswith("tests/") else SOURCE / "modelexport") / file for _, file in places}
    trees = {file: ast.parse(path.read_text()) for file, path in stored.items()}
    named = {(name, file) for joined, file in places for name in re.findall(r"[\w.]+(?=`)", joined)}
    assert named
    assert [
        (name, file) for name, file in named if name[-3:] != ".py" and not is_there(name.split("."), trees[file])
    ] == []


def test_the_architecture_page_lists_each_private_name_of_another_package_beside_its_file() -> None:
    package = SOURCE / "modelexport"
    texts = {file.relative_to(package).as_posix(): file.read_text() for file in package.rglob("*.py")}
    defined = re.compile(r"(?:def |class |self\.|^ *)(_[a-zA-Z]\w*)(?=[(:]|.*=[^=])", re.M)
    own = {"_exit", "_fields", "_getframe", "_lru_cache_wrapper", "_make", "_replace"}  # of Python
    own.update(*map(defined.findall, texts.values()))
    used = re.compile(
        r"\.(?<=[\w)\]]\.)(?<!ops\.)(?<!aten\.)(_[a-zA-Z]\w*)|attr\(\S+, \"(_[a-zA-Z]\w*)"
        r"|^from (?!modelexport).* import (_\w+)",
        re.M,
    )
    _, _, section = (ROOT / "docs" / "architecture.md").read_text().partition("## Private names")
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = [(tuple(re.findall(r"`([\w/.]+)`", files)), set(re.findall(r"\w+", names))) for files, names in rows]
    listed.append((("capture/",), set(re.findall(r"\w+", " ".join(row.where for row in TABLE.values())))))
    found = {(path, "".join(names)) for path, text in texts.items() for names in used.findall(text)}
    assert {
        (path, name)
        for path, name in found
        if name not in own and not any(path.startswith(files) and name in names for files, names in listed)
    } == set()


def is_there(names: Sequence[str], scope: ast.AST) -> bool:
    """Whether a scope defines a dotted name, or imports it from a module that does."""
    first, *rest = names
    for node in ast.walk(scope):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if name == first:
                if not rest or is_there(rest, node):
                    return True
            case ast.Name(id=name, ctx=ast.Store()) if names == [name]:
                return True
            case ast.ImportFrom(module=str(module), names=imported):
                there = [one.name for one in imported if (one.asname or one.name) == first]
                if there and is_ours([*module.split("."), *there, *rest]):
                    return True
    return False


def is_ours(names: Sequence[str]) -> bool:
    """Whether a dotted name is a module of the source, or is in one."""
    for end in range(len(names), 0, -1):
        path = SOURCE.joinpath(*names[:end])
        for file in (path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return end == len(names) or is_there(names[end:], ast.parse(file.read_text()))
    return False


def stale(file: Path) -> Iterator[str]:
    """The references of a file to modules, functions and classes that do not exist.

    ``.name`` is in the file's folder; other names are whole, or those of the file itself.
    """
    text = file.read_text()
    for name in re.findall(r":(?:mod|func|class|meth|attr|data|exc|const):`~?([^`]+)`", text):
        whole = ".".join(file.parent.relative_to(SOURCE).parts) + name if name.startswith(".") else name
        if not is_ours(whole.split(".")) and not is_there(name.split("."), ast.parse(text)):
            yield name


def test_what_docstrings_refer_to_is_there() -> None:
    found = {str(file.relative_to(SOURCE)): [*stale(file)] for file in SOURCE.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}


def test_a_stale_reference_is_found() -> None:
    (node,) = ast.parse("def of(x): return x").body
    assert is_there(["of"], node)
    assert not is_there(["off"], node)
    assert is_ours(["modelexport", "core", "calls", "ModuleCall", "parse"])
    assert not is_ours(["modelexport", "core", "calls", "ModuleCall", "parses"])
    assert not is_ours(["modelexport", "core", "callss"])


def test_the_readme_has_the_demo_first_and_says_what_matters_before_installing() -> None:
    readme = (ROOT / "README.md").read_text()
    heads = ["Five commands", "What it is not for", "Tested on", "Install"]
    assert re.findall(r"^(?:make |## )(.+?)(?:  .*)?$", readme, re.M)[:6] == ["demo", *heads, "test"]


def test_every_page_is_linked() -> None:
    pages = {page.name: page.read_text() for page in ROOT.glob("docs/*.md")}
    linked = {name for page in pages.values() for name in re.findall(r"\]\(([\w-]+\.md)", page)}
    assert pages.keys() - linked - {"index.md"} == set()


def test_the_commands_of_the_pictures_parse_and_every_picture_is_shown() -> None:
    for line in (line for lines in TERMINALS.values() for line in lines):
        _, command, *words = shlex.split(line)
        COMMANDS[command].make_context(command, words)
    pages = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in IMAGES.iterdir() if f"images/{path.name}" not in pages] == []
    assert [name for name in TERMINALS if not (IMAGES / f"{name}.svg").exists()] == []
