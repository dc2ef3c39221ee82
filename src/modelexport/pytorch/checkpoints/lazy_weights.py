"""A transformers model without its weights: where the bytes of each ``state_dict`` entry are, or how to compute them.

``from_pretrained`` renames, merges, splits and casts a checkpoint's tensors by rules of each architecture. It gets
tensors without bytes that record what is done to them. So the rules are transformers' own, and an entry that is
computed from tensors of a file can be computed later, alone.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from modelexport.errors import WeightsError
from modelexport.files.safetensors_files import SafetensorsFile, TensorLocation
from modelexport.format.dtypes import dtype_name
from modelexport.pytorch.checkpoints.quantized_linear import QuantizedLinear, dequantized, is_linear
from modelexport.pytorch.pretrained import PretrainedModel
from modelexport.pytorch.private_torch import outside_of_modes, tree_leaves, tree_map
from modelexport.weights.bytes_of_entries import Weights
from modelexport.weights.packed.known_formats import packed_names
from modelexport.weights.packed.scheme import Scheme


class _Recorded(torch.Tensor):
    """A tensor without bytes that can compute them: ``origin`` is a place in a file, or a call and its arguments.

    Moving it to a device, as ``from_pretrained`` does, is ignored: it would need bytes.
    """

    origin: tuple[str, TensorLocation] | tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), dict(kwargs or {})
        if func is torch.Tensor.to:
            kwargs.pop("device", None)
            if len(args) == 1 and kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]
        if func is torch.Tensor.detach or (func is torch.Tensor.__getitem__ and args[1] is Ellipsis):
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch has no types
        if isinstance(result, _Recorded) and not hasattr(result, "origin"):
            result.origin = (func, args, kwargs)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                if isinstance(part, _Recorded) and not hasattr(part, "origin"):
                    part.origin = (_part_of, (func, args, kwargs, index), {})
        return result


def _part_of(func: Callable[..., Any], args: Any, kwargs: Any, index: int) -> Any:
    return func(*args, **kwargs)[index]


def _recorded(name: str, place: TensorLocation) -> _Recorded:
    dtype = getattr(torch, dtype_name(place.dtype))
    tensor: _Recorded = torch.empty(place.shape, dtype=dtype, device="meta").as_subclass(_Recorded)
    tensor.origin = (name, place)
    return tensor


def build_without_weights(
    cls: Any,
    config: Any,
    files: Sequence[SafetensorsFile],
    dtype: str | None,
    packed: Mapping[str, Scheme] | None = None,
) -> tuple[PretrainedModel, dict[str, Any], Weights]:
    """A model whose parameters use no memory, the loading info, and the places of its weights.

    Buffers, and parameters that the checkpoint lacks, have real values: code computed them.

    Args:
        cls: A ``PreTrainedModel`` class.
        config: Its configuration.
        files: The checkpoint.
        dtype: The element type to load with; ``None`` for that of the configuration or the checkpoint.
        packed: The layers whose weights the checkpoint has packed: linear layers keep them so; others get dense ones.
    """
    state_dict: dict[str, torch.Tensor] = {
        name: _recorded(name, place) for file in files for name, place in file.tensors.items()
    }
    for layer, scheme in (packed or {}).items():
        _unpack_later(state_dict, layer, scheme, getattr(torch, dtype) if dtype is not None else None)
    model, info = cls.from_pretrained(
        None,
        config=config,
        state_dict=state_dict,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the info lists them
        dtype=dtype or "auto",
    )
    _keep_packed(model)
    entries = {k: t for k, t in model.state_dict(keep_vars=True).items() if isinstance(t, _Recorded)}
    weights = Weights(
        {key: _tensor(key, entry) for key, entry in entries.items()},
        {key: what for key, entry in entries.items() if (what := ", ".join(_operations(entry)))},
        tuple(files),
    )
    empty: dict[_Recorded, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, _Recorded):
                if parameter not in empty:
                    empty[parameter] = nn.Parameter(_without_memory(parameter), requires_grad=False)
                setattr(module, name, empty[parameter])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if isinstance(buffer, _Recorded):
                setattr(module, name, _with_bytes(buffer).clone())
    return model, info, weights


def _unpack_later(state_dict: dict[str, torch.Tensor], layer: str, scheme: Scheme, dtype: torch.dtype | None) -> None:
    """Put a dense weight in the place of the tensors of a packed one: recorded, so that it need not be computed."""
    tensors = [state_dict[f"{layer}.{role}"] for role in scheme.roles]
    for name in packed_names(layer, scheme, state_dict):
        del state_dict[name]
    if dtype is None:
        floats = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
        dtype = floats[0] if floats else torch.float32
    dense: _Recorded = torch.empty((scheme.rows, scheme.columns), dtype=dtype, device="meta").as_subclass(_Recorded)
    dense.origin = (dequantized, (scheme, tensors, dtype), {})
    state_dict[f"{layer}.weight"] = dense


def _keep_packed(model: nn.Module) -> None:
    """Exchange each linear layer whose weight would be computed from packed tensors for one that has these."""
    layers: dict[nn.Module, QuantizedLinear] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        origin: Any = getattr(dict(module.named_parameters(recurse=False)).get("weight"), "origin", (None,))
        while origin[0] is torch.Tensor.to:
            origin = origin[1][0].origin
        if origin[0] is dequantized and path and is_linear(module):
            if module not in layers:
                scheme, tensors, _ = origin[1]
                layers[module] = QuantizedLinear(scheme, dict(zip(scheme.roles, tensors, strict=True)), module.bias)
            model.set_submodule(path, layers[module])


def fill_weights(model: nn.Module, weights: Weights) -> None:
    """Give the parameters of a model that was built without weights their values, to keep."""
    for key, parameter in model.state_dict(keep_vars=True).items():
        if key in weights.tensors:
            parameter.data = read_tensor(weights.tensors[key]).view_as(parameter)


def _tensor(key: str, entry: _Recorded) -> ir.TensorProtocol:
    """A tensor that reads an entry from its file, or computes it on access if it is not in the file unchanged."""
    if isinstance(entry.origin[0], str):
        place = entry.origin[1]
        assert isinstance(place, TensorLocation)
        return place.tensor(key)
    dtype = TorchTensor(torch.empty(0, dtype=entry.dtype)).dtype
    return ir.LazyTensor(
        lambda: TorchTensor(_with_bytes(entry).contiguous()), dtype=dtype, shape=ir.Shape(entry.shape), name=key
    )


def _with_bytes(value: Any) -> Any:
    """A recorded value with its bytes, also inside tuples, lists and dictionaries."""

    def made(part: Any) -> Any:
        if not isinstance(part, _Recorded):
            return part
        if isinstance(part.origin[0], str):
            return _read(*part.origin)
        func, args, kwargs = part.origin
        return func(*_with_bytes(args), **_with_bytes(kwargs))

    return tree_map(made, value)


def _read(name: str, place: TensorLocation) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(place.path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _operations(value: _Recorded) -> dict[str, None]:
    """The names of the operations that compute a recorded value, each once, in the order in which they run."""
    if isinstance(value.origin[0], str):
        return {}
    func, args, kwargs = value.origin
    before = [_operations(part) for part in tree_leaves(args) if isinstance(part, _Recorded)]
    if func is _part_of:
        func, kwargs = args[0], args[2]
    to = f" {str(kwargs['dtype']).removeprefix('torch.')}" if "dtype" in kwargs else ""
    return {name: None for names in before for name in names} | {f"{func.__name__}{to}": None}


def _without_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU whose address range is reserved but never written, so that it uses no physical memory.

    Exporters and shape computations treat it as any other tensor. With a tensor on the ``meta`` device, values that are
    computed from it or together with it would be lost.
    """
    size = max(like.numel() * like.element_size(), 1)
    # MAP_NORESERVE: otherwise Linux counts the range against its memory limit. Python has no name for the flag.
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size, **flags)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


@contextlib.contextmanager
def lend_weights(model: nn.Module, weights: Weights, never_called: Collection[str] = ()) -> Iterator[None]:
    """Give each module of a model without weights its own weights while it runs, inside the block.

    Args:
        never_called: Paths of modules whose ``forward`` is not called. Their parameters may be used nevertheless: they
            have their weights while the enclosing module runs, and, if it is called nevertheless, while it does:
            ``generate`` calls the encoder of images by itself.
    """
    modules = dict(model.named_modules())
    by_module: dict[str, dict[str, nn.Parameter]] = {}
    for path, module in modules.items():
        called = path
        while called in never_called and called:
            called = called.rpartition(".")[0]
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{path}.{name}" if path else name
            for owner in dict.fromkeys((path, called)) if key in weights.tensors else ():
                by_module.setdefault(owner, {})[key] = parameter
    with contextlib.ExitStack() as stack:
        for path, parameters in by_module.items():
            before, after = _loading_hooks(weights, parameters)
            stack.callback(modules[path].register_forward_pre_hook(before).remove)
            stack.callback(modules[path].register_forward_hook(after, always_call=True).remove)
        yield


def _loading_hooks(weights: Weights, parameters: Mapping[str, nn.Parameter]) -> tuple[Callable[..., None], ...]:
    """The hooks that set the values of parameters when a module's call begins, and release them when it ends."""
    empty: list[dict[str, torch.Tensor]] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        with outside_of_modes():
            empty.append({key: parameter.data for key, parameter in parameters.items()})
            for key, parameter in parameters.items():
                parameter.data = read_tensor(weights.tensors[key]).view_as(parameter)

    def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        with outside_of_modes():
            for key, data in (empty.pop() if empty else {}).items():
                parameters[key].data = data

    return before, after


def read_tensor(tensor: ir.TensorProtocol) -> torch.Tensor:
    """The values of an entry, in newly allocated memory."""
    dtype = getattr(torch, dtype_name(tensor.dtype))
    if isinstance(tensor, ir.ExternalTensor):  # read once: a mapping would take the memory a second time
        data = bytearray(tensor.nbytes)
        with Path(tensor.path).open("rb") as file:
            file.seek(tensor.offset or 0)
            if file.readinto(data) != len(data):
                raise WeightsError(f"{tensor.path} was truncated after the model was loaded: copy or download it again")
    else:
        data = bytearray(tensor.tobytes())
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(tuple(tensor.shape.numpy()))
