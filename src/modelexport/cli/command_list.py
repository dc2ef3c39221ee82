"""The commands: what each does in a few words, and the page that ``--help`` shows."""

from __future__ import annotations

from modelexport.core.version import __version__
from modelexport.tools import Command, with_commands_of_tools


def _core(name: str, group: str, help_line: str, *, runs_model: bool = False) -> Command:
    """A command of the core: a function in a file, both with its name."""
    file = name.replace("-", "_")
    return Command(group, f"modelexport.cli.commands.{file}:{file}", help_line, runs_model)


COMMANDS = with_commands_of_tools(
    {
        "export": _core("export", "export", "export a model to a file, or to a folder of parts", runs_model=True),
        "hierarchy": _core("hierarchy", "export", "show a model's module tree without exporting it", runs_model=True),
        "inputs": _core("inputs", "export", "show or save the example inputs of a model", runs_model=True),
        "internals": _core(
            "internals", "export", "show what PyTorch's exporters record about modules", runs_model=True
        ),
        "example": _core("example", "look", "write a small file to try commands with"),
        "documents": _core("documents", "look", "write the tables that --no-documents omitted"),
        "tree": _core("tree", "look", "show the modules in a file"),
        "nodes": _core("nodes", "look", "list the nodes of modules"),
        "verify": _core("verify", "check", "compare a file with PyTorch, module by module", runs_model=True),
        "retag": _core("retag", "change", "restore the tags of a file that a tool changed"),
        "adopt": _core("adopt", "change", "tag a file that another exporter wrote"),
        "strip": _core("strip", "change", "convert tags as attributes to metadata"),
        "inline": _core("inline", "change", "convert a file of functions to a flat one"),
    }
)
"""The commands of the core and of all installed tools by name, in the order in which ``--help`` lists them."""
_GROUPS = {
    "export": "Export",
    "look": "Look into a file",
    "check": "Check",
    "change": "Change a file",
    "package": "Stages and devices",
}
_EXAMPLES = (
    ("modelexport export bert-tiny -o bert.onnx --verify", "export a model, and compare each module with PyTorch"),
    ("modelexport tree bert.onnx", "show its modules"),
    ("modelexport extract bert.onnx encoder.layer.0 -o layer.onnx", "cut a module out"),
)
_OPTIONS = (
    ("--version", "print the version"),
    ("--debug", "show tracebacks"),
    ("--install-completion", "complete commands and options in this shell (--show-completion: print the script)"),
    ("--help", "this page; `modelexport COMMAND --help` lists the options of a command"),
)


def introduction() -> str:
    """What ``modelexport`` alone shows: three examples, and the names of the commands."""
    rows = [f"  {group:<8} {', '.join(_names(group))}" for group in _groups()]
    return "\n".join([*_beginning(), "", *rows, "", "`modelexport --help` says what each command does."])


def overview() -> str:
    """The page that ``modelexport --help`` shows."""
    lines = _beginning()
    for group, title in _groups().items():
        lines += ["", title, *(f"  {name:<16}{COMMANDS[name].help}" for name in _names(group))]
    lines += ["", "Options", *(f"  {name:<22}{what}" for name, what in _OPTIONS)]
    return "\n".join(lines)


def _beginning() -> list[str]:
    lines = [f"modelexport {__version__}: PyTorch models as ONNX files, with the exact module call on every node.", ""]
    for example, what in _EXAMPLES:
        lines += [f"  {example}", f"      {what}"]
    return lines


def _groups() -> dict[str, str]:
    """Our groups with their headings, and those that only packages of others have."""
    return _GROUPS | {one.group: one.group.capitalize() for one in COMMANDS.values() if one.group not in _GROUPS}


def _names(group: str) -> list[str]:
    return [name for name, command in COMMANDS.items() if command.group == group]
