"""Figures by module call: the table that all sources fill, and its forms as a page and as node data."""
