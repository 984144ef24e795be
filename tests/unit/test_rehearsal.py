"""A loss in chunks is the loss: the same bits, whatever it does between its layers.

Chunks run one after the other in one process (``in_chunks``); what crosses goes through a dict.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import zfunc as zf
from tests.unit import in_chunks
from tests.unit.in_chunks import even, whole, worst
from tests.unit.rehearsed_losses import DEPTH, IDS, LOSSES, block, end, params, through
from zfunc.errors import CompositionError
from zfunc.language import gpt
from zfunc.layout.cutting import make_layout
from zfunc.layout.splits import Split
from zfunc.operators import conjugates
from zfunc.ranks.accounting import ledger
from zfunc.ranks.axes import group
from zfunc.ranks.keys import scope
from zfunc.rehearsal.ghosts import Ghost
from zfunc.rehearsal.plans import Rehearsed, Spec
from zfunc.rehearsal.rehearsal import rehearse


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def rehearsed(fn: Any, chunks: int = 2, args: Any = (IDS,), p: Any = None) -> Rehearsed:
    p = params() if p is None else p
    return rehearse(fn, make_layout(p, world=1), args, chunk_of=even(DEPTH, chunks))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_chunks_is_the_loss(name: str, chunks: int) -> None:
    fn, p = LOSSES[name], params()
    want = whole(fn, p, (IDS,))
    got = in_chunks.run(fn, p, (IDS,), chunk_of=even(DEPTH, chunks))
    assert torch.equal(got.result, want[0])
    assert worst(got, want) <= 1e-14  # sums over chunks go in another order
    own = [{k for k, c in enumerate(even(DEPTH, chunks)) if c == j} for j in range(chunks)]
    assert [set(row) for row in got.entered] == own


@pytest.mark.parametrize("chunks", [2, 4])
def test_without_sums_over_chunks_gradients_have_the_same_bits(chunks: int) -> None:
    for name in ("plain", "computed_between", "attention", "recomputed", "a_dataclass"):
        want = whole(LOSSES[name], params(), (IDS,))
        got = in_chunks.run(LOSSES[name], params(), (IDS,), chunk_of=even(DEPTH, chunks))
        grads = [i for i in range(len(got.grads)) if sum(i in u for u in got.plan.uses) < 2]
        for i in grads:
            a, b = got.grads[i], want[1][i]
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), (name, i)


# --- what is found -------------------------------------------------------------------------------


def test_what_crosses_is_named_by_where_layers_meet_it_first() -> None:
    plan = rehearsed(LOSSES["a_skip_connection"], 4)
    assert list(plan.receives(3)) == [(2, "out", 0), (0, "in", 0)]
    assert [plan.receives(3)[x][0] for x in plan.receives(3)] == [2, 0]
    assert plan.sends(0) == (((0, "out", 0), 1), ((0, "in", 0), 3))
    assert plan.receives(0) == {} and plan.sends(3) == ()


def test_values_that_nobody_needs_do_not_cross() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = unused = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            x, unused = zf.layer(lambda q, x, y: (block(q, x), y), layer, x, unused)
        return end(x, p)

    plan = rehearsed(fn, 4)
    assert [len(plan.receives(k)) for k in range(4)] == [0, 1, 1, 1]


def test_leaves_go_to_the_chunks_that_use_them() -> None:
    p = params()
    layout = make_layout(p, world=1)
    paths = {slot.path: i for i, slot in enumerate(layout.slots) if slot is not None}
    plan = rehearsed(LOSSES["parameters_cast_first"], 3)
    assert plan.roots(0) == {paths["embed"]}
    assert plan.roots(1) == frozenset()
    assert plan.roots(2) == {paths["head"], paths["scale"]}


def test_shapes_dtypes_and_gradients_are_known_of_what_crosses() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x, best = F.embedding(ids, p["embed"]), None
        for layer in p["layers"]:
            x, best = zf.layer(lambda q, x, best: (block(q, x), x.argmax(-1)), layer, x, best)
        return end(x, p) + best.double().sum()

    plan = rehearsed(fn, 2)
    cpu = torch.device("cpu")
    assert list(plan.receives(1).values()) == [
        (0, Spec((2, 4, 6), torch.float64, cpu, True, (24, 6, 1)))
    ]


def test_the_result_is_known_everywhere() -> None:
    plan = rehearsed(lambda p, ids: (through(p, ids), {"ids": ids, "n": 3}), 2)
    loss, aux = plan.result
    assert loss.shape == () and loss.dtype == torch.float64 and loss.needs_grad
    assert aux["n"] == 3 and aux["ids"].shape == (2, 4) and not aux["ids"].needs_grad


@pytest.mark.parametrize("name", ["plain", "attention", "convolution", "choices", "masks"])
def test_operations_are_counted_like_torch_counts_them(name: str) -> None:
    p = params()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        LOSSES[name](p, IDS)  # others are not counted on a CPU
    plan = rehearsed(LOSSES[name], 2)
    assert sum(plan.flops) + sum(plan.flops_outside) == counter.get_total_flops() > 0
    assert plan.flops_outside[0] == 0 < plan.flops_outside[1] and len(plan.flops) == DEPTH


def test_two_rehearsals_find_the_same() -> None:
    one, two = rehearsed(LOSSES["a_skip_connection"], 3), rehearsed(LOSSES["a_skip_connection"], 3)
    assert one.crossing == two.crossing and one.uses == two.uses and one.flops == two.flops
    assert hash(one) != hash(two) and one != two  # each is known by itself


# --- what is left alone --------------------------------------------------------------------------


def test_a_rehearsal_draws_nothing_and_changes_nothing() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.dropout(F.embedding(ids, p["embed"]), 0.5) * torch.rand(6)
        for layer in p["layers"]:
            x = zf.layer(lambda q, x: F.dropout(block(q, x), 0.5), layer, x)
        return end(x, p)

    before, kept, p = torch.get_rng_state(), IDS.clone(), params()
    numbers = [x.clone() for x in zf.tree.leaves(p)]
    rehearsed(fn, 2, p=p)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(IDS, kept)
    assert all(torch.equal(a, b) for a, b in zip(zf.tree.leaves(p), numbers, strict=True))


@pytest.mark.parametrize("looks", [False, True])
def test_tensors_that_layers_write_to_keep_their_numbers(looks: bool) -> None:
    calls, means, rows = torch.zeros(()), torch.zeros(6), torch.zeros(4, 6)

    def run(q: Any, x: Tensor) -> Tensor:
        nonlocal calls
        y = block(q, x)
        calls += 1
        means.mul_(0.9).add_(torch.ones(6))
        rows[1] = 3
        if looks and float(y.detach().sum()) < 1e9:
            means.add_(y.detach().mean((0, 1)), alpha=0.1)
            rows[0].copy_(y.detach()[0, 0])
        return y

    rehearsed(lambda p, ids: through(p, ids, run), 1)
    assert not calls and not means.any() and not rows.any()
    with contextlib.suppress(CompositionError):  # of what a layer of another stage has written
        rehearsed(lambda p, ids: through(p, ids, run), 2)
    assert not calls and not means.any() and not rows.any()


def test_masks_are_those_of_the_whole_loss() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            x = zf.layer(lambda q, x: F.dropout(block(q, x), 0.5), layer, x)
        return end(x, p)

    def inner(q: Any, x: Tensor) -> Tensor:
        return zf.layer(lambda r, y: F.dropout(block(r, y), 0.5), q, x)

    def between(p: Any, ids: Tensor) -> Tensor:
        x = F.dropout(F.embedding(ids, p["embed"]), 0.5)
        for layer in p["layers"]:
            x = F.dropout(zf.layer(block, layer, x), 0.5) * torch.rand(6)
        return end(x * torch.rand_like(x).round(), p)

    for loss in (fn, lambda p, ids: through(p, ids, inner), between):
        scope_of = scope.folded(zf.random.key(5))
        with scope(3):
            want = whole(loss, params(), (IDS,), scope_of=scope_of)
        got = in_chunks.run(
            *(loss, params(), (IDS,)),
            chunk_of=even(4, 3),
            scope_of=scope_of,
            around=lambda: scope(3),
        )
        assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14


DRAWS = {
    "normal around": lambda x: torch.normal(x.detach(), 0.3),
    "normal": lambda x: torch.empty_like(x).log_normal_(),
    "integers": lambda x: torch.empty_like(x).random_(3),
    "a pool": lambda x: F.fractional_max_pool2d(x, 2, output_size=2).mean(),
    "dropout": lambda x: F.dropout(x, 0.5),
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_between_layers_as_much_is_drawn_without_numbers(name: str, cast: bool) -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            with torch.autocast("cpu", enabled=cast):
                x = torch.tanh(x + DRAWS[name](x))
            x = zf.layer(block, layer, x)
        return end(F.dropout(x), p)

    with scope(3):
        want = whole(fn, params(), (IDS,))
    got = in_chunks.run(fn, params(), (IDS,), chunk_of=even(4, 2), around=lambda: scope(3))
    assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14


def test_a_tensor_of_the_user_that_ghosts_are_written_to_comes_back() -> None:
    mine = torch.zeros(2, 4, 6)

    def fn(p: Any, ids: Tensor) -> Tensor:
        mine.copy_(F.embedding(ids, p["embed"]).detach())
        return through(p, ids)

    rehearsed(fn, 2)
    assert type(mine) is Tensor and not mine.any()


# --- what is refused -----------------------------------------------------------------------------


def outside(look: Any) -> Any:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            x = zf.layer(block, layer, x)
            look(x)
        return end(x, p)

    return fn


LOOKS = {
    "a branch": lambda x: 1 if x.max() > 0 else 0,
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "unique": lambda x: x.unique(),
    "in": lambda x: 3.0 in x,
    "data_ptr": lambda x: x.data_ptr(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "pickle": lambda x: pickle.dumps(x),
    "backward": lambda x: x.sum().backward(),
    "grad": lambda x: torch.autograd.grad(x.sum(), x),
    "as_subclass": lambda x: x.as_subclass(Marked),
}


@pytest.mark.parametrize("name", LOOKS)
def test_numbers_that_are_elsewhere_cannot_be_looked_at(name: str) -> None:
    with pytest.raises(CompositionError, match="met a value") as error:
        rehearsed(outside(LOOKS[name]), 2)
    assert re.search(r"test_rehearsal\.py:\d+", str(error.value))


@pytest.mark.parametrize("name", ["poisson", "_standard_gamma", "rrelu", "binomial"])
def test_how_much_is_drawn_is_not_decided_by_numbers_that_are_elsewhere(name: str) -> None:
    def draw(x: Tensor) -> Tensor:
        if name == "binomial":
            return torch.binomial(torch.ones_like(x), x.detach().sigmoid())
        return F.rrelu(x, training=True) if name == "rrelu" else getattr(torch, name)(x.exp())

    def behind(p: Any, ids: Tensor) -> Tensor:
        return through(p, ids) + draw(p["scale"].detach()).sum()

    with pytest.raises(CompositionError, match=name):
        rehearsed(outside(draw), 2)
    if name != "binomial":  # which torch does not know without numbers
        assert rehearsed(behind, 2).chunks == 2


def halved() -> nn.Module:
    """A module that halves the gradient of what it is given."""
    made = nn.Linear(6, 6)
    made.register_full_backward_hook(lambda module, given, grads: (given[0] / 2,))
    return made


def test_modules_inside_of_layers_have_hooks_in_backward() -> None:
    linear = halved()

    def run(q: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.func.functional_call(linear, {"weight": q["w"]}, (x,)))

    fn = partial(through, fn=run)
    want = whole(fn, params(), (IDS,))
    got = in_chunks.run(fn, params(), (IDS,), chunk_of=even(4, 2))
    assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14
    with pytest.raises(CompositionError, match="Hang it on a module that a layer calls"):
        rehearsed(outside(linear), 2)


class Marked(Tensor):
    """A subclass."""


SPARSE = torch.arange(16.0, dtype=torch.float64).reshape(4, 4).remainder(3) / 9
OTHER_TENSORS = {
    "csr": lambda q, x: torch.stack([SPARSE.to_sparse_csr() @ y for y in block(q, x)]),
    "coo": lambda q, x: torch.stack([SPARSE.to_sparse() @ y for y in block(q, x)]),
    "a subclass": lambda q, x: block(q, x).as_subclass(Marked),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_layers_may_have_other_tensors(name: str) -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            x = zf.layer(OTHER_TENSORS[name], layer, x)
        return end(x.as_subclass(Tensor), p)

    want = whole(fn, params(), (IDS,))
    got = in_chunks.run(fn, params(), (IDS,), chunk_of=even(4, 2))
    assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14


IN_LAYERS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).square().sum())(x),
    "vmap of grad": lambda f, x: vmap(vmap(torch.func.grad(lambda y: f(y).square().sum())))(x),
    "jacrev": lambda f, x: vmap(vmap(torch.func.jacrev(f)))(x).sum(-1),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
}


@pytest.mark.parametrize("name", IN_LAYERS)
def test_layers_may_call_functions_of_functions(name: str) -> None:
    def run(q: Any, x: Tensor) -> Tensor:
        w = torch.func.grad(lambda w: torch.tanh(x @ w).square().mean())(q["w"])
        return x @ (q["w"] - w) + IN_LAYERS[name](lambda y: torch.tanh(y @ q["w"] + q["b"]), x)

    fn = partial(through, fn=run)
    want = whole(fn, params(), (IDS,))
    got = in_chunks.run(fn, params(), (IDS,), chunk_of=even(4, 2))
    assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14


def test_a_layer_that_looks_within_a_function_of_a_function_is_told_so() -> None:
    def run(q: Any, x: Tensor) -> Tensor:
        y = vmap(torch.func.grad(lambda y: (y @ q["w"]).sum()))(x)
        return y * 2 if float(y.sum()) > 1e9 else y

    with pytest.raises(CompositionError, match="looks at numbers does so before"):
        rehearsed(partial(through, fn=run), 2)


def test_who_catches_the_error_gets_it_all_the_same() -> None:
    def caught(x: Tensor) -> None:
        with contextlib.suppress(Exception):
            x.sum().item()

    with pytest.raises(CompositionError, match="item"):
        rehearsed(outside(caught), 2)


def test_a_value_that_no_layer_was_given_is_named() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for k, layer in enumerate(p["layers"]):
            x = zf.layer(block, layer, x)
            if k == 0:
                middle = x * 2
                middle[..., :3].zero_()  # what that gives is another tensor
        return end(x + middle, p)

    with pytest.raises(
        CompositionError, match=r"add at .*py:\d+, in stage 1 .* stage 0 that no layer"
    ):
        rehearsed(fn, 2)
    with pytest.raises(CompositionError, match="as an argument"):
        rehearsed(fn, 4)


def test_what_a_function_of_the_users_gives_between_layers_is_named() -> None:
    """What its forward computes is not what it returns."""

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] * 2

    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            tripled: Any = Tripled.apply(x)
            x = zf.layer(block, layer, torch.tanh(x)) + tripled
        return end(x, p)

    with pytest.raises(CompositionError, match="that no layer was given"):
        rehearsed(fn, 2)


def test_layers_out_of_order_are_named() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for k in (0, 2, 1, 3):
            x = zf.layer(block, p["layers"][k], x)
        return end(x, p)

    assert [c.layer for c in rehearsed(fn, 1).calls] == [0, 2, 1, 3]
    with pytest.raises(CompositionError, match=r"layers\.1, of stage 0 .* behind layer layers\.2"):
        rehearsed(fn, 2)


def test_a_chunk_without_a_layer_is_named() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"][:2]:
            x = zf.layer(block, layer, x)
        return end(x, p)

    with pytest.raises(CompositionError, match=r"stage 1 .* none of layers\.2, layers\.3 runs"):
        rehearsed(fn, 2)


def test_a_layers_parameter_outside_of_it_is_named() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        return through(p, ids) + p["layers"][0]["w"].sum()

    with pytest.raises(CompositionError, match=r"layers\.0\.w is a parameter of layer layers\.0"):
        rehearsed(fn, 2)


def test_a_batch_that_is_written_to_is_an_error_and_stays() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        ids += 1
        return through(p, ids % 11)

    ids = IDS.clone()
    with pytest.raises(CompositionError, match="writes to its batch"):
        rehearsed(fn, 2, (ids,))
    assert torch.equal(ids, IDS)


def test_a_value_written_to_behind_a_later_chunk_is_an_error() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        first = x = F.embedding(ids, p["embed"]) * 1.0
        for layer in p["layers"]:
            x = zf.layer(block, layer, x)
        first += x
        return end(first, p)

    assert rehearsed(fn, 1).chunks == 1
    with pytest.raises(CompositionError, match="writes to a value of an earlier one"):
        rehearsed(fn, 2)


def test_a_hook_on_a_value_that_has_been_passed_on_is_an_error() -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x, results = F.embedding(ids, p["embed"]), []
        for layer in p["layers"]:
            x = zf.layer(block, layer, x)
            results.append(x)
        results[1].register_hook(lambda g: g * 0.5)
        return end(x, p)

    assert rehearsed(fn, 1).chunks == 1
    with pytest.raises(CompositionError, match=r"stage 1 .* hook .* that stage 0 has computed"):
        rehearsed(fn, 2)


PARTS = {
    "a view is given": (lambda a: [a[k] for k in range(4)], lambda q, x, a: a.copy_(block(q, x))),
    "detached": (lambda a: [a.detach()] * 4, lambda q, x, a: a[0].add_(block(q, x).detach())),
    "views are kept": (lambda a: [a.view_as(a)] * 4, lambda q, x, a: a[0].mul_(x.detach())),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_layer_that_writes_to_what_shares_memory_is_named(name: str) -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x, total = F.embedding(ids, p["embed"]), torch.ones(4, 2, 4, 6)
        parts, write = PARTS[name]
        for layer, part in zip(p["layers"], parts(total), strict=True):
            x = zf.layer(lambda *a: write(*a) * 1, layer, x, part)
        return end(x + total.sum(0), p)

    with pytest.raises(CompositionError, match=r"layer layers\.0.*shares memory with another"):
        rehearsed(fn, 2)
    assert rehearsed(fn, 1).chunks == 1


@pytest.mark.parametrize("looks", [False, True])
def test_a_layer_that_writes_to_a_part_of_what_it_was_not_given_is_named(looks: bool) -> None:
    def fn(p: Any, ids: Tensor) -> Tensor:
        x, total = F.embedding(ids, p["embed"]), torch.zeros(4, 2, 4, 6)

        def run(q: Any, x: Tensor, k: int) -> Tensor:
            y = block(q, x)
            total[k].copy_(y.detach())
            return y * 2 if looks and float(y.detach().sum()) > 1e9 else y

        for k, layer in enumerate(p["layers"]):
            x = zf.layer(run, layer, x, k)
        return end(x + total.sum(0), p)

    with pytest.raises(CompositionError, match=r"a value that layer .* has kept"):
        rehearsed(fn, 2)
    assert rehearsed(fn, 1).chunks == 1


@pytest.mark.parametrize("looks", [False, True])
def test_of_two_values_in_one_memory_neither_is_written_to_behind_a_cut(looks: bool) -> None:
    def both(q: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = block(q, x)
        return y, (y if looks and float(y.detach().sum()) > 1e9 else y.flatten())

    def writes(q: Any, x: Tensor, flat: Tensor) -> Tensor:
        total = flat.sum()
        x.mul_(2)
        return block(q, x.clone()) + flat.view(x.shape) * total

    def fn(p: Any, ids: Tensor) -> Tensor:
        first, second, *rest = p["layers"]
        x, flat = zf.layer(both, first, F.embedding(ids, p["embed"]))
        x = zf.layer(writes, second, x, flat)
        for layer in rest:
            x = zf.layer(block, layer, x)
        return end(x, p)

    with pytest.raises(CompositionError, match="of whose memory an earlier stage sends a second"):
        rehearsed(fn, 4)
    got = in_chunks.run(fn, params(), (IDS,), chunk_of=even(4, 2))
    assert torch.equal(got.result, whole(fn, params(), (IDS,))[0])


# --- a run that is not the rehearsal -------------------------------------------------------------


def against(fn: Any, other: Any, chunks: int = 2) -> str:
    plan = rehearsed(fn, chunks)
    with pytest.raises(CompositionError) as error:
        in_chunks.run(other, params(), (IDS,), chunk_of=even(4, chunks), plan=plan)
    return str(error.value)


def test_another_order_of_layers_is_named() -> None:
    def turned(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for k in (1, 0, 2, 3):
            x = zf.layer(block, p["layers"][k], x)
        return end(x, p)

    assert "runs in the place of layer layers.0" in against(LOSSES["plain"], turned)


def test_fewer_layers_are_named() -> None:
    def fewer(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"][:1]:
            x = zf.layer(block, layer, x)
        return end(x, p)

    assert "returned when it was the turn of layer layers.1" in against(LOSSES["plain"], fewer)


def test_other_shapes_are_named() -> None:
    def longer(p: Any, ids: Tensor) -> Tensor:
        return through(p, torch.cat([ids, ids], 1)[:, :5][:, [0, 1, 2, 3, 0]])

    message = against(LOSSES["plain"], longer)
    assert "layer layers.1 has a value of shape [2, 5, 6]" in message


def test_a_value_that_nobody_sent_is_named() -> None:
    message = against(LOSSES["a_closure"], closes_over_another)
    assert re.search(r"add at .*test_rehearsal\.py:\d+ uses a value of shape \[2, 4, 6\]", message)
    message = against(LOSSES["plain"], LOSSES["a_skip_connection"])
    assert "stage 1 of a pipeline: the result of the loss uses a value of shape []" in message


def closes_over_another(p: Any, ids: Tensor) -> Tensor:
    x = first = F.dropout(F.embedding(ids, p["embed"]) * 2, 0.0)
    second = F.dropout(x * 2, 0.0)
    for layer in p["layers"]:
        x = zf.layer(lambda q, x: block(q, x) + first + second, layer, x)
    return end(x, p)


def test_other_arguments_are_named() -> None:
    message = against(LOSSES["plain"], LOSSES["a_layer_writes_to_a_mask"])
    assert "got 2 arguments, and not 1" in message


def test_an_argument_in_the_place_of_a_result_is_named() -> None:
    def early(passes: bool) -> Any:
        return lambda p, ids: through(p, ids, lambda q, x: x if passes else block(q, x))

    message = against(early(True), early(False))
    assert "layer layers.0 returned its argument 0 then, and something else now" in message
    got = in_chunks.run(  # a value of its own is sent, whatever it is
        *(early(True), params(), (IDS,)), chunk_of=even(4, 2), plan=rehearsed(early(False))
    )
    assert torch.equal(got.result, whole(early(True), params(), (IDS,))[0])


def grows_a_list(p: Any, ids: Tensor) -> Tensor:
    scales = [p["scale"], p["scale"] * 2]
    summed, named = torch.stack(scales).sum(0), {"tensors": [p["scale"], p["scale"]]}
    joined = torch.cat(**named).sum()
    scales.append(p["scale"] * 3)
    named["tensors"].append(p["scale"])
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
    return end(x * summed + joined, p)


def test_a_list_may_grow_behind_the_call_that_it_was_given_to() -> None:
    got = in_chunks.run(grows_a_list, params(), (IDS,), chunk_of=even(4, 2))
    want = whole(grows_a_list, params(), (IDS,))
    assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14


def writes_to(what: str) -> Any:
    """A loss that writes to what it has made something of that is used behind the layers."""

    def fn(p: Any, ids: Tensor) -> Tensor:
        offset, ids = torch.zeros(6), ids.clone()
        twice = p["scale"] * 2
        made = p["scale"] + offset, F.embedding(ids, p["embed"].detach()), twice * 3
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            x = zf.layer(block, layer, x)
        {"offset": offset, "ids": ids, "twice": twice}[what].add_(1)
        x = x * made[0] + made[1] + made[2]
        return end(x, p)

    return fn


@pytest.mark.parametrize("what", ["offset", "ids", "twice"])
def test_what_a_value_was_to_be_made_of_is_not_written_to(what: str) -> None:
    message = against(writes_to(what), writes_to(what))
    assert "that has been written to in the meantime. Give it a copy, x.clone()" in message
    assert re.search(r"met a value .* tensor of shape \[(6|2, 4)\]", message)


# --- ghosts --------------------------------------------------------------------------------------


def test_a_ghost_says_what_it_is() -> None:
    seen = SimpleNamespace()  # of lists it would have copies of its own

    def fn(p: Any, ids: Tensor) -> Tensor:
        seen.x = p["embed"]
        return through(p, ids)

    rehearsed(fn)
    x = seen.x
    assert type(x) is Ghost and isinstance(x, Tensor)
    assert repr(x) == "Ghost([11, 6], torch.float64)" == f"{x}"
    assert (x.shape, x.dtype, x.device.type, x.is_meta) == ((11, 6), torch.float64, "cpu", False)
    assert len(x) == 11 and x.requires_grad and x.is_contiguous() and x.T.stride() == (1, 6)
    assert (x.to("meta").device.type, x.bfloat16().dtype) == ("meta", torch.bfloat16)
    assert (x @ x.T).shape == (11, 11) and hash(x) == hash(x)
    with pytest.raises(CompositionError, match="numpy"):
        x.numpy()


def test_no_chunks_layers_run_elsewhere() -> None:
    ran: list[int] = []

    def fn(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for k, layer in enumerate(p["layers"]):
            x = zf.layer(lambda q, x, k=k: (ran.append(k), block(q, x))[1], layer, x)
        return end(x, p)

    plan = rehearsed(fn, 2)
    ran.clear()
    in_chunks.run(fn, params(), (IDS,), chunk_of=even(4, 2), plan=plan)
    assert ran == [0, 1, 2, 3]


# --- several ranks -------------------------------------------------------------------------------


def test_a_rank_rehearses_alone_and_nothing_is_sent() -> None:
    def body() -> Any:
        ranks = group(zf.mesh(tensor=2), "tensor")
        widths = Split.of(0, [[0, 1, 2], [3, 4]])

        def run(q: Any, x: Tensor) -> Tensor:
            y = conjugates.summed(conjugates.copied(x, ranks) @ q["w"], ranks)
            part = y[..., : widths.width(ranks.rank)]
            scattered = conjugates.scattered_positions(y, ranks)
            assert scattered.shape[1] == 2
            return conjugates.gathered_positions(scattered, ranks, 4) + conjugates.gathered(
                part, ranks, widths
            ).sum(-1, keepdim=True)

        def loss(p: Any, ids: Tensor) -> Tensor:
            x = conjugates.summed(F.embedding(ids, p["embed"]), ranks)
            for layer in p["layers"]:
                x = zf.layer(run, layer, x)
            counts = ranks.all_reduce(torch.ones(3)).wait()  # of numbers that are here
            return end(x, p) + counts.sum()

        if ranks.rank == 1:
            return None
        with ledger() as sent:
            plan = rehearsed(loss, 2)
        return dict(sent.by_kind), [list(plan.receives(k)) for k in range(2)]

    assert zf.simulate(2)(body)()[0] == ({}, [[], [(1, "out", 0)]])


@dataclass(frozen=True, repr=False, eq=False)
class Rehearsing(zf.Transform):
    """Rehearses each loss first; ``found`` has what was sent then and later, and the plan."""

    found: list[Any]
    position = 400

    def differentiate(self, call: Any, running: Any) -> Any:
        def run(asked: Any) -> Any:
            layout = asked.params.layout
            with ledger() as sent:
                plan = rehearse(asked.loss_fn, layout, asked.args, asked.kwargs, [0, 0, 1, 1])
            with ledger() as then:
                out = call(asked)
            self.found.append((dict(sent.by_kind), dict(then.by_kind), plan))
            return out

        return run


@pytest.mark.parametrize("sequence", [False, True])
def test_split_leaves_are_rehearsed_without_a_message(sequence: bool) -> None:
    config = gpt.GPTConfig(vocab=64, width=32, depth=4, heads=2)
    params, tx = gpt.init(config, zf.random.key(0)), zf.optim.sgd(0.1)
    ids, found = zf.random.randint(zf.random.key(1), 0, 64, (4, 10)), list[Any]()

    def body() -> None:
        step = zf.train_step(lambda p, b: gpt.loss(p, b, config), tx)
        rules = gpt.rules(config)
        step = zf.split(step, mesh=zf.mesh(tensor=2), rules=rules, sequence=sequence)
        step = step.wrap(Rehearsing(found))
        step(step.place(zf.TrainState.create(params, tx)), ids)

    zf.simulate(2)(body)()
    assert len(found) == 2
    for sent, then, plan in found:
        assert sent == {} and then["all_reduce"] + then.get("reduce_scatter", 0) > 0
        ((_, spec),) = plan.receives(1).values()
        # A rank's part of the stream is its positions.
        assert spec.shape[0] == 4 and spec.shape[2] == 32 and spec.shape[1] in (9, 5, 4)
        assert (spec.shape[1] < 9) == sequence


# --- memory and compilers ------------------------------------------------------------------------


def test_a_plan_holds_no_tensor_of_its_rehearsal() -> None:
    seen = SimpleNamespace()

    def fn(p: Any, ids: Tensor) -> Tensor:
        seen.refs = [weakref.ref(p["embed"]), weakref.ref(ids)]
        return LOSSES["a_dataclass"](p, ids)

    plan = rehearsed(fn, 2, (IDS.clone(),))
    gc.collect()
    assert plan.chunks == 2 and [x() for x in seen.refs] == [None, None]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_are_not_compiled_for_shapes() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fast = torch.compile(block, backend=backend)

    def loss(p: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, p["embed"])
        for layer in p["layers"]:
            x = zf.layer(fast, layer, x)
        return x.square().mean()

    want, count = whole(loss, params(), (IDS,)), len(graphs)
    assert count > 0
    plan = rehearsed(loss, 2, (IDS[:, :3],))
    assert plan.calls[0].results[0].shape == (2, 3, 6) and len(graphs) == count
    got = in_chunks.run(loss, params(), (IDS,), chunk_of=even(4, 2))
    assert torch.equal(got.result, want[0]) and worst(got, want) == 0.0
