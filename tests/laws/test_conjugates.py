"""What cuts, joins and sums the stream: each backward is the adjoint of its forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.split_leaves import (
    EXACT,
    MLP,
    MLP_CUTS,
    WAYS,
    Leaves,
    cut,
    drawn,
    leaves_of,
    same,
)
from zfunc import operators
from zfunc.errors import PlacementError
from zfunc.layout.splits import Cut, Split
from zfunc.operators.conjugates import copied_together, cut_positions, joined_positions
from zfunc.ranks.axes import group
from zfunc.ranks.comm import even_cuts
from zfunc.trees.marks import part_of


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("length", [7, 2])
def test_positions_put_together_and_summed_are_adjoint(ways: int, dim: int, length: int) -> None:
    """``<gather(x), y> == <x, scatter(y)>`` with sums over ranks, forward and by gradients."""

    def on_a_rank() -> tuple[Tensor, ...]:
        ranks, ends = group(zf.mesh(tensor=ways), "tensor"), even_cuts(length, ways)
        own = ends[ranks.rank + 1] - ends[ranks.rank]
        shape, full = [2, 2, 3], [2, 2, 3]
        shape[dim], full[dim] = own, length
        x = drawn(*shape, seed=ranks.rank).requires_grad_()
        y = drawn(*full, seed=10 + ranks.rank).requires_grad_()
        whole = operators.gathered_positions(x, ranks, length, dim)
        part = operators.scattered_positions(y, ranks, dim)
        assert list(whole.shape) == full and list(part.shape) == shape
        back_x = torch.autograd.grad(whole, x, y.detach())[0]
        back_y = torch.autograd.grad(part, y, x.detach())[0]
        assert torch.equal(back_x, part.detach()) and torch.equal(back_y, whole.detach())
        return (whole * y).sum().detach(), (x * part).sum().detach()

    left, right = map(sum, zip(*zf.simulate(ways)(on_a_rank)(), strict=True))
    torch.testing.assert_close(left, right, **EXACT)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("length", [7, 2])
def test_positions_of_what_is_alike_are_put_together_again(
    ways: int, dim: int, length: int
) -> None:
    """Cut and joined is the identity, forward and backward: nothing is counted twice."""

    def on_a_rank() -> Tensor:
        ranks, full = group(zf.mesh(tensor=ways), "tensor"), [2, 2, 3]
        full[dim] = length
        x = drawn(*full).requires_grad_()
        part = cut_positions(x, ranks, dim)
        whole = joined_positions(part, ranks, length, dim)
        assert torch.equal(whole, x)
        y = drawn(*full, seed=1)
        assert torch.equal(torch.autograd.grad(whole, x, y)[0], y)
        if ways > 1:
            with pytest.raises(PlacementError, match="positions in"):
                joined_positions(part, ranks, length + ways, dim)
        return part.detach()

    found = zf.simulate(ways)(on_a_rank)()
    full = [2, 2, 3]
    full[dim] = length
    assert torch.equal(torch.cat(found, dim), drawn(*full))


@pytest.mark.parametrize("ways", WAYS)
def test_gradients_of_several_leaves_are_summed_in_one_round(ways: int) -> None:
    """Of each dtype; leaves that are not used have none, and those of gradients are right, too."""

    def on_a_rank() -> tuple[Tensor, int]:
        ranks = group(zf.mesh(tensor=ways), "tensor")
        leaves = [drawn(3), drawn(2, 2), drawn(4).float(), drawn(5)]
        leaves = [x.requires_grad_() for x in leaves]
        a, b, c, _ = copied_together(leaves, ranks, "together")
        loss = (1 + ranks.rank) * ((a**3).sum() + (b**2).sum() + c.sum().double())
        with zf.comm.ledger() as led:
            grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        total = sum(range(1, ways + 1))
        assert grads[3] is None and grads[2].dtype == torch.float32
        torch.testing.assert_close(grads[0], total * 3 * leaves[0] ** 2, **EXACT)
        torch.testing.assert_close(grads[1], total * 2 * leaves[1], **EXACT)
        curved = torch.autograd.grad(grads[0].sum(), leaves[0])[0]
        torch.testing.assert_close(curved, total * 6 * leaves[0], **EXACT)
        return led.calls_by_label.get("together", 0)

    assert zf.simulate(ways)(on_a_rank)() == [2 if ways > 1 else 0] * ways


@pytest.mark.parametrize("ways", WAYS)
def test_a_stream_in_positions_is_the_whole_one(ways: int) -> None:
    """Sequence parallelism by hand: norms on this rank's positions, their gradients summed."""
    full = leaves_of(**MLP, norm=(6,))
    splits = cut(full, ways, **MLP_CUTS)
    length = 5

    def model(p: Leaves, x: Tensor) -> Tensor:
        if part_of(p["up"]) is None:
            h = F.layer_norm(x, x.shape[-1:], p["norm"])
            return x + F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])
        ranks, ends = group(zf.mesh(tensor=ways), "tensor"), even_cuts(length, ways)
        x = operators.copied(x, ranks)[:, ends[ranks.rank] : ends[ranks.rank + 1]]
        h = F.layer_norm(x, x.shape[-1:], operators.between(p["norm"]))
        h = operators.gathered_positions(h, ranks, length)
        y = F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])
        x = x + operators.scattered_positions(y, ranks)
        # What is behind is whole again: each rank takes the gradient of its own positions.
        split = Split.of(0, [range(ends[r], ends[r + 1]) for r in range(ways)])
        return operators.gathered(x.transpose(1, 2), ranks, split).transpose(1, 2)

    same(model, full, splits, drawn(2, length, 6), ways)


def test_another_number_of_positions_raises() -> None:
    def on_a_rank() -> None:
        ranks = group(zf.mesh(tensor=2), "tensor")
        with pytest.raises(PlacementError, match="has 1 of 5 positions in"):
            operators.gathered_positions(drawn(2, 1, 3), ranks, 5)

    zf.simulate(2)(on_a_rank)()


@pytest.mark.parametrize("ways", [2, 3])
def test_outputs_put_together(ways: int) -> None:
    full = leaves_of(head=(7, 4), after=(7,))
    splits = cut(full, ways, head=Cut(0))

    def model(p: Leaves, x: Tensor) -> Tensor:
        y = zf.column(x, p["head"])
        part = part_of(y)
        if part is not None and part.split is not None:
            y = operators.gathered(y, part.group, part.split)
        return y.tanh() * p["after"]

    same(model, full, splits, drawn(2, 3, 4), ways)
