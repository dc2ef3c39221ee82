"""The graphs of a pipeline: one for each method of its models that a run calls, with names for people."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from modelexport.errors import UsageError
from modelexport.packages.model_parts import ModelPart
from modelexport.pytorch.calls.traced_tree import untouched
from modelexport.tools.pipelines.components_module import PipelineModules
from modelexport.tools.pipelines.observed_calls import Entry, Observed, ObservedCall, leaves, rebuilt

_AGENTS = {"encode": "encoder", "decode": "decoder"}
_ARGUMENTS = {"encode": {"x": "sample"}, "decode": {"z": "latent_sample"}}
_RESULTS = {"latent_dist.parameters": "latent_parameters"}
"""The names of the field for an autoencoder's graphs: https://huggingface.co/docs/optimum-onnx, ``vae_encoder``."""


@dataclass(frozen=True)
class DiffusionPart:
    """A method of a model of a pipeline, as a function from named tensors to named tensors."""

    entry: Entry
    arguments: Mapping[str, Any]
    """The arguments of one call of the method, which is the example."""
    inputs: Mapping[str, str]
    """The dotted name of a tensor in the arguments to the name of the graph's input."""
    outputs: Mapping[str, str]
    """The dotted name of a tensor in the results to that of the graph's output; one tensor has one name."""
    vectors: frozenset[str] = frozenset()
    """The inputs that are numbers in the arguments and vectors of one element in the graph."""
    output: Any = None
    """The result of that call."""

    @property
    def name(self) -> str:
        """The folder of the part: the component, with what the method makes of it if it is not ``forward``."""
        method = self.entry.method
        if method == "forward":
            return self.entry.component
        return f"{self.entry.component}_{_AGENTS.get(method, method)}"

    def is_optional(self, modules: PipelineModules) -> bool:
        """Whether the pipeline can do without the component."""
        return self.entry.component in getattr(modules.pipeline, "_optional_components", ())

    def tensors(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The graph's inputs for a call with other tensors."""
        tensors_by_name: dict[str, torch.Tensor] = {}
        fixed: dict[str, Any] = {}
        for path, leaf in leaves(dict(arguments)):
            if path in self.inputs:
                name = self.inputs[path]
                tensor = leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf)
                tensors_by_name[name] = tensor.reshape(1) if name in self.vectors and tensor.dim() == 0 else tensor
            else:
                fixed[path] = _constant(leaf)
        expected = {path: leaf for path, leaf in leaves(dict(self.arguments)) if path not in self.inputs}
        different = [path for path in {**expected, **fixed} if not _same(expected.get(path), fixed.get(path))]
        if different or set(tensors_by_name) != set(self.inputs.values()):
            missing = [path for path, name in self.inputs.items() if name not in tensors_by_name]
            raise UsageError(
                f"{self.name} was exported for other arguments: {', '.join((*different, *missing)[:3])} differ; "
                f"export the pipeline with these arguments (--inputs)"
            )
        return tensors_by_name

    def result(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """What the method returns, with other tensors."""
        return rebuilt(self.output, lambda path, leaf: tensors[self.outputs[path]] if path in self.outputs else leaf)

    def results(self, output: Any) -> dict[str, torch.Tensor]:
        """The graph's outputs for what the method returns; a tensor that is there twice is one output."""
        return {self.outputs[path]: leaf for path, leaf in leaves(output) if path in self.outputs}

    def module(self, modules: PipelineModules) -> nn.Module:
        """The pipeline's models with a ``forward`` that runs this part."""
        part = copy.copy(modules)
        part._modules = dict(modules._modules)
        part.pipeline = None
        if self.entry.method != "forward":
            component = copy.copy(getattr(modules, self.entry.component))
            component.forward = getattr(component, self.entry.method)
            part._modules[self.entry.component] = component
        part.__class__ = _with_forward(type(modules), self)
        return part


def _with_forward(cls: type, part: DiffusionPart) -> type:
    """A class of the same name whose ``forward`` takes the inputs of a part and returns its outputs by name."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        bound = signature.bind(self, *args, **kwargs).arguments
        arguments = rebuilt(
            dict(part.arguments), lambda path, leaf: bound[part.inputs[path]] if path in part.inputs else leaf
        )
        return part.results(getattr(self, part.entry.component)(**arguments))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ("self", *dict.fromkeys(part.inputs.values()))
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    vars(forward)["__signature__"] = signature  # which exporters read
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def diffusion_parts(modules: PipelineModules, observed: Observed) -> list[DiffusionPart]:
    """The parts of a pipeline, in the order in which they run; the encoder of an autoencoder that only decodes last."""
    by_entry: dict[Entry, list[ObservedCall]] = {}
    for call in observed.calls:
        by_entry.setdefault(call.entry, []).append(call)
    for entry, calls in list(by_entry.items()):
        encode = Entry(entry.component, "encode")
        component = getattr(modules, entry.component)
        decodes = entry.method == "decode" and encode not in by_entry and hasattr(component, "encode")
        if decodes and (encoded := _encoded(modules, encode, calls[0])) is not None:
            by_entry[encode] = [encoded]
    return [_with_vectors(modules, _part(entry, calls)) for entry, calls in by_entry.items()]


def model_parts(
    modules: PipelineModules, parts: Sequence[DiffusionPart], inside: Sequence[str] = ()
) -> list[ModelPart]:
    """The parts as modules that an exporter can capture, with their example inputs.

    Args:
        inside: The addresses of modules that the pipeline calls itself.
    """
    notes = {
        address.partition(".")[0]: (f"the pipeline also calls {address} itself, which is in no part",)
        for address in inside
    }
    return [
        ModelPart(
            part.name,
            part.module(modules),
            part.tensors(part.arguments),
            part.entry.component,
            file=f"{part.name}/model.onnx",
            optional=part.is_optional(modules),
            notes=notes.get(part.entry.component, ()),
        )
        for part in parts
    ]


def _part(entry: Entry, calls: Sequence[ObservedCall]) -> DiffusionPart:
    first = calls[0]
    values, *others = (dict(leaves(dict(call.arguments))) for call in calls)
    # A number that is another one in other calls is an input.
    varying = {
        path
        for path, leaf in values.items()
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        if any(other.get(path) not in (leaf, None) for other in others)
    }
    paths = [path for path, leaf in values.items() if isinstance(leaf, torch.Tensor) or path in varying]
    inputs = _named(paths, _ARGUMENTS.get(entry.method, {}))
    arguments = rebuilt(
        dict(first.arguments), lambda path, leaf: torch.tensor(leaf) if path in varying else _constant(leaf)
    )
    return DiffusionPart(entry, arguments, inputs, _outputs(first.output, set(inputs.values())), output=first.output)


def _outputs(output: Any, inputs: set[str]) -> dict[str, str]:
    """The names of the tensors of a result: none is that of an input, and one tensor has one name."""
    tensors = {path or "output": leaf for path, leaf in leaves(output) if isinstance(leaf, torch.Tensor)}
    first: dict[int, str] = {}
    for path, tensor in tensors.items():
        first.setdefault(id(tensor), path)
    names = {path: _RESULTS.get(path, path) for path in first.values()}
    renamed = {path: f"out_{name}" if name in inputs else name for path, name in names.items()}
    return {
        "" if path == "output" and not isinstance(output, Mapping) else path: renamed[first[id(leaf)]]
        for path, leaf in tensors.items()
    }


def _named(paths: Sequence[str], usual: Mapping[str, str]) -> dict[str, str]:
    """Names of the shortest ends of dotted paths that tell them apart; an end is not only a number."""
    names = {path: usual.get(path, path.replace(".", "_")) for path in paths}
    ends = {path: path.rpartition(".")[2] for path in paths}
    counts = Counter([*ends.values(), *names.values()])
    return {
        path: end if "." in path and not end.isdigit() and counts[end] == 1 else names[path]
        for path, end in ends.items()
    }


def _encoded(modules: PipelineModules, encode: Entry, decoded: ObservedCall) -> ObservedCall | None:
    """A call of an autoencoder's ``encode`` with what its ``decode`` returned; ``None`` if it does not take that."""
    decoded_image = next((leaf for _, leaf in leaves(decoded.output) if isinstance(leaf, torch.Tensor)), None)
    if decoded_image is None:
        return None
    # What a model with random weights decodes may be nearly constant, which norms divide by.
    draw = torch.Generator().manual_seed(0)
    image = (torch.rand(decoded_image.shape, generator=draw) * 2 - 1).to(decoded_image)
    component = getattr(modules, encode.component)
    with untouched(component, runs=False):
        try:
            output = component.encode(image)
        except Exception:  # it decodes something else than it encodes
            return None
    name = next(iter(inspect.signature(component.encode).parameters))
    return ObservedCall(encode, {name: image}, output)


def _with_vectors(modules: PipelineModules, part: DiffusionPart) -> DiffusionPart:
    """Numbers (a timestep) as vectors of one element where that changes nothing: runtimes pass them so."""
    numbers = {name for name, tensor in part.tensors(part.arguments).items() if tensor.dim() == 0}
    if not numbers:
        return part
    changed = replace(part, vectors=frozenset(numbers))

    def run(tried: DiffusionPart) -> Any:
        return tried.module(modules)(**tried.tensors(tried.arguments))

    with untouched(modules, runs=False):
        right = run(part)
        try:
            outputs = run(changed)
        except Exception:  # it takes a number only
            return part
    return changed if all(torch.equal(right[name], outputs[name]) for name in right) else part


def _constant(leaf: Any) -> Any:
    """What a graph keeps of an argument that is not a tensor: a generator of random numbers is not part of a graph."""
    return None if isinstance(leaf, torch.Generator) else leaf


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return False
    return type(first) is type(second) and (not isinstance(first, (bool, int, float, str)) or first == second)
