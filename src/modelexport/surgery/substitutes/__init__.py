"""Replacements for a module: another model, one operator, or nothing."""

from modelexport.surgery.substitutes.custom_operator import CustomOperator
from modelexport.surgery.substitutes.from_model import FromModel
from modelexport.surgery.substitutes.substitute import Identity, Parts, Site, Substitute

__all__ = ["CustomOperator", "FromModel", "Identity", "Parts", "Site", "Substitute"]
