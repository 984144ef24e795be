"""``kernels.verify``: every kernel is right here, and a wrong one is found out."""

from __future__ import annotations

import pytest

from zfunc import kernels
from zfunc.kernels import dispatch, lion_triton


def test_every_kernel_is_right():
    verdicts = kernels.verify()
    assert [v.kernel for v in verdicts] == list(dispatch.KERNELS)
    for verdict in verdicts:
        assert verdict.ran and verdict.right, str(verdict)
        assert verdict.note == "in the interpreter"


def test_a_wrong_kernel_is_found_out(monkeypatch: pytest.MonkeyPatch):
    launch = lion_triton.launch

    def wrong(grad, *rest, **how):  # type: ignore[no-untyped-def]
        launch(-grad, *rest, **how)

    monkeypatch.setattr(lion_triton, "launch", wrong)
    (verdict,) = kernels.verify(["lion_flat"])
    assert verdict.ran and not verdict.right and "WRONG" in str(verdict)
