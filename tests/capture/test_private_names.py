"""Canaries: the private names of torch that the capture uses do what they are used for."""

from __future__ import annotations

import torch
from torch import nn
from torch._higher_order_ops.wrap import WrapWithAutocast, WrapWithSetGradEnabled
from torch._subclasses.complex_tensor import ComplexTensor
from torch._subclasses.complex_tensor._ops.common import COMPLEX_OPS_TABLE
from torch.onnx._internal.exporter._registration import ONNXRegistry

from modelexport.capture.recurrent_shapes import steps_open

aten = torch.ops.aten


def test_complex_tensors_compute_in_two_parts() -> None:
    a, b = torch.tensor([1 + 2j, -1j]), torch.tensor([3 - 1j, 2.0])
    one, other = (ComplexTensor(z.real.clone(), z.imag.clone()) for z in (a, b))
    product = COMPLEX_OPS_TABLE[aten.mul](one, other)
    assert torch.equal(torch.complex(product.re, product.im), a * b)


def test_the_registry_says_which_operators_have_translations_of_complex_numbers() -> None:
    translations = [one for known in ONNXRegistry.from_torchlib().functions.values() for one in known]
    assert {one.is_complex for one in translations if one.fx_target is aten.abs.default} == {True, False}
    assert {one.is_complex for one in translations if one.fx_target is aten.erf.default} == {False}


def test_decompositions_are_in_one_table() -> None:
    assert {aten.lstm.input, aten.gru.input, aten.diagonal_scatter.default} <= torch._decomp.decomposition_table.keys()


def test_the_kernels_of_recurrent_layers_are_replaced_and_put_back() -> None:
    layer, x = nn.GRU(4, 3).eval(), torch.ones(5, 2, 4)
    before, table = dict(aten.gru.input.py_kernels), dict(torch._decomp.decomposition_table)
    with torch.no_grad(), steps_open():
        assert aten.gru.input.py_kernels != before
    assert (aten.gru.input.py_kernels, torch._decomp.decomposition_table) == (before, table)
    with torch.no_grad():
        assert layer(x)[0].any()


def test_regions_are_operators_that_call_their_graphs() -> None:
    x = torch.ones(2)
    assert torch.equal(
        WrapWithSetGradEnabled.__call__(torch.ops.higher_order.wrap_with_set_grad_enabled, True, torch.sin, x), x.sin()
    )
    operator = torch.ops.higher_order.wrap_with_autocast
    assert torch.equal(WrapWithAutocast.__call__(operator, "cpu", None, False, None, torch.sin, x), x.sin())
