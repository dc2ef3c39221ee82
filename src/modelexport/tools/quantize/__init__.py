"""Precision by module: quantize, recipes, sensitivity, search within a bound."""
