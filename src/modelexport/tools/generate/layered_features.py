"""Decoders that take features of images in several layers, besides the embeddings of tokens.

Such a decoder takes features of images and a mask of the tokens that are images, and adds the features to the states of
these tokens. In a package each layer takes features for every token, which are zero for text, and the mask is true for
every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelexport.core.replaced_attributes import attribute_set
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import copied, tensors_in
from modelexport.tools.generate.observed_state import TEXT

MAIN = ".pooler_output"
"""Where the features are that take the places of embeddings."""


@dataclass(frozen=True)
class Layers:
    """The arguments of a decoder that give its layers features of images."""

    decoder: str
    """The path of the decoder."""
    arguments: Mapping[str, Any]
    """The arguments of an example run."""
    masks: frozenset[int]
    """The ``id`` of each tensor in them that says which tokens are of images."""
    tables: Mapping[int, str]
    """The ``id`` of each other tensor in them to its place in what the encoder returns (:func:`feature_tables`)."""

    def names(self, name: str) -> tuple[str, ...]:
        """The names of the inputs or outputs for the layers, after that of what they are besides."""
        return tuple(f"{name}_{index}" for index in range(len(self.tables)))

    def tables_of(self, output: Any) -> list[torch.Tensor]:
        """The features for the layers in what the encoder returns."""
        known = dict(feature_tables(output))
        return [known[place] for place in self.tables.values()]


def feature_tables(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The features in what an encoder returns, ``[tokens, width]``, by their places in it; those of several images as
    one.
    """
    if isinstance(value, torch.Tensor):
        yield place, value.reshape(-1, value.shape[-1]) if value.dim() else value
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            yield from feature_tables(inside, f"{place}.{name}")
    elif isinstance(value, (list, tuple)):
        inside = [table for each in value if isinstance(each, torch.Tensor) for _, table in feature_tables(each)]
        if inside and len(inside) == len(value) and len({table.shape[-1:] for table in inside}) == 1:
            yield place, torch.cat(inside)
        for index, each in enumerate(value):
            yield from feature_tables(each, f"{place}.{index}")


@contextmanager
def recorded_decoder(model: nn.Module) -> Iterator[dict[str, Mapping[str, Any]]]:
    """Inside, gets the arguments of modules of a model that are called with embeddings, by path, in their order."""
    calls: dict[str, Mapping[str, Any]] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            if isinstance(kwargs.get("inputs_embeds"), torch.Tensor):
                calls.setdefault(path, dict(kwargs))

        return hook

    hooks = [
        module.register_forward_pre_hook(record(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def find_layers(
    model: nn.Module, decoder: Mapping[str, Mapping[str, Any]], placeholder: torch.Tensor, tables: Mapping[str, Any]
) -> Layers | None:
    """What a decoder takes besides embeddings; ``None`` if nothing, or something else than features and their places.

    Args:
        decoder: The arguments of its example run by its path.
        placeholder: Which tokens are of images.
        tables: The features of images.
    """
    for path, arguments in islice(decoder.items(), 1):
        further = {name: value for name, value in arguments.items() if name not in TEXT and _has_tensors(value)}
        further.pop("inputs_embeds")
        if not further:
            return None
        with untouched(model), recorded_decoder(model) as without:
            model(inputs_embeds=arguments["inputs_embeds"])
        further = {name: value for name, value in further.items() if not _has_tensors(without[path].get(name))}
        masks: set[int] = set()
        found: dict[int, str] = {}
        for _, tensor in tensors_in(further):
            # Without its weights, a model has the same number everywhere: then the order tells which is which.
            places = [place for place in tables if place not in (MAIN, *found.values())]
            equal = [place for place in places if torch.equal(tables[place], tensor)]
            if tensor.dtype == torch.bool and torch.equal(tensor, _for_width(placeholder, tensor)):
                masks.add(id(tensor))
            elif equal:
                found[id(tensor)] = equal[0]
            else:
                return None
        return Layers(path, further, frozenset(masks), found) if found else None
    return None


def _for_width(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of tokens, repeated for the axes after these of another one."""
    further = like.shape[2:]
    return mask.view(*mask.shape, *[1] * len(further)).expand(*mask.shape, *further)


def _has_tensors(value: Any) -> bool:
    return any(True for _ in tensors_in(value))


@contextmanager
def with_layers(
    model: nn.Module, layers: Layers, added: Sequence[torch.Tensor], shape: Sequence[int]
) -> Iterator[None]:
    """Inside, the decoder of a model gets what its layers add to the states of all tokens.

    Args:
        added: One tensor for each layer, ``[batch, sequence, width]``.
        shape: The batch and the sequence.
    """
    tensors: dict[int, torch.Tensor] = dict(zip(layers.tables, (each.flatten(0, 1) for each in added), strict=True))
    everywhere = torch.ones(*shape, dtype=torch.bool)
    for _, tensor in tensors_in(layers.arguments):
        if id(tensor) in layers.masks:
            tensors[id(tensor)] = _for_width(everywhere, tensor)
    arguments = copied(layers.arguments, tensors)
    decoder = model.get_submodule(layers.decoder)
    forward = decoder.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, **arguments})

    masks = [tensors[each] for each in layers.masks]
    with attribute_set(decoder, "forward", run), _IndexingByFullMasks(masks):
        yield


class _IndexingByFullMasks(TorchFunctionMode):
    """Makes indexing with a mask of all tokens return all of them, so that the graph needs no ``NonZero``."""

    def __init__(self, masks: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._masks = list(masks)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and self._is_mask(args[0]):
            return args[0]
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, index, *values = args
            first, *others = index if isinstance(index, tuple) else (index,)
            if self._is_mask(first) and all(other == slice(None) for other in others):
                picked = tensor.flatten(0, first.dim() - 1)
                return tensor.copy_(values[0].expand_as(picked).view_as(tensor)) if values else picked
        return func(*args, **(kwargs or {}))

    def _is_mask(self, value: Any) -> bool:
        return any(value is mask for mask in self._masks)
