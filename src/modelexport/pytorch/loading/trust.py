"""Limits on what a model's folder may do while it is loaded.

It may not run code without permission, prompt the user, or use more memory than its weights need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from modelexport.core.limits import ELEMENTS_PER_BYTE, LARGEST_LAYER_SETTING, MOST_MODULES, SPARE_ELEMENTS
from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import chained
from modelexport.errors import ModelLoadError


@contextmanager
def no_questions() -> Iterator[None]:
    """Make transformers refuse a repository's code instead of asking on standard input, inside the block.

    It asks if ``trust_remote_code`` was not passed, also deep inside the loading code, unless its timeout is 0.
    """
    try:
        from transformers import dynamic_module_utils
    except ModuleNotFoundError:  # then nothing asks
        yield
        return

    with attribute_set(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0):
        yield


def check_config(spec: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with more layers than any real model."""
    pending: list[Mapping[str, Any]] = [config]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, Mapping):
                pending.append(value)
            elif "layer" in name and type(value) is int and value > LARGEST_LAYER_SETTING:
                raise ModelLoadError(
                    f"the config.json of {spec} has {name} = {value:,}, and at most "
                    f"{LARGEST_LAYER_SETTING:,} are allowed: correct it, or download it again"
                )


class _TooLargeError(Exception):
    """Not a ``ValueError``: transformers handles some of those."""


@contextmanager
def no_larger_than(nbytes: int) -> Iterator[None]:
    """Fail in the block as soon as a model is built with far more modules or elements than its weights allow for.

    Args:
        nbytes: Bytes of its weights files.
    """
    modules, elements, most = 0, 0, ELEMENTS_PER_BYTE * nbytes + SPARE_ELEMENTS

    def count_module(parent: object, name: str, child: object) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            raise _TooLargeError(f"more than {MOST_MODULES:,} modules")

    def count_tensor(parent: object, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal elements
        elements += tensor.numel() if tensor is not None else 0
        if elements > most:
            raise _TooLargeError(f"more than {most:,} elements, for {nbytes:,} bytes of weights")

    handles = [
        torch_module.register_module_module_registration_hook(count_module),
        torch_module.register_module_parameter_registration_hook(count_tensor),
        torch_module.register_module_buffer_registration_hook(count_tensor),
    ]
    try:
        yield
    except Exception as error:  # transformers may have wrapped ours in any other; all others go on
        cause = next((raised for raised in chained(error) if isinstance(raised, _TooLargeError)), None)
        if cause is None:
            raise
        raise ModelLoadError(f"the configuration describes a model of {cause}: it is damaged") from error
    finally:
        for handle in handles:
            handle.remove()
