"""Collectives that move parts: JAX's semantics by hand, and gradients, on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.models import block
from tests.laws.pipelines import Model, rows, stack
from zfunc import optim, tree
from zfunc.errors import DesyncError
from zfunc.ranks.world import MESH

Parts = list[Tensor]


def rolled(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def passed(xs: Parts, perm: list[tuple[int, int]]) -> Parts:
    source = {to: i for i, to in perm}
    nothing = 0 * torch.stack(xs).sum(0)  # of which all have a gradient
    return [nothing + (xs[source[r]] if r in source else 0) for r in range(len(xs))]


# What each rank calls, and the same of all ranks' inputs by hand. A rank has [n, 2, 3 n] numbers.
CASES: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Parts, int], Parts]]] = {
    "psum": (lambda x, n: zf.psum(x), lambda xs, n: [torch.stack(xs).sum(0)] * n),
    "pmean": (lambda x, n: zf.pmean(x), lambda xs, n: [torch.stack(xs).mean(0)] * n),
    "all_gather": (lambda x, n: zf.all_gather(x), lambda xs, n: [torch.stack(xs)] * n),
    "all_gather at the end": (
        lambda x, n: zf.all_gather(x, "data", dim=-1),
        lambda xs, n: [torch.stack(xs, -1)] * n,
    ),
    "all_gather tiled": (
        lambda x, n: zf.all_gather(x, dim=1, tiled=True),
        lambda xs, n: [torch.cat(xs, 1)] * n,
    ),
    "psum_scatter": (lambda x, n: zf.psum_scatter(x), lambda xs, n: list(torch.stack(xs).sum(0))),
    "psum_scatter tiled": (
        lambda x, n: zf.psum_scatter(x, dim=-1, tiled=True),
        lambda xs, n: list(torch.stack(xs).sum(0).chunk(n, -1)),
    ),
    "all_to_all": (
        lambda x, n: zf.all_to_all(x, "data", 0, 1),
        lambda xs, n: [torch.stack([x[r] for x in xs], 1) for r in range(n)],
    ),
    "all_to_all tiled": (
        lambda x, n: zf.all_to_all(x, None, 2, 0, tiled=True),
        lambda xs, n: [torch.cat([x.chunk(n, 2)[r] for x in xs], 0) for r in range(n)],
    ),
    "ppermute": (
        lambda x, n: zf.ppermute(x, "data", rolled(n)),
        lambda xs, n: passed(xs, rolled(n)),
    ),
    "ppermute of some": (
        lambda x, n: zf.ppermute(x, "data", rolled(n)[:1]),
        lambda xs, n: passed(xs, rolled(n)[:1]),
    ),
    "pmax": (lambda x, n: zf.pmax(x), lambda xs, n: [torch.stack(xs).amax(0)] * n),
    "pmin": (lambda x, n: zf.pmin(x), lambda xs, n: [torch.stack(xs).amin(0)] * n),
}


def inputs(n: int) -> Parts:
    """Each rank's numbers; the first ones are the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(n, n, 2, 3 * n, dtype=torch.float64, generator=generator)
    xs[:, 0, 0, :2] = 0.5
    return [x.requires_grad_() for x in xs]


def derivatives(total: Tensor, xs: Parts) -> tuple[Parts, Parts]:
    """First derivatives, and those of the sum of their squares."""
    first = torch.autograd.grad(total, xs, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), xs)
    return list(first), list(second)


def loss(out: Tensor, rank: int) -> Tensor:
    return ((rank + 2) * out).sin().sum()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives_are_those_of_one_process(case: str, n: int) -> None:
    call, by_hand = CASES[case]

    def body() -> tuple[Tensor, ...]:
        (x,) = [inputs(n)[zf.rank()]]
        out = call(x, n)
        first, second = derivatives(loss(out, zf.rank()), [x])
        return out, first[0], second[0]

    xs = inputs(n)
    outs = by_hand(xs, n)
    first, second = derivatives(sum(loss(out, r) for r, out in enumerate(outs)), xs)  # type: ignore[arg-type]
    told = zf.simulate(n)(body)() if n > 1 else [body()]
    for found, expected in zip(told, zip(outs, first, second, strict=True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_processes_find_what_threads_find() -> None:
    assert zf.launch(everything, 2, nprocs=2) == zf.simulate(2)(everything)(2)


def everything(n: int, device: str = "cpu") -> list[Any]:
    """Values and gradients of all functions on this rank, and the bytes that it sent."""
    told: list[Any] = []
    for call, _ in CASES.values():
        x = inputs(n)[zf.rank()].detach().to(device).requires_grad_()
        with zf.comm.ledger() as led:
            out = call(x, n)
            (grad,) = torch.autograd.grad(loss(out, zf.rank()), x)
        told.append((out.tolist(), grad.tolist(), led.by_label))
    return told


def test_a_tie_shares_the_gradient() -> None:
    def body() -> Tensor:
        x = torch.tensor([1.0, float(zf.rank())], requires_grad=True)
        (zf.pmax(x) * torch.tensor([1.0, 10.0])).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [g.tolist() for g in zf.simulate(2)(body)()] == [[1.0, 0.0], [1.0, 20.0]]


def test_bools_are_counted_and_sums_are_of_one_shape() -> None:
    def body() -> list[Any]:
        mine = torch.tensor([True, zf.rank() == 0])
        return [zf.psum(mine).tolist(), zf.psum_scatter(mine).item()]

    assert zf.simulate(2)(body)() == [[[2, 1], 2], [[2, 1], 1]]
    with pytest.raises(DesyncError, match=r"of torch\.float32"):
        zf.simulate(2)(lambda: zf.psum(torch.ones(2, 3).view(2 + zf.rank(), -1)))()


def test_trees_and_several_axes_of_a_mesh() -> None:
    def body() -> None:
        token = MESH.set(zf.mesh(data=2, tensor=2))
        me = torch.tensor([zf.rank()])
        tree: dict[str, Any] = {"a": me * 1.0, "n": (me, None)}
        both = zf.all_gather(tree, ("tensor", "data"), tiled=True)
        assert both["a"].tolist() == both["n"][0].tolist() == [0, 1, 2, 3] and both["n"][1] is None
        assert both["n"][0].dtype == torch.int64
        assert zf.all_gather(me, "tensor").flatten().tolist() == [
            zf.rank() // 2 * 2 + i for i in (0, 1)
        ]
        assert zf.ppermute(me, "data", [(0, 1)]).tolist() == [max(0, zf.rank() - 2)]
        assert zf.pmax(me, "tensor").tolist() == [zf.rank() | 1]
        assert zf.psum_scatter(torch.ones(2), "tensor").item() == 2
        MESH.reset(token)

    zf.simulate(4)(body)()


def test_integers_beside_floats_send_no_gradient() -> None:
    def body() -> tuple[int, int]:
        x = torch.ones(4, requires_grad=True)
        with zf.comm.ledger() as there:
            out = zf.all_gather({"x": x, "n": torch.ones(4, dtype=torch.int64)})
        with zf.comm.ledger() as back:
            out["x"].sum().backward()
        assert set(there.by_label) == {"all_gather"}
        assert set(back.by_label) == {"all_gather backward"}
        return there.payload_bytes, back.payload_bytes

    assert zf.simulate(2)(body)() == [(16 + 32, 16)] * 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: zf.all_gather(x, "model"), ValueError, "axis 'model'"),
        (lambda x: zf.all_gather(x, dim=4), ValueError, "dimension 4, expected one of 3"),
        (lambda x: zf.psum_scatter(x), ValueError, r"has 3 elements, expected 2.*tiled=True"),
        (lambda x: zf.psum_scatter(x, tiled=True), ValueError, "expected a multiple of 2"),
        (lambda x: zf.all_to_all(x, None, 0, 0), ValueError, "all_to_all: dimension 0"),
        (lambda x: zf.ppermute(x, None, [(0, 1), (0, 0)]), ValueError, "no source twice"),
        (lambda x: zf.ppermute(x, None, [(0, 2)]), ValueError, "ranks 0 to 1"),
        (lambda x: zf.pmax(x * 1j), TypeError, "complex"),
    ],
)
def test_errors_say_what_was_expected(call: Any, error: Any, message: str) -> None:
    def body() -> None:
        with pytest.raises(error, match=message):
            call(torch.ones(3, 2))

    zf.simulate(2)(body)()


@pytest.mark.parametrize(
    "call",
    [
        lambda: zf.all_gather(torch.ones(2 + zf.rank())),
        lambda: zf.ppermute(torch.ones(2), None, [(0, 1)] if zf.rank() else [(1, 0)]),
        lambda: zf.psum_scatter(torch.ones(2)) if zf.rank() else zf.pmax(torch.ones(2)),
    ],
)
def test_ranks_that_disagree_are_told(call: Any) -> None:
    with pytest.raises(zf.DesyncError):
        zf.simulate(2, timeout=5)(call)()


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_other_shapes_are_told_also_where_sizes_are_the_same(case: str) -> None:
    def body() -> None:
        CASES[case][0](torch.ones(2, 2, 8) if zf.rank() else torch.ones(2, 2, 2, 4), 2)

    with pytest.raises(zf.DesyncError, match=r"of torch\.float32"):
        zf.simulate(2, timeout=5)(body)()


# --- in steps -------------------------------------------------------------------------------------


def contrastive(params: Any, batch: Any) -> Tensor:
    """Each row's two views against those of all rows, which come in three ways."""
    x = block(params["first"], torch.cat([batch["x"], batch["z"]]))
    mine, views = zf.scan(block, params["blocks"], x).chunk(2)
    n, r = len(zf.all_gather(torch.zeros(1), "data")), zf.axis_index("data")
    gathered = zf.all_gather(views, "data", tiled=True)
    swapped = zf.all_to_all(views.expand(n, -1, -1), "data", 0, 0).flatten(0, 1)
    there, back = rolled(n), [(j, i) for i, j in rolled(n)]
    passed = zf.ppermute(zf.ppermute(mine, "data", there), "data", back)
    logits = passed @ (gathered + swapped).T + params["head"]["b"]
    logits = logits - zf.pmax(logits.amax(), "data")
    mixed = zf.psum_scatter(logits.exp().sum(0), "data", tiled=True)
    labels = torch.arange(len(mine)) + r * len(mine)
    return F.cross_entropy(logits, labels) + mixed.log().mean()


def views(i: int) -> Any:
    return {"x": rows(i, 8)["x"], "z": rows(i + 50, 8)["x"]}


MODEL = Model(stack(4), contrastive, views)
STEPS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "stage 0": (2, lambda step: zf.shard(step, stage=0)),
    "stage 3, recomputed": (2, lambda step: zf.remat(zf.shard(step, stage=3))),
    "pipeline": (
        4,
        lambda step: zf.pipeline(
            zf.shard(step, stage=1), microbatches=1, mesh=zf.mesh(data=2, pipe=2)
        ),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_ranks_is_that_of_one_process(name: str) -> None:
    ranks, wrap = STEPS[name]
    metrics, state = MODEL.trained(lambda step: step, steps=2)
    for found, end in zf.simulate(ranks)(MODEL.trained)(wrap, steps=2, local=True):
        for mine, theirs in zip(found, metrics, strict=True):
            torch.testing.assert_close(mine["loss"], theirs["loss"], rtol=1e-12, atol=1e-12)
        for x, y in zip(tree.leaves(end.params), tree.leaves(state.params), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_foreseen_bytes_are_those_that_are_sent() -> None:
    step = zf.shard(zf.train_step(contrastive, tx := optim.sgd(0.1)), stage=0)
    state = zf.TrainState.create(MODEL.params, tx)

    def sent() -> Any:
        placed = step.place(state)
        placed, _ = step(placed, step.local_batch(views(0)))
        with zf.comm.ledger() as led:
            step(placed, step.local_batch(views(0)))
        return led

    seen = zf.foresee(step, state, {k: v[:4] for k, v in views(0).items()}, ranks=2, device="cpu")
    real = zf.simulate(2)(sent)()[0]
    assert seen.sent.by_label == real.by_label and real.by_label["all_gather backward"] > 0
