"""Whether a module is a model of transformers, which need not be installed for others."""

from __future__ import annotations

import sys

from torch import nn


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a ``PreTrainedModel``: only a program that has imported transformers has one."""
    return "transformers" in sys.modules and isinstance(model, sys.modules["transformers"].PreTrainedModel)
