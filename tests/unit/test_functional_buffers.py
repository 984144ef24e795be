"""Buffers and modes: in, out, and back as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.functional_models import ConvNet, Counting
from zfunc import random
from zfunc.modules.functional import functionalize


def test_buffers_come_back_only_when_asked_and_inputs_stay() -> None:
    module = ConvNet().train()
    x = torch.randn(2, 3, 8, 8)
    f = functionalize(module)
    old = {name: b.clone() for name, b in f.buffers.items()}
    for _ in range(2):  # the second call must not start from the first one's copies
        out, new = f.apply(f.params, x, mutable=True)
    assert all(torch.equal(old[name], b) for name, b in f.buffers.items())
    assert torch.equal(out, module(x))
    for name, b in module.named_buffers():
        assert torch.equal(new[name], b), name
        assert new[name].data_ptr() != b.data_ptr()
    kept = {name: b.clone() for name, b in new.items()}
    out, newer = f.apply(f.params, x, buffers=new, mutable=True)
    assert torch.equal(out, module(x))
    for name, b in module.named_buffers():
        assert torch.equal(newer[name], b) and torch.equal(new[name], kept[name])
    evaluated, same = f.apply(f.params, x, buffers=new, mutable=True, train=False)
    assert all(torch.equal(same[name], new[name]) for name in new)
    assert not torch.equal(evaluated, out)
    assert torch.equal(f.apply(f.params, x, buffers=newer, train=False), module.eval()(x))


def test_a_large_buffer_is_copied_only_when_it_must() -> None:
    class Masked(nn.Module):
        write = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(300, 300), persistent=False)

        def forward(self) -> tuple[float, int]:
            mask: Any = self.mask
            if Masked.write:
                mask += 1
            return mask.sum().item() / 90_000, mask.data_ptr()

    f = functionalize(Masked())
    assert f.apply(f.params) == f.apply(f.params)
    (_, at), new = f.apply(f.params, mutable=True)
    assert new["mask"] is f.buffers["mask"] and at != new["mask"].data_ptr()
    Masked.write = True
    for _ in range(2):
        (value, _), new = f.apply(f.params, mutable=True)
        assert value == 1 and new["mask"].mean() == 1 and f.buffers["mask"].mean() == 0
    assert f.apply(f.params)[0] == 1
    with torch.inference_mode():
        assert f.apply(f.params)[0] == 1 and f.apply(f.params)[0] == 1
    with f.held(f.params) as call:
        assert call()[0] == 1 and call()[0] == 1
    Masked.write = False
    assert f.apply(f.params)[0] == 0
    f.buffers["mask"].fill_(4)
    assert f.apply(f.params)[0] == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_buffers_in_every_grad_mode(mode: Callable[[], Any]) -> None:
    f = functionalize(ConvNet().train())
    x = torch.randn(2, 3, 8, 8)
    out, expected = f.apply(f.params, x, mutable=True)
    for _ in range(2):
        with mode():
            got, new = f.apply(f.params, x, mutable=True)
        assert torch.equal(got, out)
        assert all(torch.equal(new[name], b) for name, b in expected.items())
    assert torch.equal(f.apply(f.params, x), out)


def test_assigned_and_non_persistent_buffers() -> None:
    f = functionalize(Counting())
    assert set(f.buffers) == {"assigned", "added"}
    buffers = f.buffers
    for i in range(3):
        out, buffers = f.apply(f.params, torch.ones(2), buffers=buffers, mutable=True)
        assert out.tolist() == [2.0 + i] * 2 and set(buffers) == {"assigned", "added"}
    assert (buffers["assigned"].item(), buffers["added"].item()) == (3.0, 3.0)
    assert not buffers["assigned"].requires_grad
    assert f.buffers["added"].item() == 0


def test_changing_a_buffer_between_calls_is_seen() -> None:
    f = functionalize(Counting())
    mine = {name: b.clone() for name, b in f.buffers.items()}
    assert f.apply(f.params, torch.zeros(1), buffers=mine).item() == 1
    mine["added"].fill_(5)
    assert f.apply(f.params, torch.zeros(1), buffers=mine).item() == 6


def test_modes() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)))
    module[1].eval()
    x = torch.ones(64, 4)
    kept = functionalize(module)
    with random.scope(0):
        expected = module(x)
    for train, off in ((None, None), (True, False), (None, None), (False, True)):
        with random.scope(0):
            out = kept.apply(kept.params, x, train=train)
        assert torch.equal(out, expected) == (train is None)
        assert torch.equal(out, module.eval()(x)) == bool(off)
        module.train()[1].eval()
    evaluating = functionalize(module, train=False)
    assert torch.equal(evaluating.apply(kept.params, x), module.eval()(x))
