"""What a model keeps from one token to the next, found in the arguments and results of its own ``generate``.

A state is any object with tensors in it: lists, dictionaries, attributes. Two runs of another batch and another length
show which axes are the batch and which grow with the text.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from modelexport.core.collected_messages import collected
from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line
from modelexport.errors import CaptureError, raised_as
from modelexport.packages.generation_loop import BATCH, CACHE_ARGUMENTS, PAST, PAST_SEQUENCE, SEQUENCE
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.pytorch.nested_tensors import copied, tensors_in
from modelexport.pytorch.pretrained import PretrainedModel
from modelexport.tools.generate.cache_names import KINDS
from modelexport.tools.generate.prompts import Example

TEXT = ("input_ids", "attention_mask", "position_ids")
"""The arguments of a call that have an element for each token; a mask has one for all tokens so far."""
_LONGEST = 2**18


@dataclass(frozen=True)
class RecordedCall:
    """One ``forward`` that ``generate`` ran."""

    arguments: Mapping[str, Any]
    """The arguments as they were before the call."""
    held: Mapping[str, torch.Tensor]
    """Tensors that modules kept from the call before it as attributes, by path."""


@dataclass(frozen=True)
class State:
    """What a step takes besides the new tokens."""

    argument: str
    """The parameter of ``forward``; empty if the modules keep all of it."""
    template: Any
    """The state of an example."""
    held: Mapping[str, tuple[str, str]]
    """Name of a tensor that a module keeps to the module's path and the attribute."""
    axes: Mapping[str, tuple[int | str, ...]]
    """Name of a tensor in it to its sizes; ``batch`` and ``past_sequence`` for those that follow."""
    tensors: Mapping[str, torch.Tensor]
    """Name of a tensor to the one in the template."""
    prompt: Mapping[str, Any]
    """The arguments of the first call in ``generate``, and of what it encodes before."""
    step: Mapping[str, Any]
    """The arguments of the second call."""
    input_sizes: Mapping[str, tuple[int | str, ...]]
    """Name of a tensor that the first call takes, images included, to its sizes."""
    step_sizes: Mapping[str, tuple[int | str, ...]]
    """Name of what the second call takes for tokens to its sizes: positions may have axes before the batch."""
    carried: tuple[str, ...]
    """What each step takes again: the last column of what the first call took, such as a mask of images."""
    example: Example

    @property
    def of_text(self) -> list[str]:
        """What the first call takes for each token."""
        return [name for name, sizes in self.input_sizes.items() if sizes[1:2] == (SEQUENCE,)]

    @property
    def is_keys_and_values(self) -> bool:
        """Whether it consists of keys and values alone, in layers of one form."""
        layers = range(len(getattr(self.template, "layers", None) or ()))
        plain = all(len(sizes) == 4 and sizes[0] == BATCH and sizes[2] == PAST_SEQUENCE for sizes in self.axes.values())
        return plain and self.axes.keys() == {f"{layer}.{kind}" for layer in layers for kind in KINDS.values()}

    def past_axis(self, name: str) -> int:
        """The axis of a tensor that grows with the text; 0, which is the batch, if there is none."""
        return self.axes[name].index(PAST_SEQUENCE) if PAST_SEQUENCE in self.axes[name] else 0


def with_tensors(state: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A copy of a state with other tensors, and copies where none are given: models write into counters."""
    tensors_before = named_tensors(state).items()
    return copy.deepcopy(
        state, {id(old): tensors[name] if name in tensors else old.clone() for name, old in tensors_before}
    )


def count_tokens(arguments: Mapping[str, Any]) -> int:
    """The number of new tokens that a call of ``forward`` takes for each row."""
    tokens = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return int(next(tensor.shape[1] for tensor in tokens if tensor is not None))


def cache_argument(model: PretrainedModel) -> str:
    """The name that ``forward`` has for a cache, as an argument and as a result."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), PAST)


def keys_and_values(cache: Any) -> list[Any]:
    """The layers of a cache of keys and values alone, ``[batch, heads, positions, width]``; empty for any other.

    The last layers of a cache may be unused: transformers makes one for each layer of an encoder with more of them.
    """
    layers = list(getattr(cache, "layers", None) or ())
    while layers and not any(isinstance(value, torch.Tensor) for value in vars(layers[-1]).values()):
        layers.pop()
    for layer in layers:  # it may have another state, such as that of a convolution or of a recurrence
        states = [name for name, value in vars(layer).items() if name.endswith("_states") and value is not None]
        if states or getattr(layer, "keys", None) is None or layer.keys.dim() != 4:
            return []
    return layers


def find_state(model: PretrainedModel, example: Example) -> State | None:
    """The state that a model's steps pass on; ``None`` if they take tokens alone.

    Raises:
        CaptureError: Its ``generate`` fails, or its sizes do not follow from the batch and the length of the text.
    """
    inputs, ids = dict(example.inputs), example.inputs["input_ids"]
    inputs["attention_mask"] = torch.ones_like(ids)
    inputs["attention_mask"][0, 0] = 0  # otherwise ``generate`` would leave it out
    more = {name: torch.cat([value, value[: len(value) // len(ids)]]) for name, value in inputs.items()}
    longer = {
        name: torch.cat([value, value[:, [-min(2, ids.shape[1]), -1]]], 1) if value.shape[:2] == ids.shape else value
        for name, value in inputs.items()
    }
    runs = [record_calls(model, example_inputs) for example_inputs in (inputs, more, longer)]
    step = runs[0][1]
    objects = {name: value for name, value in step.arguments.items() if not isinstance(value, torch.Tensor)}
    arguments = [name for name, value in objects.items() if any(True for _ in tensors_in(value))]
    if len(arguments) > 1:
        raise _refused(model, f"it passes on {' and '.join(arguments)}")
    argument = next(iter(arguments), "")
    templates = [run[1].arguments.get(argument) for run in runs]
    states = [named_tensors(template) | dict(run[1].held) for template, run in zip(templates, runs, strict=True)]
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        raise _refused(model, f"{argument} has other tensors for another batch or length")
    axes = {name: _sizes(model, name, PAST_SEQUENCE, *(state[name] for state in states)) for name in first}
    # What is the same for every batch and length is a constant of the model.
    axes = {name: sizes for name, sizes in axes.items() if not all(isinstance(size, int) for size in sizes)}
    if not axes:
        return None
    held = {name: (name.rpartition(".")[0], name.rpartition(".")[2]) for name in step.held if name in axes}
    tensors = {name: first[name] for name in axes}
    # ``generate`` may encode images before the first call, which takes them as well.
    began = [{**before, **run[0].arguments} for before, run in zip((inputs, more, longer), runs, strict=True)]
    input_sizes = {
        name: _sizes(model, name, SEQUENCE, *(arguments_of_run[name] for arguments_of_run in began))
        for name in began[0]
        if all(isinstance(arguments_of_run.get(name), torch.Tensor) for arguments_of_run in began)
    }
    carried = tuple(
        name
        for name, sizes in input_sizes.items()
        if sizes[1:2] == (SEQUENCE,)
        and name not in TEXT
        and isinstance(tensor := step.arguments.get(name), torch.Tensor)
        and torch.equal(tensor, began[0][name][:, -1:])
    )
    steps = [run[1].arguments for run in runs]
    step_sizes = {
        name: _sizes(model, name, SEQUENCE, *(arguments_of_step[name] for arguments_of_step in steps))
        for name in TEXT
        if step.arguments.get(name) is not None
    }
    return State(
        argument, templates[0], held, axes, tensors, began[0], step.arguments, input_sizes, step_sizes, carried, example
    )


def _sizes(
    model: PretrainedModel, name: str, grows: str, first: torch.Tensor, more: torch.Tensor, longer: torch.Tensor
) -> tuple[int | str, ...]:
    """The sizes of a tensor: numbers, ``batch``, and ``grows`` for those with the length of the text.

    ``first`` is of two rows, ``more`` of three, and ``longer`` of two rows with two more tokens.
    """
    sizes: list[int | str] = []
    for size, of_more, of_longer in zip(first.shape, more.shape, longer.shape, strict=True):
        if size == of_more == of_longer:
            sizes.append(size)
        elif (size, of_more, of_longer) == (2, 3, 2):
            sizes.append(BATCH)
        elif (of_more, of_longer) == (size, size + 2):
            sizes.append(grows)
        else:
            raise _refused(model, f"{name} has {size} places, for more rows {of_more}, for more tokens {of_longer}")
    return tuple(sizes)


def _refused(model: PretrainedModel, reason: str) -> CaptureError:
    problem = f"{type(model).__name__} keeps a state that a package does not support: {reason}; use --parts whole"
    return CaptureError(problem, reason=problem)


def greedy_config(model: PretrainedModel, **options: Any) -> Any:
    """A greedy configuration with the special tokens of the model's own, but for those that end a text."""
    from transformers import GenerationConfig

    settings = model.generation_config
    names = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
    tokens = {name: getattr(settings, name) for name in names if getattr(settings, name, None) is not None}
    return GenerationConfig(**{"do_sample": False, "num_beams": 1, "pad_token_id": 0, **tokens, **options})


def record_calls(model: PretrainedModel, inputs: Mapping[str, torch.Tensor], count: int = 3) -> list[RecordedCall]:
    """The calls of ``forward`` in a greedy ``generate`` of some tokens, with caches that keep the whole text.

    Raises:
        CaptureError: ``generate`` fails, or does not run the model once for each token.
    """
    from transformers import GenerationMixin

    config = greedy_config(model, max_new_tokens=count, min_new_tokens=count)
    calls: list[RecordedCall] = []
    forward = model.forward
    kept = _plain_tensors(model)

    @functools.wraps(forward)
    def record(*args: Any, **kwargs: Any) -> Any:
        before = copied(kwargs)
        held = {name: tensor.clone() for name, tensor in _plain_tensors(model).items() if tensor is not kept.get(name)}
        calls.append(RecordedCall(before, held))
        return forward(*args, **kwargs)

    def fails(error: Exception) -> CaptureError:
        problem = (
            f"{type(model).__name__}.generate fails: {error_line(error)}; export one forward pass with --parts whole"
        )
        return CaptureError(problem, reason=error_line(error))

    with untouched(model), growing(), attribute_set(model, "forward", record), raised_as(fails):
        model.generation_config = config  # otherwise its own would fill in unset values
        GenerationMixin.generate(model, **{name: value.clone() for name, value in inputs.items()})
    if len(calls) < count:
        raise _refused(model, f"generate ran it {len(calls)} times for {count} tokens")
    return calls


def restart_length(model: PretrainedModel) -> int:
    """The number of tokens after which ``generate`` begins with a new cache, as where a rotation of positions changes.

    The model's own code is asked, which prepares the inputs of a step: with caches of the lengths in its configuration.

    Returns:
        0 if there is none.
    """
    from transformers import DynamicCache

    argument = cache_argument(model)

    def keeps_cache(length: int) -> bool:
        past, ids = torch.empty(1, 1, length, 1), torch.ones(1, length + 1, dtype=torch.long)
        cached = {argument: DynamicCache([(past, past)]), "attention_mask": torch.ones_like(ids)}
        with collected(), suppress(Exception):  # the code of a model may raise anything; it decides nothing then
            prepared = model.prepare_inputs_for_generation(ids, next_sequence_length=1, use_cache=True, **cached)
            return prepared.get(argument) is not None
        return False

    lengths = sorted({length for length in _integers(model.config.to_dict()) if 1 < length < _LONGEST})
    return next((n for n in lengths if keeps_cache(n - 1) and not keeps_cache(n) and keeps_cache(n + 1)), 0)


def _integers(value: Any) -> Iterator[int]:
    """The integers in nested lists and dictionaries."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    yield from [value] if type(value) is int else chain.from_iterable(map(_integers, inside))


def _plain_tensors(model: PretrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that modules have as plain attributes."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def growing() -> Iterator[None]:
    """Inside, a cache with a window keeps the whole text, as in a capture: the mask applies the window.

    Such a cache counts tokens in Python, and a capture would make the count a constant.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    with ExitStack() as stack:
        for name in ("update", "get_mask_sizes", "get_seq_length"):
            stack.enter_context(attribute_set(DynamicSlidingWindowLayer, name, getattr(DynamicLayer, name)))
        yield


def named_tensors(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state by names for people: ``3.key``, ``3.conv_states``, ``3.recurrent_states``.

    ``layers`` is left out, and an index where there is one tensor only.
    """
    by_path: dict[tuple[str, ...], torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors_in(state):
        if id(tensor) not in seen:
            by_path[tuple(name.split("."))] = tensor
            seen.add(id(tensor))
    parents = [path[:-1] for path in by_path]
    named = {}
    for path, tensor in by_path.items():
        only = len(path) > 1 and path[-1].isdigit() and parents.count(path[:-1]) == 1
        short = [part for part in (path[:-1] if only else path) if part != "layers"]
        named[".".join([*short[:-1], KINDS.get(short[-1], short[-1])])] = tensor
    return named
