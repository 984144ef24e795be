"""Products of low-bit tensors: those of the dequantised weights, exact where they claim to be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from tests.unit.test_qtensor import FORMATS, weight
from zfunc import kernels, quant
from zfunc.quant import int4_products, int8_products, products
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor


@pytest.fixture
def torchs() -> Iterator[None]:
    """Torch's products, which other CPUs take, in place of ours."""
    with kernels.use("torch"):
        yield


@pytest.mark.usefixtures("torchs")
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 384), (5, 192, 256), (3, 33, 47)])
def test_by_torchs_products(form: Format, m: int, n: int, k: int) -> None:
    check_product(form, m, n, k)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 384), (3, 33, 47)])
def test_a_product_is_that_of_the_dequantised_weight(form: Format, m: int, n: int, k: int) -> None:
    check_product(form, m, n, k)


def check_product(form: Format, m: int, n: int, k: int) -> None:
    w, x = weight(n, k), weight(m, k, 1, 1.0)
    q = QTensor.quantize(w, form)
    inputs = int8_products.rounded(x) if form.dynamic else x
    expected = F.linear(inputs.double(), q.dequantize().double())
    bounds = {"panels": 1e-4, "int4": 4e-3, "int8": 1e-4, "dequantised": 1e-6}
    bound = bounds[products.route(x, q)]
    before = q.codes.clone()
    got = F.linear(x, q)
    assert got.dtype == x.dtype
    bound = 1e-6 if form.dynamic else bound
    assert float((got.double() - expected).norm() / expected.norm()) < bound
    assert torch.equal(q.codes, before)  # whatever order they are kept in now
    assert torch.equal(F.linear(x, q), got)
    t = QTensor.quantize(w.t().contiguous(), form, transposed=True)
    for way in (x @ t, torch.matmul(x, t), x @ q.t(), x @ q.T, x @ q.transpose(0, 1)):
        torch.testing.assert_close(way, got, rtol=1e-5, atol=1e-5)
    bias = torch.arange(n).float()
    torch.testing.assert_close(torch.addmm(bias, x, t), got + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(F.linear(x, q, bias), got + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("torchs")
@pytest.mark.skipif(not int8_products.exact(), reason="no exact int8 product on this CPU")
@pytest.mark.parametrize("m", [1, 4, 17, 600])
def test_eight_bit_products_are_exact_in_int32(m: int) -> None:
    """Where 16-bit steps between would overflow: codes at the ends of their range."""
    n, k = 64, 4096
    form = Format(8, None, True, dynamic=True)
    w = torch.where(weight(n, k) > -0.08, 1.0, -1.0)
    x = torch.where(weight(m, k, 1) > -0.1, 1.0, -1.0)
    w[:, 0], x[:, 1] = 0.3, 0.3
    q = QTensor.quantize(w, form)
    assert products.route(x, q) == "int8"
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    sums = (x / scale).round().to(torch.int32).long() @ q.codes.long().t()
    assert sums.abs().max() > 2**24  # more than fp32 counts to
    expected = sums.double() * scale.double() * q.scale[:, 0].double()
    torch.testing.assert_close(F.linear(x, q).double(), expected, rtol=3e-7, atol=0)


@pytest.mark.usefixtures("torchs")
@pytest.mark.skipif(not int4_products.works(), reason="no 4-bit kernel for this CPU")
@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_four_bit_kernel_takes_these(size: int, symmetric: bool) -> None:
    q, x = QTensor.quantize(weight(64, 512), Format(4, size, symmetric)), weight(600, 512, 2)
    assert products.route(x, q) == "int4"
    x = x.bfloat16().float()  # its inputs: then only its sums are rounded
    expected = F.linear(x, q.dequantize())
    got = F.linear(x, q)
    assert float((got - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.usefixtures("torchs")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_pieces_of_several_groups(symmetric: bool, dynamic: bool) -> None:
    """More groups than a piece has, and a last one that is shorter."""
    form = Format(8, 32, symmetric, dynamic)
    q = QTensor.quantize(weight(96, 32 * 19 + 5), form)
    codes = q.codes.clone()
    for m in (1, 3, 16):
        x = weight(m, 32 * 19 + 5, m, 1.0)
        assert products.route(x, q) == ("int8" if int8_products.exact() else "dequantised")
        inputs = int8_products.rounded(x) if dynamic else x
        expected = F.linear(inputs.double(), q.dequantize().double())
        error = (F.linear(x, q).double() - expected).norm() / expected.norm()
        assert float(error) < (1e-6 if dynamic else 1e-4)
    assert torch.equal(q.codes, codes) and torch.equal(copy.deepcopy(q).codes, codes)


def test_large_inputs_do_not_mix_rows() -> None:
    q = QTensor.quantize(weight(64, 64), Format(8, None))
    x = torch.cat([weight(600, 64, 1), weight(2, 64, 3, 1e4), torch.zeros(1, 64)])
    got = F.linear(x, q)
    expected = x @ q.dequantize().t()
    error = (got - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
    assert (error < 1e-3).all() and torch.equal(got[-1], torch.zeros(64))


def test_gradients_pass_through_to_the_input() -> None:
    for form in FORMATS:
        q, x = QTensor.quantize(weight(20, 30), form), weight(4, 30, 1)
        x.requires_grad_()
        up = weight(4, 20, 2)
        (grad,) = torch.autograd.grad(F.linear(x, q), x, up)
        torch.testing.assert_close(grad, up @ q.dequantize(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_transforms_of_functions_pass_through(form: Format) -> None:
    """``torch.func``: gradients, tangents, batches, and gradients of each of a batch."""
    q, x, up = QTensor.quantize(weight(20, 32), form), weight(4, 32, 1), weight(4, 20, 2)
    w, y = q.dequantize(), F.linear(x, q)

    def loss(row: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return (F.linear(row, q) * to).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x, up), up @ w, rtol=1e-5, atol=1e-6)
    each = torch.func.vmap(torch.func.grad(loss))(x, up)
    torch.testing.assert_close(each, up @ w, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.func.vmap(lambda row: F.linear(row, q))(x), y)
    assert torch.equal(torch.func.vmap(lambda row: F.linear(row, q), 1)(x.t()), y)
    value, tangent = torch.func.jvp(lambda rows: F.linear(rows, q), (x,), (x + 1,))
    assert torch.equal(value, y)
    torch.testing.assert_close(tangent, (x + 1) @ w.t(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("form", FORMATS[::5], ids=str)
def test_what_is_compiled_multiplies_too(form: Format) -> None:
    """Before the weights were first multiplied with, and after."""
    q, x = QTensor.quantize(weight(64, 96), form), weight(3, 96, 1)
    fresh = copy.deepcopy(q)
    with torch.no_grad():
        y = F.linear(x, q)
        for held in (q, fresh):
            compiled = torch.compile(lambda rows, held=held: F.linear(rows, held), backend="eager")
            torch.testing.assert_close(compiled(x), y, rtol=5e-3, atol=5e-3)


def test_orders_follow_each_other() -> None:
    """Codes stay the same whichever route multiplied last."""
    for form in FORMATS:
        q, x = QTensor.quantize(weight(64, 128), form), weight(2, 128, 1)
        codes = q.codes.clone()
        first = F.linear(x, q)
        with kernels.use("torch"):
            second = F.linear(x, q)
            assert torch.equal(q.codes, codes)
        assert torch.equal(F.linear(x, q), first) and torch.equal(q.codes, codes)
        assert float((first - second).norm() / first.norm()) < 5e-3


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_embedding_dequantises_what_is_looked_up(form: Format) -> None:
    q = QTensor.quantize(weight(11, 40), form)
    ids = torch.tensor([[3, 3], [0, 10]])
    assert torch.equal(F.embedding(ids, q), F.embedding(ids, q.dequantize()))


@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_of_weights_in_a_kernels_order(bits: int) -> None:
    """A head that is tied to its embedding: no token puts all codes back in their old order."""
    q, ids = QTensor.quantize(weight(35, 80), Format(bits, 16)), torch.tensor([[34, 0], [16, 15]])
    expected = F.embedding(ids, q.dequantize())
    F.linear(weight(1, 80), q)
    if products.route(weight(1, 80), q) == "panels":
        q._store.ready = _Only(q._store.ready)
    assert torch.equal(F.embedding(ids, q), expected)


class _Only:
    """Rows that are looked up, and nothing else."""

    def __init__(self, ready: Any) -> None:
        self.looked_up = ready.looked_up


def test_codes_that_another_thread_puts_in_order_meanwhile() -> None:
    """What was there when it was asked for is still what is read."""

    class Meanwhile:
        ready = None
        times = 0

        @property
        def data(self) -> torch.Tensor | None:
            self.times += 1
            return codes if self.times == 1 else None

    for form in (Format(8, None), Format(4, None)):
        q = QTensor.quantize(weight(3, 8), form)
        codes, expected = q.data_codes, q.codes.clone()
        for read in (lambda q: q.codes, lambda q: q.looked_up(torch.arange(3))):
            q._store = Meanwhile()  # type: ignore[assignment]
            assert torch.equal(read(q), expected)
        q._store = Meanwhile()  # type: ignore[assignment]
        assert torch.equal(q.data_codes, codes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_inputs_that_are_no_plain_numbers() -> None:
    """Views that change the sign, tangents outside of torch.func, and dtypes that torch refuses."""
    q, x, t = QTensor.quantize(weight(20, 32), Format(8, None)), weight(4, 32, 1), weight(4, 32, 2)
    y = F.linear(x, q)
    torch.testing.assert_close(F.linear(torch._neg_view(x), q), -y, rtol=1e-3, atol=1e-3)
    for chosen in (None, "torch"):
        with kernels.use(chosen) if chosen else nullcontext(), forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, t), q))
        torch.testing.assert_close(value, y, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(tangent, t @ q.dequantize().t(), rtol=1e-5, atol=1e-5)
    for other in (x.to(torch.cfloat), x.long()):
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(other, q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    w, x = weight(64, 128).to(dtype), weight(3, 128, 1).to(dtype)
    q = QTensor.quantize(w, Format(8, 64))
    assert q.dtype == dtype and q.dequantize().dtype == dtype
    y = F.linear(x, q)
    assert y.dtype == dtype
    bound = {torch.float64: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    expected = x.double() @ q.dequantize(torch.float64).t()
    assert float((y.double() - expected).norm() / expected.norm()) < bound


def test_products_of_one_input_with_groups_of_several_widths() -> None:
    """As many groups of 112 columns as of 128: the input is laid out for each."""
    weights = [QTensor.quantize(torch.randn(48, 400), Format(8, width)) for width in (112, 128)]
    x = torch.randn(8, 400)
    with torch.no_grad():
        for y, w in zip(products.several(x, weights), weights, strict=True):
            assert torch.equal(y, F.linear(x, w))


@pytest.mark.parametrize("rows", [1, 5, 600])
@pytest.mark.parametrize(
    "form",
    [
        Format(8, None, dynamic=True),
        Format(8, None),
        Format(8, 32, symmetric=False),
        Format(4, 32),
        Format(4, 24),
    ],
)
def test_products_of_one_input_are_those_of_each(form: Format, rows: int) -> None:
    weights = [QTensor.quantize(torch.randn(n, 128), form) for n in (64, 192)]
    x = torch.randn(rows, 128)
    with torch.no_grad():
        for y, w in zip(products.several(x, weights), weights, strict=True):
            assert torch.equal(y, F.linear(x, w))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        products.several(x[:, 1:], weights)


BY_NAME: dict[str, Any] = {
    "linear": lambda x, w: F.linear(input=x, weight=w),
    "linear with a bias": lambda x, w: F.linear(x, weight=w, bias=torch.ones(16)),
    "mm": lambda x, w: torch.mm(input=x, mat2=w.t()),
    "Tensor.mm": lambda x, w: x.mm(mat2=w.T),
    "matmul": lambda x, w: torch.matmul(x, other=w.mT),
    "Tensor.matmul": lambda x, w: x.matmul(other=w.mT),
    "out": lambda x, w: torch.matmul(x, w.T, out=torch.empty(3, 16)),
    "addmm": lambda x, w: torch.addmm(input=torch.ones(16), mat1=x, mat2=w.T),
    "Tensor.addmm": lambda x, w: torch.ones(16).addmm(x, mat2=w.T, beta=1),
    "transpose": lambda x, w: x @ torch.transpose(input=w, dim0=0, dim1=1),
    "Tensor.transpose": lambda x, w: x @ w.transpose(0, dim1=1),
    "clone": lambda x, w: x @ torch.clone(input=w).T,
    "embedding": lambda x, w: F.embedding(input=torch.tensor([3, 0]), weight=w, padding_idx=0),
    "an empty batch": lambda x, w: torch.func.vmap(lambda row: F.linear(row, w))(x[:0]),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_can_be_named_as_torch_names_them(name: str, bits: int) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    full = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    held = quant.quantize_tree({"w": full}, bits=bits)["w"]
    found, wanted = (BY_NAME[name](x, w) for w in (held, held.dequantize()))
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-3)


def test_ids_are_not_counted_from_the_end() -> None:
    held = quant.quantize_tree({"w": torch.randn(16, 64)}, bits=8)["w"]
    for bad in (-1, 16):
        with pytest.raises(IndexError, match="out of"):
            F.embedding(torch.tensor([0, bad]), held)
