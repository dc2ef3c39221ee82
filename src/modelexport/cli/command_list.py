"""The commands: what each does in a few words, and the page that ``--help`` shows."""

from __future__ import annotations

from typing import NamedTuple

from modelexport.core.version import __version__


class Listed(NamedTuple):
    """A command, before its code is imported."""

    group: str
    function: str
    """``file:function``, of ``cli/commands``."""
    help: str
    runs_model: bool = False
    """Whether it may run a model."""


COMMANDS = {
    "export": Listed("export", "export:export", "export a model to a file, or to a folder of parts", True),
    "hierarchy": Listed("export", "hierarchy:hierarchy", "show a model's module tree without exporting it", True),
    "inputs": Listed("export", "inputs:inputs", "show or save the example inputs of a model", True),
    "internals": Listed("export", "internals:internals", "show what PyTorch's exporters record about modules", True),
    "example": Listed("look", "example:example", "write a small file to try commands with"),
    "documents": Listed("look", "documents:documents", "write the tables that --no-documents omitted"),
    "tree": Listed("look", "tree:tree", "show the modules in a file"),
    "select": Listed("look", "select:select", "list nodes of modules in the form that another tool takes"),
    "nodes": Listed("look", "nodes:nodes", "list the nodes of modules"),
    "cost": Listed("look", "cost:cost", "show parameters, operations and memory of each module"),
    "profile": Listed("look", "profile:profile", "run a file, and show the time of each module", True),
    "sensitivity": Listed("look", "sensitivity:sensitivity", "show how much quantizing each module changes the output"),
    "report": Listed("look", "report:report", "write tree, cost and verification to an HTML page"),
    "verify": Listed("check", "verify:verify", "compare a file with PyTorch, module by module", True),
    "devices": Listed("check", "devices:devices", "show the devices of this machine"),
    "compare": Listed("check", "compare:compare", "show how two files differ, module by module"),
    "extract": Listed("change", "extract:extract", "write modules as separate models"),
    "replace": Listed("change", "replace:replace", "replace modules by a model, an operator or nothing"),
    "rename": Listed("change", "rename:rename", "name nodes after their modules"),
    "update-weights": Listed(
        "change", "update_weights:update_weights", "replace the weights of a file, or add LoRA adapters"
    ),
    "quantize": Listed("change", "quantize:quantize", "quantize modules, and keep others bit for bit"),
    "optimize": Listed("change", "optimize:optimize", "run another package's optimizer, and restore the tags"),
    "retag": Listed("change", "retag:retag", "restore the tags of a file that a tool changed"),
    "adopt": Listed("change", "adopt:adopt", "tag a file that another exporter wrote"),
    "strip": Listed("change", "strip:strip", "convert tags as attributes to metadata"),
    "inline": Listed("change", "inline:inline", "convert a file of functions to a flat one"),
    "to-torch": Listed("change", "to_torch:to_torch", "write a file as a module of PyTorch, with its weights"),
    "split": Listed("package", "split:split", "cut a file into stages that run in sequence"),
    "kit": Listed("package", "kit:kit", "write a folder that runs modules on another machine"),
    "place": Listed("package", "place:place", "assign modules to devices"),
}
"""The commands by name, in the order in which ``--help`` lists them."""
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
    rows = [f"  {group:<8} {', '.join(_names(group))}" for group in _GROUPS]
    return "\n".join([*_beginning(), "", *rows, "", "`modelexport --help` says what each command does."])


def overview() -> str:
    """The page that ``modelexport --help`` shows."""
    lines = _beginning()
    for group, title in _GROUPS.items():
        lines += ["", title, *(f"  {name:<16}{COMMANDS[name].help}" for name in _names(group))]
    lines += ["", "Options", *(f"  {name:<22}{what}" for name, what in _OPTIONS)]
    return "\n".join(lines)


def _beginning() -> list[str]:
    lines = [f"modelexport {__version__}: PyTorch models as ONNX files, with the exact module call on every node.", ""]
    for example, what in _EXAMPLES:
        lines += [f"  {example}", f"      {what}"]
    return lines


def _names(group: str) -> list[str]:
    return [name for name, command in COMMANDS.items() if command.group == group]
