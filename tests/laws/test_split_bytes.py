"""What ranks of a split Llama send and keep is what theory says, to the byte.

Each layer has two pairs of products, so it sums activations of ``[b, s, h]`` twice forward and
twice backward (Shoeybi et al., Megatron-LM, 2019, section 3). What lies between the products of a
pair is in parts; the residual stream and its norms are whole on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zfunc as zf
from tests.laws.architectures import LENGTH, VOCAB
from tests.laws.plans_by_hand import HEAD_DIM, llama, local_params, loss_of, tokens
from zfunc import optim
from zfunc.ranks.comm import even_cuts
from zfunc.ranks.routes import all_gather_bytes, all_reduce_bytes
from zfunc.trees import tree

pytest.importorskip("transformers")

LAYERS, HEADS, WIDTH, INNER, BATCH, ITEM = 2, 4, 24, 48, 4, 8
PADDING = 16  # elements a leaf at most
ONCE = BATCH * LENGTH * WIDTH  # elements of the residual stream
TX = optim.adamw(1e-2)


class Sent(NamedTuple):
    """What rank 0 sent in a step: by label how often and how much, and by axis."""

    calls: Counter[str]
    payload: Counter[str]
    axes: Counter[str]


def model(heads: int = HEADS, kv: int = HEADS) -> Any:
    return zf.functionalize(llama(heads, kv, intermediate_size=INNER), train=False)


def step_of(of: Any, ways: int, *, remat: bool = False, vocab: bool = False) -> Any:
    def loss(params: Any, ids: Tensor) -> Tensor:
        return loss_of(of.apply(params, input_ids=ids, use_cache=False).logits, ids)

    step = zf.split(zf.train_step(loss, TX), of, tensor=ways, vocab=vocab)
    return zf.remat(step) if remat else step


def sent(of: Any, ways: int, *, data: int = 1, stage: int | None = None, **how: bool) -> Sent:
    """In the second step: the first one also compares what should be alike."""
    full = zf.TrainState.create(of.params, TX)

    def rank() -> Sent:
        step = step_of(of, ways, **how)
        step = step if stage is None else zf.shard(step, stage=stage)
        state, ids = step.place(full), step.local_batch(tokens(0, BATCH))
        state, _ = step(state, ids)
        with zf.comm.ledger() as led:
            step(state, ids)
        return Sent(led.calls_by_label, led.by_label, led.by_axis)

    return zf.simulate(ways * data)(rank)()[0]


def summed(ways: int, times: int, numel: int = ONCE) -> tuple[int, int]:
    """So many all-reduces, and the bytes that rank 0 sends in them."""
    return times, times * all_reduce_bytes(numel, ITEM, 0, ways)


def of_label(seen: Sent, label: str) -> tuple[int, int]:
    return seen.calls[label], seen.payload[label]


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("remat", [False, True])
def test_a_layer_sums_twice_forward_and_twice_backward(ways: int, remat: bool) -> None:
    seen = sent(model(), ways, remat=remat)
    forward = 3 if remat else 2  # what is computed again leaves out its last sum
    assert of_label(seen, "tensor forward") == summed(ways, forward * LAYERS)
    assert of_label(seen, "tensor backward") == summed(ways, 2 * LAYERS)
    rest = {"rows of step.local_batch", "sums of leaves"}
    assert {x for x in seen.calls if x.startswith("tensor ")} == seen.calls.keys() - rest
    assert seen.calls.keys() - rest == {"tensor forward", "tensor backward"}
    assert max(seen.calls[label] for label in rest) == 1
    assert sum(seen.payload[label] for label in rest) < ONCE  # a number a leaf, not activations
    assert seen.axes == {"tensor": sum(seen.payload.values())}


@pytest.mark.parametrize("ways", [2, 4])
def test_tables_and_the_loss_are_listed_apart(ways: int) -> None:
    plain, seen = sent(model(), ways), sent(model(), ways, vocab=True)
    assert of_label(seen, "tensor embed") == summed(ways, 1)
    cuts = [BATCH * LENGTH * at for at in even_cuts(VOCAB, ways)]
    logits = all_gather_bytes(cuts, ITEM, 0, ways)
    of_input = all_reduce_bytes(ONCE, ITEM, 0, ways)
    assert of_label(seen, "tensor head") == (2, logits + of_input)
    for label in plain.calls:
        if label.startswith("tensor "):
            assert of_label(seen, label) == of_label(plain, label)


@pytest.mark.parametrize(("heads", "kv", "ways"), [(4, 1, 4), (4, 2, 4), (4, 1, 2)])
def test_rows_that_ranks_share_are_listed_apart(heads: int, kv: int, ways: int) -> None:
    seen, theory = sent(model(heads, kv), ways), 2 * LAYERS
    assert of_label(seen, "tensor forward") == summed(ways, theory)
    assert of_label(seen, "tensor backward") == summed(ways, theory)
    # Of keys and of values, the gradients of all rows that more than one rank has.
    rows = summed(ways, 2 * LAYERS, kv * HEAD_DIM * WIDTH)
    assert of_label(seen, "tensor shared rows") == rows


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parts_of_leaves_are_all_that_the_data_axis_sees(stage: int) -> None:
    """Activations go over tensor alone, of half the rows each; parameters over data alone."""
    of = model()
    seen = sent(of, 2, data=2, stage=stage)
    activations = sum(n for label, n in seen.payload.items() if label.startswith("tensor "))
    assert activations == 4 * LAYERS * all_reduce_bytes(ONCE // 2, ITEM, 0, 2)
    assert activations <= seen.axes["tensor"] < activations + ONCE  # a number a leaf besides
    # A reduction and a gather (or both in one) of what a tensor rank has, padded to even parts.
    moves = ("reduce", "join", "gather")
    leaves = sum(n for label, n in seen.payload.items() if label.split()[0] in moves)
    plan, params = zf.split.plan(of, 2, vocab=False), tree.flatten_names(of.params)
    local = sum(x.numel() // (2 if name in plan.splits else 1) for name, x in params.items())
    padding = PADDING * len(params)
    assert 2 * local // 2 * ITEM <= leaves <= 2 * (local + padding) // 2 * ITEM
    assert leaves <= seen.axes["data"] <= leaves + ONCE


# --- what is kept ------------------------------------------------------------------------------


def kept(of: Any, ways: int) -> int:
    """Bytes that backward finds after a forward pass, parameters apart, on rank 0."""
    full = tree.flatten_names(of.params)
    plan = zf.split.plan(of, ways, vocab=False)

    def rank() -> int:
        params = local_params(of, full, plan, zf.rank())
        own = {x.untyped_storage().data_ptr() for x in tree.leaves(params)}
        found: dict[int, Tensor] = {}

        def pack(x: Tensor) -> Tensor:
            if x.untyped_storage().data_ptr() not in own:
                found[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logits = of.apply(params, input_ids=tokens(0, BATCH), use_cache=False).logits
            loss_of(logits, tokens(0, BATCH)).backward()
        return sum(x.untyped_storage().nbytes() for x in found.values())

    return zf.simulate(ways)(rank)()[0]


def between(of: Any) -> int:
    """Bytes of saved tensors between the products of pairs, on one process."""
    full, total = tree.flatten_names(of.params), 0
    params = local_params(of, full, zf.split.plan(of, 1), 0)
    own = {x.untyped_storage().data_ptr() for x in tree.leaves(params)}
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        found.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        of.apply(params, input_ids=tokens(0, BATCH), use_cache=False)
    for at, x in found.items():
        of_heads = x.dim() > 2 and x.shape[1] == HEADS
        wide = x.dim() > 1 and x.shape[-1] in (INNER, HEADS * HEAD_DIM)
        if at not in own and (of_heads or wide):
            total += x.untyped_storage().nbytes()
    return total


def test_what_backward_needs_between_products_is_divided() -> None:
    of = model()
    whole, inner = kept(of, 1), between(of)
    assert inner > whole // 3
    for ways in (2, 4):
        assert kept(of, ways) == whole - inner + inner // ways


@contextmanager
def shapes_seen() -> Iterator[set[tuple[int, ...]]]:
    """Shapes of all that operators make in the block."""
    found: set[tuple[int, ...]] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            some = out if isinstance(out, tuple | list) else (out,)
            found.update(tuple(x.shape) for x in some if isinstance(x, Tensor))
            return out

    with Watch():
        yield found


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_a_step_makes_nothing_of_a_full_width(stage: int | None) -> None:
    of = model()
    full = zf.TrainState.create(of.params, TX)

    def rank() -> tuple[set[tuple[int, ...]], int]:
        step = step_of(of, 2)
        step = step if stage is None else zf.shard(step, stage=stage)
        state, ids = step.place(full), tokens(0, BATCH)
        state, _ = step(state, ids)
        local = sum(x.numel() for x in tree.leaves(state.params))
        with shapes_seen() as found:
            step(state, ids)
        return found, local

    for found, local in zf.simulate(2)(rank)():
        assert any(INNER // 2 in shape for shape in found)
        assert not [shape for shape in found if INNER in shape]
        flat = [shape[0] for shape in found if len(shape) == 1]
        assert max(flat) <= local + PADDING * len(tree.leaves(of.params))
