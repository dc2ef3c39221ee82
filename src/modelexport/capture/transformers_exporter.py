"""What transformers' ONNX exporter does for its models, also for modules that have one of its models inside.

Its exporter takes a ``PreTrainedModel`` and its keyword arguments. For any other module the same is done here in the
same order: its patches of transformers and of torch, its fixes of the captured program, its translations, its fixes of
the graph. All of it is public in ``transformers.exporters`` but for the table of translations.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from modelexport.capture.patches import private, replaced, usable
from modelexport.capture.repairs.attention import ATTENTION
from modelexport.core.collected_messages import collected
from modelexport.core.replaced_attributes import attribute_set
from modelexport.core.text import error_line
from modelexport.errors import UsageError, raised_as
from modelexport.pytorch.nested_tensors import copied
from modelexport.pytorch.pretrained import is_pretrained


def has_transformers_inside(model: nn.Module) -> bool:
    """Whether a module or one of its parts is a model or a layer of transformers, or of a class derived from these."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in kinds)


def export_pretrained(
    model: nn.Module, kwargs: dict[str, Any], *, dynamic: bool, opset: int | None
) -> tuple[ir.Model, tuple[str, ...]]:
    """Export a ``PreTrainedModel`` by keyword arguments; the graph and the names of its outputs."""
    from transformers.exporters.exporter_onnx import OnnxConfig

    config = OnnxConfig(dynamic=dynamic, opset_version=opset, optimize=False)
    with replaced(_REPLACED), contextlib.ExitStack() as translation:
        program = _silent_exporter(translation).export(model, kwargs, config).program
    return program, tuple(value.name for value in program.graph.outputs)


def _silent_exporter(translation: contextlib.ExitStack) -> Any:
    """transformers' exporter, which does not print what ``torch.onnx`` says while it translates.

    It prints, and has no option not to. What the model itself prints, while it is captured before that, is shown.
    """
    from transformers.exporters.exporter_dynamo import DynamoExporter
    from transformers.exporters.exporter_onnx import OnnxExporter

    class Captured(DynamoExporter):
        def export_program(self, *args: Any, **kwargs: Any) -> Any:
            with _computing_as_torch():
                captured = super().export_program(*args, **kwargs)
            translation.enter_context(contextlib.redirect_stdout(io.StringIO()))
            return captured

    class Silent(OnnxExporter, Captured):
        pass

    return Silent()


def of_imported_models(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """The function that finds an object by its path, which does not import the modules of other models for it."""

    def resolve_imported(path: str, missing_ok: bool = False) -> Any:
        module = ".".join(path.split(".")[:4])
        is_unused = missing_ok and path.startswith("transformers.models.") and module not in sys.modules
        return None if is_unused else resolve(path, missing_ok)

    return resolve_imported


def asked_once(ask: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is contiguous, which is not asked again of the last tensor while its strides are the same."""
    last: Any = None, "", False

    def is_contiguous(tensor: torch.Tensor) -> bool:
        nonlocal last
        strides = str(tensor.stride())
        if last[0] is not tensor or last[1] != strides:
            last = tensor, strides, ask(tensor)
        return bool(last[2])

    return is_contiguous


def _of_any_lengths(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of segments, such as images or windows, which the exporter takes for equally long.

    If their number is dynamic, all patches attend at once, with a mask of those in one segment. ``cu_seqlens`` is where
    segments end, after a zero; an end may be repeated. Queries and keys of one projection are normalized as in the
    model's own ``forward``: the exporter of transformers 5.23 leaves these modules out.
    """

    def attend_in_segments(self: Any, hidden_states: Any, cu_seqlens: Any, *args: Any, **kwargs: Any) -> Any:
        with _normalized_before_rotation(self):
            return attend_at_once(self, hidden_states, cu_seqlens, *args, **kwargs)

    def attend_at_once(self: Any, hidden_states: Any, cu_seqlens: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(cu_seqlens.shape[0], int):
            return attend(self, hidden_states, cu_seqlens, *args, **kwargs)
        segment = (torch.arange(hidden_states.shape[-2])[:, None] >= cu_seqlens[1:]).sum(1)
        function = torch.nn.functional.scaled_dot_product_attention
        masked = functools.partial(function, attn_mask=segment[:, None] == segment)
        with attribute_set(torch.nn.functional, "scaled_dot_product_attention", masked):
            return attend(self, hidden_states, cu_seqlens[[0, -1]], *args, **kwargs)

    return attend_in_segments


@contextlib.contextmanager
def _normalized_before_rotation(attention: nn.Module) -> Iterator[None]:
    """Inside, queries and keys are normalized when they are rotated, if they have norms that were not called before."""
    module, called = sys.modules[type(attention).__module__], list[None]()
    rotate = getattr(module, "apply_rotary_pos_emb_vision", None)
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    if rotate is None or query_norm is None or key_norm is None:
        yield
        return

    def rotate_normalized(queries: Any, keys: Any, *angles: Any) -> Any:
        if called or len(angles) != 2:  # some rotate one tensor at a time
            return rotate(queries, keys, *angles)
        return rotate(query_norm(queries), key_norm(keys), *angles)

    hook = query_norm.register_forward_hook(lambda *_: called.append(None))
    try:
        with attribute_set(module, "apply_rotary_pos_emb_vision", rotate_normalized):
            yield
    finally:
        hook.remove()


_REPLACED: Mapping[str, Callable[[Any], Any]] = {
    "changed models": of_imported_models,
    "contiguity": asked_once,
    "segments": _of_any_lengths,
}


@contextlib.contextmanager
def _computing_as_torch() -> Iterator[None]:
    """Inside, attention is an average where a mask has the smallest finite number for each key, as in PyTorch, and
    ``masked_scatter`` takes a source without elements.

    The exporter of transformers writes zeros there, and reads the first element of each source.
    """
    scatter = torch.Tensor.masked_scatter

    def masked_scatter(self: Any, mask: Any, source: Any) -> Any:
        return scatter(self, mask, torch.cat([source.reshape(-1), source.new_zeros(1)]))

    with (
        attribute_set(torch.nn.functional, "scaled_dot_product_attention", ATTENTION),
        attribute_set(torch.Tensor, "masked_scatter", masked_scatter),
    ):
        yield


def export_around_pretrained(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, opset: int | None
) -> Any:
    """Export a module with a model of transformers inside; what ``torch.onnx.export`` gives."""
    from transformers.exporters import exporter_onnx
    from transformers.exporters.exporter_dynamo import reset_model_state
    from transformers.exporters.utils import apply_fx_node_fixes, apply_patches

    with reset_model_state(model), replaced(_REPLACED), apply_patches("onnx"):
        with torch.no_grad(), apply_patches("dynamo"), _computing_as_torch():
            program = torch.export.export(model, copied(args), copied(kwargs), dynamic_shapes=shapes, strict=False)
        apply_fx_node_fixes("onnx", program.graph_module)
        exported = torch.onnx.export(
            program,
            args,
            kwargs=kwargs,
            custom_translation_table=private("transformers") if usable("transformers") else None,
            opset_version=opset,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    exporter_onnx.apply_onnx_ir_fixes(exported)
    return exported


def register_caches(model: nn.Module) -> None:
    """Let ``torch.export`` take the caches of the models of transformers in a module apart, as their exporter does."""
    for module in filter(is_pretrained, model.modules()):
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

        register_cache_pytrees_for_model(module)


def changed_caches() -> Callable[[object], bool]:
    """Says whether an object is a cache whose class transformers' exporter has changed since this was called.

    Its exporter lets a cache of a sliding window keep everything, which PyTorch does not: what such a cache holds while
    the model is captured is not what a call gets or returns.
    """
    module = sys.modules.get("transformers.cache_utils")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)] if module else []
    before = {kind: dict(vars(kind)) for kind in kinds if kind.__module__ == "transformers.cache_utils"}

    def is_changed(value: object) -> bool:
        return any(
            vars(kind).get(name) is not what
            for kind in type(value).__mro__
            for name, what in before.get(kind, {}).items()
        )

    return is_changed


def apply_fusions(model: ir.Model, provider: str) -> None:
    """Fuse nodes of any graph into operators of ONNX Runtime's own, in place.

    Args:
        provider: ``cpu`` or ``cuda``.

    Raises:
        UsageError: The fusions do not take the graph.
    """
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

    refused = f"the graph cannot be fused for ort-{provider}"
    with collected(), raised_as(lambda error: UsageError(f"{refused}: {error_line(error)}; leave out --fuse")):
        fuse_for_onnxruntime(model, provider)
