"""Layers of a transformer: their operators, what they refuse, and what they do not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zfunc import kernels
from zfunc.kernels import dispatch
from zfunc.kernels.linear_losses import rows_of_a_chunk

X, ROW = torch.randn(4, 6), torch.randn(6)
HEADS, TURN = torch.randn(2, 3, 5, 8), torch.randn(1, 5, 4)
TARGET = torch.tensor([0, 5, -100, 2])
FP8, META = torch.float8_e4m3fn, torch.empty(6, device="meta")
CODES, STEPS = torch.ones(5, 6, dtype=torch.int8), torch.ones(5, 1)
RULE = (-100, 0.1, 0.01)
EMPTY, ONES = torch.empty(4, 0), torch.ones(4)
OPERATORS: dict[str, tuple[Any, ...]] = {
    "norm": (X, X, ROW, ROW, 1e-5, 0.0, True),
    "norm_backward": (X, None, X, ROW, None, EMPTY, ONES, 1e-5, 0.0, False),
    "glu": (X, X, "silu"),
    "glu_backward": (X, X, X, "gelu"),
    "bias_gelu": (X, ROW, "gelu_tanh"),
    "bias_gelu_backward": (X, X, ROW, "gelu_tanh"),
    "rotary": (
        HEADS.transpose(1, 2),
        HEADS.transpose(1, 2)[:, :1],
        *(torch.randn(2, 1, 3, 4)),
        True,
        False,
    ),
    "cross_entropy": (X, TARGET, *RULE),
    "cross_entropy_backward": (ONES, X, TARGET, torch.ones(4, 2), *RULE),
    "linear_cross_entropy": (X, torch.randn(7, 6), TARGET, torch.tensor(1.0), *RULE, 3),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str):
    op = getattr(torch.ops.zfunc, name).default
    # The last test of opcheck traces the operator; the layers' own tests compile their gradients.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, OPERATORS[name], test_utils=checks)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: kernels.rms_norm(torch.arange(3)), r"x is torch\.int64\[3\]; expected floating"),
    (lambda: kernels.layer_norm(torch.tensor(1.0)), r"with at least one dimension"),
    (lambda: kernels.layer_norm(X, ROW[:5]), r"weight is torch\.float32\[5\].*\[6\], one for"),
    (
        lambda: kernels.rms_norm(X, residual=X[:3]),
        r"residual is \(3, 6\) on cpu, but x is \(4, 6\)",
    ),
    (
        lambda: kernels.rms_norm(X, residual=X.half()),
        r"x is torch\.float32, residual is torch\.float16",
    ),
    (lambda: kernels.swiglu(X, X[:, :5]), r"up is \(4, 5\) on cpu, but gate is \(4, 6\)"),
    (lambda: kernels.swiglu(X, X.double()), r"gate is torch\.float32, up is torch\.float64"),
    (lambda: kernels.geglu(X, X, "erf"), r"approximate='erf'; expected \"none\" or \"tanh\""),  # type: ignore[arg-type]
    (lambda: kernels.bias_gelu(X, ROW[:2]), r"bias is torch\.float32\[2\]"),
    (lambda: kernels.rotary(HEADS, HEADS, TURN, TURN[:, :4]), r"cos \[1, 5, 4\], sin \[1, 4, 4\]"),
    (lambda: kernels.rotary(HEADS, HEADS.half(), TURN, TURN), r"k is torch\.float16"),
    (
        lambda: kernels.rotary(HEADS, HEADS, TURN.clone().requires_grad_(), TURN),
        r"rotary has no gradient, but argument 0 requires one",
    ),
    (lambda: kernels.cross_entropy(X, TARGET[:3]), r"target is torch\.int64\[3\]"),
    (lambda: kernels.cross_entropy(X[:, :0], TARGET), r"logits is .*\[4, 0\].* N at least 1"),
    (lambda: kernels.cross_entropy(X, TARGET + 1), r"target 6 is no class; expected 0 to 5"),
    (lambda: kernels.cross_entropy(X, TARGET, label_smoothing=2.0), r"expected 0 to 1"),
    (lambda: kernels.cross_entropy(X, TARGET, reduction="max"), r"reduction='max'"),  # type: ignore[arg-type]
    (lambda: kernels.linear_cross_entropy(X, X[:, :5], TARGET), r"weight \[V, 6\]"),
    (lambda: kernels.linear_cross_entropy(X, X, TARGET, chunk=0), r"chunk=0; expected rows"),
    (
        lambda: kernels.layer_norm(X.to(FP8)),
        r"x is torch\.float8_e4m3fn\[4, 6\]; expected floating",
    ),
    (lambda: kernels.rms_norm(X.to(FP8)), r"x is torch\.float8_e4m3fn"),
    (lambda: kernels.swiglu(X.to(FP8), X.to(FP8)), r"gate is torch\.float8_e4m3fn"),
    (lambda: kernels.cross_entropy(X.to(FP8), TARGET), r"logits is torch\.float8_e4m3fn"),
    (lambda: kernels.rms_norm(X, META), r"weight is on meta, but x is on cpu; expected one device"),
    (lambda: kernels.bias_gelu(X, META), r"bias is on meta, but x is on cpu"),
    (lambda: kernels.cross_entropy(X, TARGET.to("meta")), r"target is on meta, but logits is on"),
    (
        lambda: kernels.linear_cross_entropy(X, torch.empty(7, 6, device="meta"), TARGET),
        r"weight is on meta, but x is on cpu",
    ),
    (
        lambda: kernels.rotary(HEADS, HEADS, TURN.to("meta"), TURN),
        r"cos is on meta, but q is on cpu",
    ),
    (lambda: kernels.skinny_mm(X.int(), CODES), r"skinny_mm: x is torch\.int32\[4, 6\]; expected"),
    (lambda: kernels.w8_mm(X.to(torch.complex64), CODES, STEPS), r"w8_mm: x is torch\.complex64"),
    (lambda: kernels.w8_mm(ROW[0], CODES, STEPS), r"w8_mm: x is torch\.float32\[\]; expected"),
    (
        lambda: kernels.skinny_mm(X, X.half()),
        r"skinny_mm: w is torch\.float16, x is torch\.float32",
    ),
    (lambda: kernels.w8_mm(X, CODES, STEPS.to("meta")), r"scale is on meta, but x is on cpu"),
    (
        lambda: kernels.norm_gate_up(X.int(), ROW, kernels.Packed.of(X.int())),
        r"norm_gate_up: x is torch\.int32, weights are torch\.int32; expected",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said[:20] for _, said in REFUSED])
def test_what_they_refuse(call: Callable[[], Any], said: str):
    with pytest.raises(kernels.KernelError, match=said):
        call()


@pytest.mark.parametrize("f", [
    lambda x, w: kernels.rms_norm(x, w), lambda x, w: kernels.layer_norm(x, w, w),
    lambda x, w: kernels.rms_norm(x, w, residual=x)[0], kernels.swiglu, kernels.bias_gelu,
])  # fmt: skip
@pytest.mark.parametrize("rows", [0, 3])
def test_rows_of_no_elements(f: Callable[..., Tensor], rows: int):
    x = torch.ones(rows, 0, requires_grad=True)
    w = x if f is kernels.swiglu else torch.ones(0, requires_grad=True)
    y = f(x, w)
    assert y.shape == (rows, 0) and torch.autograd.grad(y.sum(), [x])[0].shape == (rows, 0)


def test_losses_as_torch_reduces_them():
    mine, theirs = kernels.cross_entropy, torch.nn.functional.cross_entropy
    for how in ("mean", "sum", "none"):
        expected = theirs(X, TARGET, reduction=how)
        torch.testing.assert_close(mine(X, TARGET, reduction=how), expected)  # type: ignore[arg-type]
        with torch.no_grad():
            found = kernels.linear_cross_entropy(X, torch.eye(6), TARGET, reduction=how)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected)
    nothing = torch.full((4,), -100)
    assert mine(X, nothing).isnan() and mine(X, nothing, reduction="sum") == 0


def test_the_logits_are_never_held(monkeypatch: pytest.MonkeyPatch):
    seen, run = [], dispatch.run

    def watched(name: str, logits: torch.Tensor, *rest: Any, **how: Any) -> None:
        seen.append(tuple(logits.shape))
        run(name, logits, *rest, **how)

    monkeypatch.setattr(dispatch, "run", watched)
    x = torch.randn(2, 7, 3, requires_grad=True)
    target = torch.zeros(2, 7, dtype=torch.int64)
    kernels.linear_cross_entropy(x, torch.randn(11, 3), target, chunk=5)
    assert seen == [(5, 11), (5, 11), (4, 11)]
    assert rows_of_a_chunk(8192, 128256, 2) == 1024
    assert rows_of_a_chunk(500, 128256, 2) == 500
    empty = kernels.linear_cross_entropy(x[:0], torch.randn(11, 3), target[:0], reduction="sum")
    assert empty == 0 and not torch.autograd.grad(empty, x)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_round_the_head(dtype: torch.dtype):
    x, weight = (torch.randn(n, 6).to(dtype).requires_grad_() for n in (4, 7))

    def found() -> list[torch.Tensor]:
        loss = kernels.linear_cross_entropy(x, weight, TARGET, chunk=3)
        return [loss, *torch.autograd.grad(loss, (x, weight))]

    expected = found()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found(), expected, rtol=0, atol=0)


def test_a_second_derivative_of_the_head_is_refused():
    def loss(x: torch.Tensor) -> torch.Tensor:
        return kernels.linear_cross_entropy(x, torch.eye(6), TARGET)

    with pytest.raises(kernels.KernelError, match="a first derivative and no second one"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(X)
    weight = torch.eye(6, requires_grad=True)
    with pytest.raises(kernels.KernelError, match='"none" cannot be differentiated'):
        kernels.linear_cross_entropy(X, weight, TARGET, reduction="none")
