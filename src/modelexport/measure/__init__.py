"""Figures by module: cost, profile, and the table of all columns."""
