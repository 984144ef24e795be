"""Tensors that lie one behind another: what is taken for one memory, and what is not."""

from __future__ import annotations

import torch

from zfunc.optim import adjacent


def lengths(*rows: tuple[torch.Tensor, ...]) -> list[int]:
    return [len(row[0]) for row in adjacent.joined(rows)]


def test_only_what_follows_in_every_column_is_joined():
    a, b = torch.arange(12.0), torch.arange(12.0)
    assert lengths((a[:4], b[:4]), (a[4:6], b[4:6]), (a[6:], b[6:])) == [12]
    assert lengths((a[:4], b[:4]), (a[4:6], b[6:8])) == [4, 2]  # a gap in one column
    assert lengths((a[4:6], b[4:6]), (a[:4], b[:4])) == [2, 4]  # in the other order
    assert lengths((a[:4],), (b[4:6],)) == [4, 2]  # of two memories
    assert lengths((a[:4],), (a.view(torch.int32)[4:6],)) == [4, 2]
    assert lengths() == []


def test_joined_is_the_memory_itself():
    a = torch.arange(12.0)
    [(one,)] = adjacent.joined([(a[2:8].view(2, 3),), (a[8:],)])
    one.mul_(0)
    assert a.tolist() == [0, 1] + [0] * 10
