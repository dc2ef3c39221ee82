"""What training with quantization leaves in a captured program, as PyTorch's operators of fake quantization.

They are known by their operators: the one that observes as well (``fused_moving_avg_obs_fake_quant``), which becomes
what it computes after training; arithmetic that rounds (:mod:`.quantizers_by_arithmetic`); and
``fake_quantize_per_tensor_affine`` and ``fake_quantize_per_channel_affine`` themselves, which stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.export import ExportedProgram

from modelexport.capture.program_state import ProgramState, behind
from modelexport.capture.quantizers_by_arithmetic import PER_CHANNEL, PER_TENSOR, QUANTIZERS, quantizer_by_arithmetic
from modelexport.errors import UsageError
from modelexport.pytorch.private_torch import schema_of, written_by

aten = torch.ops.aten
_OBSERVING = aten.fused_moving_avg_obs_fake_quant.default
_READS = (aten.item.default, aten._local_scalar_dense.default)
STILL_OBSERVED = (
    "still observes, and would change its scale: call model.apply(torch.ao.quantization.disable_observer) after the "
    "training"
)
NEVER_OBSERVED = "has seen no data, so that its scale means nothing: train or calibrate the model before the export"


class ObserverError(UsageError):
    """A scale is not final."""

    def __init__(self, quantizer: str, reason: str) -> None:
        super().__init__(f"the model cannot be exported: {quantizer or 'a quantizer'} {reason}")


def with_flags_known(fakify: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's function that makes fake tensors of a module's parameters and buffers, where flags keep their values.

    A flag is a buffer that is one integer. So Python may ask a module whether it observes, or whether it quantizes.
    """

    def fakified(mode: Any, module: nn.Module) -> dict[str, Any]:
        fakes: dict[str, Any] = fakify(mode, module)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            is_flag = buffer.dim() <= 1 and buffer.numel() == 1 and not buffer.is_floating_point()
            if is_flag and not buffer.is_meta and name in fakes:
                fakes[name].constant = buffer.detach().clone()
        return fakes

    return fakified


def with_plain_quantizers(prepare: Callable[..., ExportedProgram]) -> Callable[..., ExportedProgram]:
    """The preparation of ``torch.onnx``, before which quantizers get a form that has a translation."""

    def prepared(program: ExportedProgram, *args: Any, **options: Any) -> ExportedProgram:
        make_plain(program)
        return prepare(program, *args, **options)

    return prepared


def _register_sizes() -> None:
    """Give PyTorch's operators their sizes, which PyTorch 2.13 does not know for dynamic axes."""
    for name in (
        "fake_quantize_per_tensor_affine_cachemask",
        "fake_quantize_per_channel_affine_cachemask",
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    ):
        with contextlib.suppress(RuntimeError):  # a later version knows them
            torch.library.register_fake(f"aten::{name}", _sizes)


def _sizes(x: Any, *options: Any) -> tuple[Any, Any]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


_register_sizes()


def make_plain(program: ExportedProgram) -> None:
    """Change the graph of a program in place.

    Raises:
        ObserverError: A scale is still observed, or was never.
    """
    graph, state = program.graph, ProgramState(program)
    for node in list(graph.nodes):
        if node.target is _OBSERVING:
            _without_observer(node, state)
        elif node.target is aten.round.default:
            quantizer_by_arithmetic(node, state)
    quantizers = [node for node in graph.nodes if getattr(node.target, "overloadpacket", None) in QUANTIZERS]
    if not quantizers:
        return
    written = {each for node in graph.nodes for each in written_by(node.target, node.args, node.kwargs)}
    for node in quantizers:
        _check_final(node, state, written)
    for node in reversed(list(graph.nodes)):  # of flags; PyTorch keeps nodes that read values
        if node.target in _READS and not node.users and state.has(node):
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _without_observer(node: torch.fx.Node, state: ProgramState) -> None:
    """Replace the operator that observes and quantizes by the one that only quantizes."""
    names = [argument.name for argument in schema_of(_OBSERVING).arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    observes, quantizes, least, most = (state.value(given[name]) for name in names[1:5])
    if observes.any():
        raise ObserverError(state.home(given["scale"]), STILL_OBSERVED)
    made: Any = given["self"]
    if quantizes.any():
        if not (torch.isfinite(least).all() and torch.isfinite(most).all()):
            raise ObserverError(state.home(given["scale"]), NEVER_OBSERVED)
        per_row = bool(given.get("per_row_fake_quant"))
        axis = [given["ch_axis"]] if per_row else []
        args = (made, given["scale"], given["zero_point"], *axis, given["quant_min"], given["quant_max"])
        operator = PER_CHANNEL.default if per_row else PER_TENSOR.tensor_qparams
        with node.graph.inserting_before(node):
            made = node.graph.call_function(operator, args)
        made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _check_final(node: torch.fx.Node, state: ProgramState, written: Collection[Any]) -> None:
    """Refuse a scale that the run itself changes, or whose observer has seen nothing."""
    scale = node.args[1]
    if not isinstance(scale, torch.fx.Node):
        return
    if not behind(scale).isdisjoint(written):
        raise ObserverError(state.home(scale), STILL_OBSERVED)
    beside = [each for each in state.beside(scale) if each.is_floating_point() and each.numel()]
    if any(torch.isinf(each).all() for each in beside):
        raise ObserverError(state.home(scale), NEVER_OBSERVED)
