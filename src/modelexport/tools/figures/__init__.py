"""Figures by module: cost, profile, and the report of all of them as a page."""
