"""``kernels.verify``: every kernel is right here, and a wrong one is found out."""

from __future__ import annotations

import pytest
import torch

from zfunc import kernels
from zfunc.kernels import dispatch, interpreter_triton, lion_triton, verification


def test_every_kernel_is_right():
    verdicts = kernels.verify()
    assert [v.kernel for v in verdicts] == list(dispatch.KERNELS)
    for verdict in verdicts:
        assert verdict.ran and verdict.right, str(verdict)
        assert verdict.note == "in the interpreter"


def test_a_wrong_kernel_is_found_out(monkeypatch: pytest.MonkeyPatch):
    launch = lion_triton.lion_flat

    def wrong(grad, *rest, **how):  # type: ignore[no-untyped-def]
        launch(-grad, *rest, **how)

    monkeypatch.setattr(lion_triton, "lion_flat", wrong)
    (verdict,) = kernels.verify(["lion_flat"])
    assert verdict.ran and not verdict.right and "WRONG" in str(verdict)


def test_an_interpreter_without_bfloat16_is_no_verdict(monkeypatch: pytest.MonkeyPatch):
    """As it is without the tests' help: its sums of bfloat16 are sums of bits."""
    monkeypatch.setattr(interpreter_triton, "knows_bfloat16", lambda: False)
    for verdict in kernels.verify(["lion_flat", "rms_norm"]):
        assert verdict.ran == (verdict.kernel not in verification.HALF)
        assert verdict.ran or "does not know bfloat16" in str(verdict)


def test_few_copies_in_16_bits_may_be_the_next_number():
    """One of a thousand, and one more; no other number, and no number in 32 bits."""
    x = torch.randn(3001, generator=torch.Generator().manual_seed(0))
    copy = x.bfloat16()

    def moved(count: int, by: int) -> bool:
        other = copy.clone()
        other.view(torch.int16)[:count] += by
        return verification._neighbours(other, copy)

    assert moved(0, 1) and moved(4, 1) and moved(4, -1)
    assert not moved(5, 1) and not moved(1, 2) and not moved(1, -2)
    assert not verification._neighbours(x, x)


def test_a_process_that_takes_too_long_is_ended():
    with pytest.raises(kernels.KernelError, match=r"not done within 0\.01 s"):
        verification.verify_interpreted(seconds=0.01)
