"""``kernels.verify``: every kernel is right here, and a wrong one is found out."""

from __future__ import annotations

import pytest

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


def test_a_process_that_takes_too_long_is_ended():
    with pytest.raises(kernels.KernelError, match=r"not done within 0\.01 s"):
        verification.verify_interpreted(seconds=0.01)
