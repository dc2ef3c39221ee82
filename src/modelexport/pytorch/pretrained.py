"""Models of transformers, which need not be installed for others."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

from torch import nn

PretrainedModel: TypeAlias = Any
"""A ``PreTrainedModel``: the types of transformers, which need not be installed, are not followed."""


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a ``PreTrainedModel``: only a program that has imported its class has one.

    Nothing is imported: where transformers is installed and cannot be imported, other modules do without it.
    """
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)
