"""Hook of `mkdocs build`: pages of the reference made from the code, and what differs between GitHub and the site.

The reference of commands is what their parsers know, that of Python is mkdocstrings on the public names. Pages are
written for GitHub: a link to a file outside of docs/ is only its name here, and an example is shown with its code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from modelexport import _PUBLIC
from modelexport.cli.command_list import _GROUPS, COMMANDS
from modelexport.cli.command_parsers import app

ROOT = Path(__file__).parent.parent


def on_config(config: Any) -> None:
    """List the decisions in the navigation: there are many, and their order is that of their numbers."""
    pages = [f"decisions/{page.name}" for page in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    config.nav[-1]["Developers"].append({"Decisions": pages})


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for name, text in (("commands", commands()), ("python", python())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))


def commands() -> str:
    import typer  # noqa: TID251 - it shows the command line

    known: Any = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Made from the parsers of the commands; `modelexport COMMAND --help` prints the same.",
        "",
    ]
    for group, title in _GROUPS.items():
        lines += [f"## {title}", ""]
        for name in (name for name, one in COMMANDS.items() if one.group == group):
            command = known.commands[name]
            with command.make_context(f"modelexport {name}", [], resilient_parsing=True) as context:
                lines += [f"### {name}", "", *told(command, context), ""]
    return "\n".join(lines)


def told(command: Any, context: Any) -> list[str]:
    """Usage, help and a table of the arguments and options of one command."""
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = ["```", " ".join(usage.split()), "```", "", " ".join((command.help or "").split())]
    sections: dict[str, list[str]] = {"Arguments": []}
    for param in command.get_params(context):
        if (record := param.get_help_record(context)) is not None:
            argument = param.param_type_name == "argument"
            title = "Arguments" if argument else param.rich_help_panel or "Options"
            name, text = (cell.replace("|", "\\|") for cell in record)
            sections.setdefault(title, []).append(f"| `{name}` | {text.replace('<', '&lt;')} |")
    for title, rows in sections.items():
        lines += ["", f"| {title} | |", "|---|---|", *rows] if rows else []
    return lines


def python() -> str:
    lines = ["# Python", "", "The public names of `modelexport`, from their docstrings.", ""]
    for name, module in sorted(_PUBLIC.items()):
        lines += [f"::: {module}.{name}", f"    options: {{heading: modelexport.{name}, toc_label: {name}}}", ""]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def here(link: re.Match[str]) -> str:
        target = (folder / link[2].partition("#")[0]).resolve()
        if not link[2].startswith("..") or target.is_relative_to(ROOT / "docs"):
            return link[0]
        return f"`{target.relative_to(ROOT)}`"

    markdown = re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", here, markdown)
    markdown = re.sub(r"`[^`\n]*`", lambda span: span[0].replace("\\|", "|"), markdown)
    markdown = re.sub(
        r"^`(examples/\w+\.py)`:.*$", lambda line: f"{line[0]}\n\n{code(line[1])}\n\nprints", markdown, flags=re.M
    )
    return re.sub(
        r"^\[.*\]\((readers/read_tags\.\w+)\)",
        lambda line: f"{line[0]}:\n\n{code(f'docs/{line[1]}')}\n\n",
        markdown,
        flags=re.M,
    )


def code(path: str) -> str:
    """A file as a block of code."""
    return f"```{'js' if path.endswith('.js') else 'python'}\n{(ROOT / path).read_text(encoding='utf-8')}```"
