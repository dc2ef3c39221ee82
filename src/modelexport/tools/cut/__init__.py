"""Modules of a file cut out, split off, replaced or renamed."""
