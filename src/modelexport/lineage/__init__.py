"""Owners of a graph that something changed: optimizers, other tools (`retag`), other exporters (`adopt`)."""
