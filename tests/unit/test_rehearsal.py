"""A loss in chunks is the loss: the same bits, whatever it does between its layers.

Chunks run one after the other in one process (``in_chunks``); what crosses goes through a dict.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import zfunc as zf
from tests.unit import in_chunks
from tests.unit.in_chunks import even, whole, worst
from tests.unit.rehearsed_losses import (
    DEPTH,
    IDS,
    LOSSES,
    Marked,
    block,
    end,
    params,
    rehearsed,
    through,
)
from zfunc.errors import CompositionError
from zfunc.language import gpt
from zfunc.layout.cutting import make_layout
from zfunc.layout.splits import Split
from zfunc.operators import conjugates
from zfunc.ranks.accounting import ledger
from zfunc.ranks.axes import group
from zfunc.ranks.keys import scope
from zfunc.rehearsal.ghosts import Ghost
from zfunc.rehearsal.plans import Spec
from zfunc.rehearsal.rehearsal import rehearse


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_of_rows_are_known_and_counted(dtype: torch.dtype) -> None:
    """As experts have them; torch's kernel for shapes knows bfloat16 alone."""
    experts = zf.Layers([{"w": torch.zeros(4, 72, 72, dtype=dtype)} for _ in range(2)])
    offs = torch.tensor([16, 40, 48, 64], dtype=torch.int32)

    def product(p: Any, x: Tensor) -> Tensor:
        return F.grouped_mm(x, p["w"], offs=offs)

    def loss(p: Any, x: Tensor) -> Tensor:
        return zf.scan(product, p["experts"], x).square().mean()

    layout = make_layout({"experts": experts}, world=1)
    plan = rehearse(loss, layout, (torch.zeros(64, 72, dtype=dtype),), chunk_of=[0, 1])
    (spec,) = [spec for _, spec in plan.receives(1).values()]
    assert (spec.shape, spec.dtype) == ((64, 72), dtype)
    assert [*plan.flops] == [2 * 64 * 72 * 72] * 2


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


# --- what layers may do --------------------------------------------------------------------------


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
