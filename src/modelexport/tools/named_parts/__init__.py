"""Packages whose parts a person names: methods of a model, and functions of it."""
