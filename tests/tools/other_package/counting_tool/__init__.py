"""A package that adds a command and a kind of packages to modelexport, as others can: all that it needs is here."""

from __future__ import annotations

from modelexport.tools import Command, Tool

TOOL = Tool(
    name="counting",
    commands={"count": Command("look", "counting_tool.count_command:count", "count the operators of a file")},
    kinds=("counting_tool.autoencoder_kind:KIND",),
)
