"""The base of this package's modes that see every operation of a run."""

from __future__ import annotations

from modelexport.pytorch.private_torch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """Sees operations inside branches too, and what was compiled runs as before once it is left.

    ``torch.cond`` compiles its branches when it runs. PyTorch gives up compiling under a mode that does not ignore
    that, and remembers it for the code: the same model would fail in every later run of the process.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs under the mode, which compilation does not see."""
        return True
