"""All private names of torch that this project imports; ``tests/pytorch/test_private_torch.py`` tests them.

There is no public interface for these: running a model without values, recording the inputs and results of operations,
recognizing the tensors of ``torch.func``, and flattening nested lists and dictionaries as torch does.
"""

from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
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
    "is_functorch_wrapped_tensor",
    "peek_interpreter_stack",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "treespec_dumps",
]
