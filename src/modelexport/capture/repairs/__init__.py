"""Translations of operators that ``torch.onnx`` has none for, or a wrong one: rules on operators.

Tables of them are in ``translations.py`` and ``decompositions.py``, and of functions that no front end can capture in
``untraceable.py``; ``docs/repairs.md`` lists all repairs with their tests, and ``scripts/obsolete_repairs`` those that
the installed versions no longer need.
"""
