"""Low-bit weights in the tree of a model find the kernels, and give what they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.closeness import assert_near
from tests.kernels.products import rounded
from zfunc import kernels
from zfunc.quant import products
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor

FORMATS = [
    Format(8, None),
    Format(8, 128, symmetric=False),
    Format(8, 64, dynamic=True),
    Format(4, 128),
    Format(4, 32, symmetric=False),
]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_the_values(form: Format, transposed: bool):
    w = torch.randn(70, 300)
    weight = QTensor.quantize(w.t() if transposed else w, form, transposed)
    plain = weight.dequantize(torch.float64)
    x, bias = torch.randn(2, 3, 300).bfloat16(), torch.randn(70).bfloat16()
    before = weight.codes.clone()
    matrix = plain if transposed else plain.t()
    inputs = rounded(x.view(6, 300)).view(2, 3, 300) if form.dynamic else x.double()
    with kernels.use("triton"):
        assert products.route(x.view(6, 300), weight) == "kernel"
        found = [
            x @ weight if transposed else F.linear(x, weight),
            torch.addmm(bias, x[0], weight) if transposed else F.linear(x[0], weight, bias),
        ]
    assert_near(found[0], inputs @ matrix)
    exact = inputs[0] @ matrix + bias.double()
    assert_near(found[1], exact, exact.bfloat16())
    assert torch.equal(weight.codes, before)  # their order may be another one now
    assert torch.equal(weight.dequantize(torch.float64), plain)


def test_the_gradient_of_the_input():
    weight = QTensor.quantize(torch.randn(70, 300), Format(4, 128))
    x = torch.randn(3, 300).bfloat16().requires_grad_()
    seed = torch.randn(3, 70).bfloat16()
    with kernels.use("triton"):
        (grad,) = torch.autograd.grad(F.linear(x, weight), x, seed)
    plain = weight.dequantize()
    assert_near(grad, seed.double() @ plain.double(), seed @ plain.bfloat16())
