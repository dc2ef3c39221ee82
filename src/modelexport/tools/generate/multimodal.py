"""Models that generate text from images or sound: the encoder, the embedding with the merge, and the decoder.

transformers leaves the merge to the caller. It is the same in these models: the features of an image are put in the
place of the embeddings of its placeholder tokens, in order. An example checks this.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line
from modelexport.errors import CaptureError, raised_as
from modelexport.packages.generation_loop import IMAGE_SIZES
from modelexport.packages.model_parts import with_forward, with_weights
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.tools.generate.image_sizes import PositionsOfSizes, sizes_in_graph
from modelexport.tools.generate.layered_features import (
    Layers,
    feature_tables,
    find_layers,
    recorded_decoder,
    with_layers,
)
from modelexport.tools.generate.prompts import KINDS, Example, placeholder_of
from modelexport.traces.tolerances import ENCODED_LOGITS
from modelexport.weights.bytes_of_entries import Weights

POSITIONS = "positions"
"""The part that computes them from tokens."""
_METHOD = "get_rope_index"
"""The method of transformers' models that computes them, which its exporters ask for as well."""
PLURALS = {"image": "images", "audio": "sound"}
EMBEDDING, EMBEDS = "embedding", "inputs_embeds"


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of a prompt, if all of its images have one size.

    Args:
        token: The placeholder token.
        offsets: The positions of the tokens of an image from its first one, ``[axes, tokens]``.
        extent: The number of positions from the first one of an image to that of the text after it.
    """

    token: int
    offsets: torch.Tensor
    extent: int

    @property
    def axes(self) -> int:
        """How many positions a token has."""
        return len(self.offsets)

    def of_prompt(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, sizes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The positions of each token, ``[axes, batch, sequence]``; of padding, those of the next token."""
        image = input_ids == self.token
        text = (~image & attention_mask.bool()).long()
        # Every image has as many tokens, so that counting tells which one of which image a token is.
        count = image.long().cumsum(-1)
        at, size = (count - 1).clamp(min=0), self.offsets.shape[1]
        before = text.cumsum(-1) - text + torch.where(image, at // size, count // size) * self.extent
        return torch.where(image, before + self.offsets[:, at % size], before)

    def __call__(self, model: nn.Module, /, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """A ``forward`` from the tokens of a prompt to their positions."""
        return {"position_ids": self.of_prompt(inputs["input_ids"], inputs["attention_mask"])}

    @property
    def as_in_genai(self) -> bool:
        """Whether they are what onnxruntime-genai computes itself: time, row and column, and text after the largest."""
        rows, columns = (int(axis.max()) + 1 for axis in self.offsets[-2:])
        grid = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns)).T
        return torch.equal(self.offsets, grid) and self.extent == max(rows, columns)


def positions_of(
    model: nn.Module, token: int, example: Mapping[str, Any], of_one_image: Mapping[str, Any]
) -> Positions | None:
    """The positions that a model gives to tokens; ``None`` if a token has one position in it.

    Args:
        example: The inputs of a run of the whole model.
        of_one_image: What its encoder takes for one image.
    """
    ids = example["input_ids"][:1]
    image = ids[ids == token]
    ids = torch.cat([image, ids[ids != token][-1:]])[None]
    positions = _positions_in_model(model, token, ids, example, of_one_image)
    return None if positions is None else Positions(token, positions[:, 0, :-1].clone(), int(positions[0, 0, -1]))


def _positions_in_model(
    model: nn.Module, token: int, ids: torch.Tensor, example: Mapping[str, Any], sizes: Mapping[str, Any]
) -> torch.Tensor | None:
    """The positions that a model gives to tokens, ``[axes, batch, sequence]``; ``None`` if it has no method for it."""
    owner = next((module for module in model.modules() if callable(getattr(module, _METHOD, None))), None)
    if owner is None:
        return None
    method = getattr(owner, _METHOD)
    known = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **sizes}
    # Other integers of the shape of the tokens say what each of them is: 1 for placeholders, 0 for text.
    for name, value in example.items():
        if name not in known and getattr(value, "shape", None) == example["input_ids"].shape:
            known[name] = (ids == token).to(value.dtype)
    wanted = inspect.signature(method).parameters
    return method(**{name: value for name, value in known.items() if name in wanted})[0]


@dataclass(frozen=True)
class Modality:
    """The inputs of a model besides text: images or sound."""

    kind: str
    """``image`` or ``audio``."""
    token: int
    """The placeholder token."""
    arguments: Mapping[str, Any]
    """The arguments of ``get_image_features`` in an example run, tensors and settings."""
    example: Mapping[str, Any]
    """The example inputs of the whole model, in a batch of two."""
    positions: Positions | PositionsOfSizes | None = None
    """The positions of tokens, if they have several axes."""
    layers: Layers | None = None
    """What the decoder takes of images besides the embeddings of tokens, in its layers."""
    of_any_size: bool = False
    """Whether a graph computes with the sizes of images; otherwise a capture keeps them."""
    compared: bool = False
    """Whether the logits of the parts were compared with the model's; without weights they cannot be."""

    @property
    def part(self) -> str:
        """The name of the encoder's part."""
        return {"image": "vision", "audio": "speech"}[self.kind]

    @property
    def features(self) -> str:
        """The name of the features that the encoder returns and the embedding takes."""
        return f"{self.kind}_features"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the example that the encoder takes."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}

    @property
    def sizes(self) -> tuple[str, ...]:
        """The tensors of the example that say how large each image is: a capture keeps their values."""
        count = len(self.example["input_ids"])
        return tuple(
            name
            for name, value in self.tensors.items()
            if value.shape in ((count, 2), (count, 3)) and not value.is_floating_point()
        )

    @property
    def of_one(self) -> dict[str, torch.Tensor]:
        """What the encoder takes for one image of the example."""
        count = len(self.example["input_ids"])
        return {name: value[: len(value) // count] for name, value in self.tensors.items()}

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of what the encoder returns, ``[tokens, width]``."""
        return (self.features, *(self.layers.names(self.features) if self.layers is not None else ()))


def with_any_size(model: nn.Module, modality: Modality) -> Modality | None:
    """The modality for images of any size, if a graph computes the model's positions from the sizes."""
    if len(modality.sizes) != 1 or modality.sizes[0] not in IMAGE_SIZES:
        return None
    (name,), ids = modality.sizes, modality.example["input_ids"][:1]
    text = ids[ids != modality.token][-1:]
    merged = isqrt(int(modality.of_one[name].prod(-1).sum()) // int((ids == modality.token).sum()))
    positions = PositionsOfSizes(modality.token, merged, name)
    sizes = merged * torch.tensor([[0, 2, 3], [0, 4, 1]]) + torch.tensor([1, 0, 0])
    image = ids.new_full((1,), modality.token)
    ids = torch.cat([text, image.repeat(6), text, text, image.repeat(4), text])[None]
    with untouched(model, runs=False), torch.no_grad():
        right = _positions_in_model(model, modality.token, ids, modality.example, {name: sizes})
    if (right is None) != (modality.positions is None):
        return None
    if right is not None and not torch.equal(right, positions.of_prompt(ids, torch.ones_like(ids), sizes)):
        return None  # it gives tokens other positions
    return dataclasses.replace(modality, of_any_size=True, positions=None if right is None else positions)


def find_modality(model: nn.Module, example: Example, weights: Weights | None = None) -> Modality | None:
    """What a model takes besides text; ``None`` for a model of text.

    Args:
        weights: The places of the weights of a model that was built without them, to compare it with its parts.

    Raises:
        CaptureError: It takes images or sound in a way that is not supported; gives the reason.
    """
    for kind in KINDS:
        owner = _owner(model, kind)
        token = placeholder_of(model.config, kind)
        if token is not None and owner is None:
            raise _refused(model, kind, f"it has no method get_{kind}_features")
        if owner is not None and token is not None:
            modality = _observed(model, owner, kind, token, example.inputs)
            with with_weights(model, weights):
                return dataclasses.replace(modality, compared=_check_merge(model, modality))
    return None


def _owner(model: nn.Module, kind: str) -> nn.Module | None:
    """The innermost module with ``get_image_features``, which the model itself calls."""
    owners = [module for module in model.modules() if callable(getattr(module, f"get_{kind}_features", None))]
    return owners[-1] if owners else None


def _observed(model: nn.Module, owner: nn.Module, kind: str, token: int, example: Mapping[str, Any]) -> Modality:
    bound: dict[str, Any] = {}
    tables: dict[str, torch.Tensor] = {}
    method = getattr(owner, f"get_{kind}_features")
    signature = inspect.signature(method)

    def record(*args: Any, **kwargs: Any) -> Any:
        bound.clear()
        bound.update(signature.bind(*args, **kwargs).arguments)
        output = method(*args, **kwargs)
        tables.update(feature_tables(output))
        return output

    reason = ""
    with collected(), attribute_set(owner, f"get_{kind}_features", record), recorded_decoder(model) as decoder:
        try:
            with untouched(model):
                model(**copy.deepcopy(dict(example)))
        except Exception as error:  # the code of a model may raise anything
            reason = error_line(error)
    if not any(isinstance(value, torch.Tensor) for value in bound.values()):
        reason = f"no example {kind} can be made for it"
    if reason:
        tensors = [name for name, parameter in signature.parameters.items() if "Tensor" in str(parameter.annotation)]
        lacking = [name for name in tensors if bound.get(name) is None]
        raise _refused(model, kind, f"no example {' and '.join(lacking)} can be made for it" if lacking else reason)
    arguments = {name: value for name, value in bound.items() if name != "kwargs"} | bound.get("kwargs", {})
    modality = Modality(kind, token, arguments, example)
    with torch.no_grad(), raised_as(lambda error: _refused(model, kind, f"its positions: {error_line(error)}")):
        positions = positions_of(model, token, example, modality.of_one)
    with collected(), raised_as(lambda error: _refused(model, kind, f"from embeddings: {error_line(error)}")):
        layers = find_layers(model, decoder, example["input_ids"] == token, tables)
    return dataclasses.replace(modality, positions=positions, layers=layers)


def _refused(model: nn.Module, kind: str, reason: str) -> CaptureError:
    problem = f"{type(model).__name__} takes {PLURALS[kind]} in a way that a package does not support: {reason}"
    return CaptureError(problem, reason=problem)


def encode(modality: Modality, model: nn.Module, /, **inputs: Any) -> dict[str, torch.Tensor]:
    """A ``forward`` from images to the features of all their placeholder tokens, ``[tokens, width]``."""
    owner = _owner(model, modality.kind)
    with ExitStack() as stack:
        if modality.of_any_size and torch.compiler.is_exporting():
            # The number of images and of patches is dynamic, and nothing else.
            inputs = {name: value.view(-1, *map(int, value.shape[1:])) for name, value in inputs.items()}
            stack.enter_context(sizes_in_graph(model))
            stack.enter_context(undivided())
        elif not modality.sizes:
            stack.enter_context(undivided())
        output = getattr(owner, f"get_{modality.kind}_features")(**{**modality.arguments, **inputs})
    layers = modality.layers.tables_of(output) if modality.layers is not None else ()
    features = getattr(output, "pooler_output", output)
    if isinstance(features, (list, tuple)):
        features = torch.cat([of_image.reshape(-1, of_image.shape[-1]) for of_image in features])
    return dict(zip(modality.tables, (features.reshape(-1, features.shape[-1]), *layers), strict=True))


@contextmanager
def undivided() -> Iterator[None]:
    """Inside the block, a tensor stays whole that would become a list of its rows, or be split by the sizes in another
    tensor.

    The features of several images are returned as a list, from which they are put together again. A capture would fix
    the number of images.
    """
    split, item = torch.Tensor.split, torch.Tensor.item

    def no_length(tensor: torch.Tensor) -> int:
        raise TypeError("the number of images is not fixed")

    def whole(tensor: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
        undivided = isinstance(sizes, list) and any(isinstance(size, torch.Tensor) for size in sizes)
        return (tensor,) if undivided else split(tensor, sizes, dim)  # type: ignore[no-untyped-call]  # as torch has it

    with (
        attribute_set(torch.Tensor, "__iter__", lambda tensor: iter([tensor])),
        attribute_set(torch.Tensor, "__len__", no_length),
        attribute_set(torch.Tensor, "item", lambda tensor: tensor if tensor.dim() else item(tensor)),
        attribute_set(torch.Tensor, "split", whole),
    ):
        yield


def merge(modality: Modality, model: Any, /, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """A ``forward`` from tokens and features to embeddings, and to what layers of the decoder add to theirs."""
    ids, tables = inputs["input_ids"], [inputs[name] for name in modality.tables]
    features = torch.cat(tables, -1) if len(tables) > 1 else tables[0]
    placeholder = ids == modality.token
    # Placeholders take the features in order. One without a feature, which a model may generate, is a token.
    places = placeholder.flatten().long().cumsum(0).view(ids.shape) * placeholder
    places = torch.where(places <= features.shape[0], places, 0)
    embeds = model.get_input_embeddings()(ids.masked_fill(places > 0, 0))
    # The row of zeros lets a text without any have no features.
    rows = torch.cat([features.new_zeros(1, features.shape[-1]), features]).to(embeds.dtype)
    first, *others = rows[places].split([int(table.shape[-1]) for table in tables], -1)
    of_layers = modality.layers.names(EMBEDS) if modality.layers is not None else ()
    return {EMBEDS: torch.where((places > 0)[..., None], first, embeds), **dict(zip(of_layers, others, strict=True))}


def decode(modality: Modality, model: Any, /, **inputs: Any) -> Any:
    """A ``forward`` from embeddings, and from what layers of the decoder add to theirs."""
    assert modality.layers is not None
    added = [inputs.pop(name) for name in modality.layers.names(EMBEDS)]
    with with_layers(model, modality.layers, added, inputs[EMBEDS].shape[:2]):
        return type(model).forward(model, **inputs)


def _check_merge(model: nn.Module, modality: Modality) -> bool:
    """Compare the logits of the three parts with the model's, on the example.

    Returns:
        Whether they show anything: without its weights, a model returns the same number everywhere.
    """
    reason, telling = "", False
    with untouched(model, runs=False):
        try:
            encoding, merging = (with_forward(model, partial(run, modality)) for run in (encode, merge))
            features = encoding(**modality.tensors)
            ids = modality.example["input_ids"]
            embeds = merging(input_ids=ids, **features)
            mask = modality.example.get("attention_mask")
            places = modality.positions
            sizes = [modality.tensors[name] for name in modality.sizes]
            counted = None if places is None else places.of_prompt(ids, torch.ones_like(ids), *sizes[:1])
            position_inputs = {} if counted is None else {"position_ids": counted}
            decoding = model if modality.layers is None else with_forward(model, partial(decode, modality))
            merged = decoding(**embeds, attention_mask=mask, **position_inputs).logits
            right = model(**copy.deepcopy(dict(modality.example))).logits
        except Exception as error:  # the code of a model may raise anything
            reason = error_line(error)
        else:
            telling = bool((right != right.flatten()[0]).any())
            if merged.shape != right.shape or (merged - right).norm() > ENCODED_LOGITS * right.norm():
                reason = f"its decoder depends on the places of the {modality.kind}s, not only on its embeddings"
    if reason:
        raise _refused(model, modality.kind, reason)
    return telling
