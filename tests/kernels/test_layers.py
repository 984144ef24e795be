"""Layers of a transformer: as near as the rule says, differentiable under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels.closeness import assert_near
from tests.kernels.layer_cases import BY_NAME, CASES, Case, loss, offset, outputs
from zfunc import kernels
from zfunc.kernels import activations_torch, losses_torch, normalization_torch, pieces_torch

pytestmark = [
    # torch.func.jvp loads its rules through torch.jit.script, 2.13
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=BY_NAME)
# Row length and rows: primes, one row, no rows. Enough numbers that two ways to round them are as
# far from the truth as each other; tiny shapes are held against the twins in the interpreter.
SHAPES = ((31, 37), (512, 1), (257, 4), (8, 0))


def _cotangent(y: Tensor) -> Tensor:
    """Random; 2 for a loss, as a loss scale is: other factors are one more rounding."""
    return torch.randn_like(y) if y.dim() else torch.full_like(y, 2.0)


def gradients(f: Any, args: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Outputs, then gradients."""
    leaves = [x.detach().requires_grad_() for x in args]
    out = outputs(f(*leaves))
    grads = [c.to(y.dtype) for c, y in zip(cotangents, out, strict=True)]
    return [y.detach() for y in out] + list(torch.autograd.grad(out, leaves, grads))


def same(found: Any, expected: Any) -> None:
    for x, y in zip(outputs(found), outputs(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def _as_near(case: Case, shapes: tuple[tuple[int, int], ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n, rows in shapes:
            args = case.tensors(n, rows, dtype)
            exact = [x.double() for x in args]
            cotangents = [_cotangent(y).to(dtype) for y in outputs(case.plain(*exact))]
            expected = gradients(case.plain, exact, [c.double() for c in cotangents])
            eager = gradients(case.plain, args, cotangents)
            found = gradients(case.fused, args, cotangents)
            for x, y, z in zip(found, expected, eager, strict=True):
                assert_near(x, y, z)


@every_case
def test_it_is_as_near_as_the_rule_says(case: Case):
    _as_near(case, SHAPES)


@every_case
def test_twins_in_pieces_are_as_near(case: Case, monkeypatch: pytest.MonkeyPatch):
    """On a CPU long matrices are cut: here a row each, and single rows every few elements."""
    monkeypatch.setattr(pieces_torch, "PIECE", 8)
    monkeypatch.setattr(pieces_torch, "FEWEST", 1)
    cuts: list[int] = []
    plain = pieces_torch.row_pieces

    def counted(*matrices: Any) -> Any:
        pieces = list(plain(*matrices))
        cuts.append(len(pieces))
        return iter(pieces)

    for twins in (activations_torch, losses_torch, normalization_torch, pieces_torch):
        monkeypatch.setattr(twins, "row_pieces", counted)
    _as_near(case, ((31, 37), (512, 1)))
    assert case.name.startswith("rotary") or max(cuts) > 10


@pytest.mark.parametrize("name", ["layer_norm", "cross_entropy", "cross_entropy, smooth"])
def test_numbers_far_from_zero_keep_their_digits(name: str):
    case = BY_NAME[name]
    for n, rows in ((31, 37), (257, 4), (7, 1)):
        first, *rest = case.tensors(n, rows, torch.float32)
        args = [offset(first), *rest]
        exact = [x.double() for x in args]
        cotangents = [_cotangent(y) for y in outputs(case.plain(*exact))]
        expected = gradients(case.plain, exact, cotangents)
        for found, truth in zip(gradients(case.fused, args, cotangents), expected, strict=True):
            assert_near(found, truth)


def test_rms_norm_of_one_element_keeps_its_gradient():
    """It is ``eps`` times a power of the scale: the difference of two numbers of order one."""
    args = [torch.tensor([[0.7], [-1.3], [2e-3]]), torch.tensor([1.5])]
    ones = [torch.ones(3, 1)]
    expected = gradients(BY_NAME["rms_norm"].plain, [x.double() for x in args], ones)
    for found, truth in zip(gradients(kernels.rms_norm, args, ones), expected, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)


@every_case
def test_gradcheck(case: Case):
    args = [x.requires_grad_() for x in case.tensors(5, 3)]
    assert torch.autograd.gradcheck(case.fused, args)
    if case.second:
        assert torch.autograd.gradgradcheck(case.fused, args)


@every_case
def test_under_func(case: Case):
    args, every = case.tensors(5, 3), tuple(range(len(case.batched)))
    fused, plain = loss(case.fused), loss(case.plain)
    same(torch.func.grad(fused, every)(*args), torch.func.grad(plain, every)(*args))
    several = [
        torch.stack([x * (i + 1) for i in range(3)], 1 if rows else 0)
        for x, rows in zip(args, case.batched, strict=True)
    ]
    dims = tuple(1 if rows else 0 for rows in case.batched)
    shared = [x if rows else y for x, y, rows in zip(several, args, case.batched, strict=True)]
    some = tuple(1 if rows else None for rows in case.batched)
    for tensors, where in ((several, dims), (shared, some)):
        found, expected = (
            torch.vmap(torch.func.grad(f, every), where)(*tensors) for f in (fused, plain)
        )
        same(found, expected)
    found, expected = (
        torch.func.grad(lambda *a, f=f: torch.vmap(f, some)(*a).sum(), every)(*shared)
        for f in (fused, plain)
    )
    same(found, expected)
    if case.second:
        found, expected = (
            torch.func.grad(lambda x, f=f: torch.func.grad(f)(x, *args[1:]).square().sum())(args[0])
            for f in (fused, plain)
        )
        same(found, expected)


@every_case
def test_forward_mode_is_right_or_refused(case: Case):
    args = case.tensors(5, 3)
    tangents = [torch.ones_like(x) for x in args]
    try:
        found = torch.func.jvp(case.fused, tuple(args), tuple(tangents))[1]
    except RuntimeError as error:
        if "jvp" not in str(error):
            raise
    else:
        same(found, torch.func.jvp(case.plain, tuple(args), tuple(tangents))[1])


@every_case
def test_compiled(case: Case):
    """Of a gradient, whole: a backward that is dropped without a word shows here."""
    torch._dynamo.reset()
    args, every = case.tensors(6, 3), tuple(range(len(case.batched)))
    expected = torch.func.grad(loss(case.plain), every)(*args)
    compile: Any = torch.compile(backend="aot_eager", fullgraph=True)
    same(compile(torch.func.grad(loss(case.fused), every))(*args), expected)
    leaves = [x.requires_grad_() for x in args]
    compile(loss(case.fused))(*leaves).backward()
    same(tuple(x.grad for x in leaves), expected)


@every_case
def test_checkpoint_and_layouts(case: Case):
    """Recomputed; of transposed arguments, with cotangents that were expanded."""
    args = case.tensors(6, 3)
    expected = torch.func.grad(loss(case.plain))(*args)
    first = args[0].mT.contiguous().mT.requires_grad_()
    again = checkpoint(loss(case.fused), first, *args[1:], use_reentrant=False)
    same(torch.autograd.grad(again, first), (expected,))
    total = sum(y.sum() for y in outputs(case.fused(first, *args[1:])))
    plainly = sum(y.sum() for y in outputs(case.plain(first, *args[1:])))
    same(torch.autograd.grad(total, first), torch.autograd.grad(plainly, first))


@every_case
def test_nan_and_infinity_spread_as_in_torch(case: Case):
    for bad in (torch.nan, torch.inf, -torch.inf):
        args = case.tensors(6, 3)
        args[0].view(-1)[2] = bad
        found, expected = outputs(case.fused(*args)), outputs(case.plain(*args))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, equal_nan=True)
