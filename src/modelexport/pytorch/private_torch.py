"""What torch calls private and this project imports, in one place; ``tests/pytorch/test_private_torch.py`` tries it.

There is nothing public for it: what a model computes without values, what an operation gets and returns, and nested
lists and dictionaries as torch takes them apart.
"""

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, treespec_dumps

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "treespec_dumps",
]
