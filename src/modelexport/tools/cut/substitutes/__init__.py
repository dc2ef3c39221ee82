"""Replacements for a module: another model, one operator, or nothing."""

from modelexport.tools.cut.substitutes.custom_operator import CustomOperator
from modelexport.tools.cut.substitutes.from_model import FromModel
from modelexport.tools.cut.substitutes.substitute import Identity, Parts, Site, Substitute

__all__ = ["CustomOperator", "FromModel", "Identity", "Parts", "Site", "Substitute"]
