"""Models that generate text from images or sound: the encoder, the embedding with the merge, and the decoder.

transformers leaves the merge to the caller. It is the same in these models: the features of an image are put in the
place of the embeddings of its placeholder tokens, in order. Whether that is so is checked on an example.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from modelexport.core.collected_messages import collected
from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line
from modelexport.errors import CaptureError, raised_as
from modelexport.packages.model_parts import with_forward, with_weights
from modelexport.pytorch.calls.traced_tree import untouched
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
        extent: How much further the text after an image begins than the image.
    """

    token: int
    offsets: torch.Tensor
    extent: int

    def of_prompt(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
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
    owner = next((module for module in model.modules() if callable(getattr(module, _METHOD, None))), None)
    if owner is None:
        return None
    method = getattr(owner, _METHOD)
    ids = example["input_ids"][:1]
    image = ids[ids == token]
    ids = torch.cat([image, ids[ids != token][-1:]])[None]
    known = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **of_one_image}
    # Other integers of the shape of the tokens say what each of them is: 1 for placeholders, 0 for text.
    for name, value in example.items():
        if name not in known and getattr(value, "shape", None) == example["input_ids"].shape:
            known[name] = (ids == token).to(value.dtype)
    wanted = inspect.signature(method).parameters
    positions = method(**{name: value for name, value in known.items() if name in wanted})[0][:, 0]
    return Positions(token, positions[:, :-1].clone(), int(positions[0, -1]))


@dataclass(frozen=True)
class Modality:
    """What a model takes besides text."""

    kind: str
    """``image`` or ``audio``."""
    token: int
    """The placeholder token."""
    arguments: Mapping[str, Any]
    """The arguments of ``get_image_features`` in an example run, tensors and settings."""
    example: Mapping[str, Any]
    """The example inputs of the whole model, in a batch of two."""
    positions: Positions | None = None
    """The positions of tokens, if they have several axes."""
    compared: bool = False
    """Whether the logits of the parts were compared with the model's: not without weights, when all are equal."""

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
    method = getattr(owner, f"get_{kind}_features")
    signature = inspect.signature(method)

    def record(*args: Any, **kwargs: Any) -> Any:
        bound.clear()
        bound.update(signature.bind(*args, **kwargs).arguments)
        return method(*args, **kwargs)

    reason = ""
    with collected(), attribute_set(owner, f"get_{kind}_features", record):
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
        return dataclasses.replace(modality, positions=positions_of(model, token, example, modality.of_one))


def _refused(model: nn.Module, kind: str, reason: str) -> CaptureError:
    problem = f"{type(model).__name__} takes {PLURALS[kind]} in a way that a package does not support: {reason}"
    return CaptureError(problem, reason=problem)


def encode(modality: Modality, model: nn.Module, /, **inputs: Any) -> dict[str, torch.Tensor]:
    """A ``forward`` from images to the features of all their placeholder tokens, ``[tokens, width]``."""
    owner = _owner(model, modality.kind)
    with nullcontext() if modality.sizes else undivided():
        output = getattr(owner, f"get_{modality.kind}_features")(**{**modality.arguments, **inputs})
    features = getattr(output, "pooler_output", output)
    if isinstance(features, (list, tuple)):
        features = torch.cat([of_image.reshape(-1, of_image.shape[-1]) for of_image in features])
    return {modality.features: features.reshape(-1, features.shape[-1])}


@contextmanager
def undivided() -> Iterator[None]:
    """Inside, a tensor that is made a list of its rows, or split by sizes that another tensor has, stays whole.

    The features of several images are returned as a list, from which they are put together again. A capture would fix
    the number of images.
    """
    split, item = torch.Tensor.split, torch.Tensor.item

    def no_length(tensor: torch.Tensor) -> int:
        raise TypeError("the number of images is not fixed")

    def whole(tensor: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
        undivided = isinstance(sizes, list) and any(isinstance(size, torch.Tensor) for size in sizes)
        return (tensor,) if undivided else split(tensor, sizes, dim)  # type: ignore[no-untyped-call]

    with (
        attribute_set(torch.Tensor, "__iter__", lambda tensor: iter([tensor])),
        attribute_set(torch.Tensor, "__len__", no_length),
        attribute_set(torch.Tensor, "item", lambda tensor: tensor if tensor.dim() else item(tensor)),
        attribute_set(torch.Tensor, "split", whole),
    ):
        yield


def merge(modality: Modality, model: Any, /, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """A ``forward`` from tokens and features to embeddings."""
    ids, features = inputs["input_ids"], inputs[modality.features]
    placeholder = ids == modality.token
    # Placeholders take the features in order. One without a feature, which a model may generate, is a token.
    places = placeholder.flatten().long().cumsum(0).view(ids.shape) * placeholder
    places = torch.where(places <= features.shape[0], places, 0)
    embeds = model.get_input_embeddings()(ids.masked_fill(places > 0, 0))
    # The row of zeros lets a text without any have no features.
    rows = torch.cat([features.new_zeros(1, features.shape[-1]), features]).to(embeds.dtype)
    return {EMBEDS: torch.where((places > 0)[..., None], rows[places], embeds)}


def _check_merge(model: nn.Module, modality: Modality) -> bool:
    """Compare the logits of the three parts with the model's, on the example.

    Returns:
        Whether they show anything: without its weights, a model returns the same number everywhere.
    """
    reason, telling = "", False
    with untouched(model, runs=False), collected():
        try:
            encoding, merging = (with_forward(model, partial(run, modality)) for run in (encode, merge))
            features = encoding(**modality.tensors)
            ids = modality.example["input_ids"]
            embeds = merging(input_ids=ids, **features)[EMBEDS]
            mask = modality.example.get("attention_mask")
            places = modality.positions
            position_inputs = {} if places is None else {"position_ids": places.of_prompt(ids, torch.ones_like(ids))}
            merged = model(inputs_embeds=embeds, attention_mask=mask, **position_inputs).logits
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
