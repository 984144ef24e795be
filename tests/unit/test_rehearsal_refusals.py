"""What a rehearsal refuses, and what a run does that is not as rehearsed: each says where."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import zfunc as zf
from tests.unit import in_chunks
from tests.unit.in_chunks import even, whole, worst
from tests.unit.rehearsed_losses import (
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

# --- in a rehearsal ------------------------------------------------------------------------------


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
    assert re.search(r"test_rehearsal_refusals\.py:\d+", str(error.value))


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
    try:
        draw(torch.ones(2, device="meta"))
    except NotImplementedError:  # torch does not know it without numbers; gamma 2.11 alone
        assert name in ("binomial", "_standard_gamma")
        return
    assert rehearsed(behind, 2).chunks == 2


def halved() -> nn.Module:
    """A module that halves the gradient of what it is given."""
    made = nn.Linear(6, 6, dtype=torch.float64)
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


def test_a_layer_that_looks_within_a_function_of_a_function_is_told_so() -> None:
    def run(q: Any, x: Tensor) -> Tensor:
        y = vmap(torch.func.grad(lambda y: (y @ q["w"]).sum()))(x)
        return y * 2 if float(y.sum()) > 1e9 else y

    with pytest.raises(CompositionError, match="looks at numbers does so before"):
        rehearsed(partial(through, fn=run), 2)


def test_a_layer_that_looks_at_numbers_may_raise_an_error_that_holds_on_to_them() -> None:
    def run(q: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if float(rows.sum()) < float("inf"):
            raise ValueError(f"mine, of {len(rows)} rows")
        return block(q, x)

    with pytest.raises(ValueError, match="mine, of 8 rows"):
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
        x, total = F.embedding(ids, p["embed"]), torch.ones(4, 2, 4, 6, dtype=torch.float64)
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


# --- in a run that is not the rehearsal ----------------------------------------------------------


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
    assert re.search(
        r"add at .*test_rehearsal_refusals\.py:\d+ uses a value of shape \[2, 4, 6\]", message
    )
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
