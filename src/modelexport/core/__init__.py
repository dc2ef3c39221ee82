"""Frozen values and rules that every room knows: calls, owners, tags, selectors; stages and text."""
