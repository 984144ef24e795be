"""Losses of many kinds over one tree of parameters: four layers, and leaves outside of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from tests.unit.in_chunks import even
from zfunc.engine.recomputation import taken
from zfunc.layout.cutting import make_layout
from zfunc.rehearsal.plans import Rehearsed
from zfunc.rehearsal.rehearsal import rehearse
from zfunc.trees.nodes import Layers

WIDTH, VOCAB, DEPTH = 6, 11, 4
IDS = torch.arange(8).reshape(2, 4) % VOCAB
Loss = Callable[[Any, Tensor], Tensor]
LOSSES: dict[str, Loss] = {}


def params() -> dict[str, Any]:
    """In float64."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5

    return {
        "layers": Layers([{"w": drawn(WIDTH, WIDTH), "b": drawn(WIDTH)} for _ in range(DEPTH)]),
        "embed": drawn(VOCAB, WIDTH),
        "head": drawn(WIDTH, VOCAB),
        "scale": drawn(WIDTH) + 2,
    }


def loss(fn: Loss) -> Loss:
    LOSSES[fn.__name__.strip("_")] = fn
    return fn


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"].T + p["b"])


def end(x: Tensor, p: Any) -> Tensor:
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), IDS.flatten())


def through(p: Any, ids: Tensor, fn: Any = block) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(fn, layer, x)
    return end(x, p)


def rehearsed(fn: Any, chunks: int = 2, args: Any = (IDS,), p: Any = None) -> Rehearsed:
    """What a rehearsal finds in a loss of this tree, cut evenly."""
    p = params() if p is None else p
    return rehearse(fn, make_layout(p, world=1), args, chunk_of=even(DEPTH, chunks))


class Marked(Tensor):
    """A subclass."""


# --- values that cross ---------------------------------------------------------------------------


@loss
def plain(p: Any, ids: Tensor) -> Tensor:
    return through(p, ids)


@loss
def a_skip_connection(p: Any, ids: Tensor) -> Tensor:
    x = first = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
    return end(x * p["scale"] + first, p)


@loss
def computed_between(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(block, layer, x) * p["scale"]
    return end(x, p)


@loss
def turned_before_the_first_layer(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"]).transpose(0, 1)
    y = x.transpose(0, 1)
    for layer in p["layers"]:
        y = zf.layer(block, layer, y)
    return end(y, p)


@loss
def a_closure(p: Any, ids: Tensor) -> Tensor:
    x = first = F.embedding(ids, p["embed"]) * 2
    for layer in p["layers"]:
        x = zf.layer(lambda q, x: block(q, x) + first, layer, x)
    return end(x, p)


@loss
def a_parameter_in_a_closure(p: Any, ids: Tensor) -> Tensor:
    return through(p, ids, lambda q, x: block(q, x) * p["scale"])


@loss
def parameters_cast_first(p: Any, ids: Tensor) -> Tensor:
    q = {key: p[key].float().double() for key in ("embed", "head", "scale")}
    head = q["head"].T
    x = F.embedding(ids, q["embed"])
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
    return F.cross_entropy((x * q["scale"] @ head.T).flatten(0, 1), IDS.flatten())


@loss
def parameters_written_in_place(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    x += p["scale"]
    x *= 2
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
    return end(x, p)


@loss
def layers_used_twice(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(block, layer, zf.layer(block, layer, x))
    return end(x, p)


@loss
def a_layer_within_a_layer(p: Any, ids: Tensor) -> Tensor:
    def inner(q: Any, x: Tensor) -> Tensor:
        return torch.tanh(x * q["b"])

    return through(p, ids, lambda q, x: block(q, zf.layer(inner, q, x)))


@loss
def rows_by_themselves(p: Any, ids: Tensor) -> Tensor:
    x = torch.stack([row * 2 for row in F.embedding(ids, p["embed"])])
    a, b = x
    x = torch.stack([a, b])
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
    return end(x, p)


# --- what layers take and give -------------------------------------------------------------------


@dataclass
class Pair:
    x: Tensor
    rest: Any = None


class Record(dict[str, Any]):
    """A kind of dict."""


@loss
def a_dict_of_results(p: Any, ids: Tensor) -> Tensor:
    def both(q: Any, x: Tensor, y: Any) -> dict[str, Any]:
        return {"x": x + torch.tanh(x @ q["w"].T), "y": (y, None, 3), "z": y * 2}

    x = F.embedding(ids, p["embed"])
    y, z = x * 0.5, x
    for layer in p["layers"]:
        out = zf.layer(both, layer, x, y=y)
        x, (y, nothing, three), z = out["x"], out["y"], out["z"]
        assert nothing is None and three == 3
    return end(x + y + z, p)


@loss
def a_dataclass(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, pair: Pair) -> Pair:
        rest = 0 if pair.rest is None else pair.rest
        return Pair(pair.x + torch.tanh(pair.x @ q["w"].T), rest + pair.x.sum())

    pair = Pair(F.embedding(ids, p["embed"]))
    for layer in p["layers"]:
        pair = zf.layer(run, layer, pair)
    return end(pair.x, p) + pair.rest * 0.01


@loss
def a_kind_of_dict(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, record: Record) -> Record:
        assert type(record) is Record
        return Record(x=record["x"] + torch.tanh(record["x"] @ q["w"].T), n=record["n"] + 1)

    record = Record(x=F.embedding(ids, p["embed"]), n=0)
    for layer in p["layers"]:
        record = zf.layer(run, layer, record)
    assert record["n"] == DEPTH
    return end(record["x"], p)


@loss
def its_own_input(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * q["b"], mask, x

    x, mask = F.embedding(ids, p["embed"]), torch.ones(2, 4, 1)
    for layer in p["layers"]:
        x, mask, before = zf.layer(run, layer, x, mask)
        x = x + before
    return end(x * mask, p)


@loss
def made_of_the_batch(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + torch.tanh(x @ q["w"].T) * mask, mask * 2, ids[..., None] * 0.5

    x, mask = F.embedding(ids, p["embed"]), torch.ones(2, 4, 1)
    for layer in p["layers"]:
        x, mask, other = zf.layer(run, layer, x, mask)
    return end(x * mask + other, p)


# --- what is written in place --------------------------------------------------------------------


@loss
def written_within_a_layer(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ q["w"].T)
        x = x.clone()
        x += y
        return x.mul_(2)

    return through(p, ids, run)


@loss
def a_layer_writes_to_its_input(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        x += torch.tanh(x.clone() @ q["w"].T)
        return x

    x = F.embedding(ids, p["embed"]) * 1.0
    for layer in p["layers"]:
        x = zf.layer(run, layer, x)
    return end(x, p)


@loss
def a_layer_writes_and_returns_something_else(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor, sums: Tensor) -> Tensor:
        sums += x.sum(-1)
        return block(q, x)

    x = F.embedding(ids, p["embed"])
    sums = x.sum(-1)
    for layer in p["layers"]:
        x = zf.layer(run, layer, x, sums)
    return end(x * sums[..., None], p)


@loss
def a_layer_writes_to_a_mask(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor, mask: Tensor) -> Tensor:
        mask[:, 0] += 1
        return x + torch.tanh(x @ q["w"].T) * mask.clone()

    x, mask = F.embedding(ids, p["embed"]), torch.ones(2, 4, 1)
    for layer in p["layers"]:
        x = zf.layer(run, layer, x, mask)
    return end(x * mask, p)


@loss
def written_between(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"]) * 1.0
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
        x *= 2
        x += p["scale"]
    return end(x, p)


@loss
def a_view_of_zeros_is_written(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor, base: Tensor) -> Tensor:
        return block(q, x) + base

    x = F.embedding(ids, p["embed"])
    base = torch.zeros_like(x)
    view = base[:, 1:]
    view += x[:, :-1]
    for layer in p["layers"]:
        x = zf.layer(run, layer, x, base)
    return end(x, p)


@loss
def a_layer_looks_and_writes(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor, sums: Tensor) -> Tensor:
        if float(x.detach().sum()) > -1e9:
            sums += x.sum(-1)
        return block(q, x)

    x = F.embedding(ids, p["embed"])
    sums = x.sum(-1)
    for layer in p["layers"]:
        x = zf.layer(run, layer, x, sums)
    return end(x * sums[..., None], p)


# --- operations ----------------------------------------------------------------------------------


@loss
def masks(p: Any, ids: Tensor) -> Tensor:
    x, keep = F.embedding(ids, p["embed"]), ids > 2
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
    chosen, flat = x[keep], x.masked_select(keep[..., None])
    x = x.masked_fill(~keep[..., None], 0.0)
    x[0, ids[0] > 1] = 3.0
    last = x[ids[0, 1]]
    return F.cross_entropy(chosen @ p["head"], ids[keep]) + (flat.sum() + x.sum() + last.sum()) / 9


@loss
def tensors_like_others(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    assert torch.zeros_like(x).sum() == 0  # known, whoever has x
    assert ids.to(x).dtype == x.dtype and ids.type_as(x).sum() == ids.sum()
    twos, ones = torch.full_like(x, 2.0), x.new_ones(2, 4, 1)
    threes, known = torch.empty_like(x).fill_(3.0), torch.ones_like(x[..., 0], dtype=torch.bool)
    assert known.all() and x[known].shape == (8, WIDTH)
    parts, base = torch.zeros_like(x), x.new_zeros(2, 4, WIDTH)
    parts[..., ::2].copy_(x[..., 1::2])
    view = base[:, 1:]
    view += x[:, 1:]
    shifted = torch.zeros(2, 4, WIDTH)
    shifted[:, 1:] = x[:, :-1]
    x = x + threes + shifted + parts + base
    for layer in p["layers"]:
        x = x * twos + ones + known[..., None] + torch.arange(WIDTH, device=x.device)
        x = zf.layer(block, layer, x)
    return end(x, p)


@loss
def choices(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        top, best = torch.topk(x, 2, dim=-1), x.argmax(-1)
        y = torch.gather(x, -1, top.indices).sum(-1, keepdim=True)
        a, b = x.chunk(2, -1)
        x = x + torch.einsum(
            "bti,oi->bto", torch.where(x > 0, x, -x) + torch.cat([b, a], -1), q["w"]
        )
        most, _ = x.max(-1, keepdim=True)
        return (
            x
            + y
            + most
            + F.one_hot(best, WIDTH).to(x.dtype)
            + q["w"][best]
            + x.std(-1, keepdim=True)
        )

    return through(p, ids, run)


@loss
def attention(p: Any, ids: Tensor) -> Tensor:
    mask = torch.tril(torch.ones(4, 4, dtype=torch.bool))

    def run(q: Any, x: Tensor) -> Tensor:
        heads = rearrange(x @ q["w"], "b t (h d) -> b h t d", h=2)
        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        y = y + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + rearrange(y, "b h t d -> b t (h d)")

    return through(p, ids, run)


@loss
def recurrence(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        cell = nn.LSTM(WIDTH, WIDTH, batch_first=True, bias=False)
        cell.double()
        given = {"weight_ih_l0": q["w"].repeat(4, 1), "weight_hh_l0": q["w"].repeat(4, 1)}
        y, _ = torch.func.functional_call(cell, given, (x,))
        return x + y

    return through(p, ids, run)


@loss
def convolution(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        return x + F.conv1d(x.mT, q["w"][..., None], q["b"]).mT

    return through(p, ids, run)


@loss
def stopped_gradients(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(block, layer, x) + x.detach() + x.data
    with torch.no_grad():
        y = x * 2
    return end(x + y, p)


class Square(torch.autograd.Function):
    """It detaches within, and has a gradient all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.detach() * x.detach() * w.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return 2 * grad * x * w, (grad * x * x).sum((0, 1))


@loss
def functions_of_ones_own(p: Any, ids: Tensor) -> Tensor:
    x = Square.apply(F.embedding(ids, p["embed"]), p["scale"])
    for layer in p["layers"]:
        x = zf.layer(lambda q, x: Square.apply(torch.tanh(x @ q["w"]), q["b"]) + x, layer, x)
    return end(Square.apply(x, p["scale"]), p)


@loss
def function_transforms(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        def of_row(row: Tensor) -> Tensor:
            return torch.tanh(row @ q["w"]) + torch.func.grad(lambda y: (y**3).sum())(row)

        return x + torch.func.vmap(of_row)(x)

    return through(p, ids, run)


@loss
def a_gradient_within_a_layer(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad((y**3).sum(), y)
        return block(q, x) + grad

    return through(p, ids, run)


@loss
def recomputed(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    with taken():
        for layer in p["layers"]:
            x = checkpoint(lambda x, q=layer: zf.layer(block, q, x), x, use_reentrant=False)
    return end(x, p)


@loss
def hooks(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda y: y):
            x = zf.layer(block, layer, x)
        assert x.requires_grad
        x.register_hook(lambda grad: grad * 1.0)
    return end(x, p)


@loss
def autocast(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        y = F.linear(x, q["w"].float())
        assert y.dtype == torch.bfloat16
        return x + torch.tanh(y)

    x = F.embedding(ids, p["embed"]).float()
    for layer in p["layers"]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = zf.layer(run, layer, x)
    return end(x.double(), p)


@loss
def numbers_looked_at_within_layers(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        x = block(q, x)
        if (x > 0).any():
            x = x * 1.5
        rows, columns = (x[..., 0] > 0).nonzero(as_tuple=True)
        chosen = torch.zeros(2, 4, WIDTH)
        chosen[rows, columns] = x[rows, columns]
        return (x + chosen) * (1 + float(x.detach().max().item() > 0))

    return through(p, ids, run)


@loss
def everything_is_caught(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        try:
            x = zf.layer(block, layer, x)
        except Exception:
            x = x * 0
    return end(x, p)


@loss
def interrupts_are_caught(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        try:
            x = zf.layer(block, layer, x)
        except BaseException:
            x = x * 0
    return end(x, p)


# --- several values of one, memory, hooks ---------------------------------------------------------


@loss
def a_norm_beside_what_it_is_of(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(lambda q, y, x: x + block(q, y), layer, F.layer_norm(x, (WIDTH,)), x)
    return end(x, p)


@loss
def a_scaled_norm_beside_what_it_is_of(p: Any, ids: Tensor) -> Tensor:
    """With a leaf outside of the layers."""
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        h = F.layer_norm(x, (WIDTH,), p["scale"])
        x = zf.layer(lambda q, y, x: x + block(q, y), layer, h, x)
    return end(x, p)


@loss
def masks_between_and_what_they_are_of(p: Any, ids: Tensor) -> Tensor:
    x, before = F.embedding(ids, p["embed"]), []
    for layer in p["layers"]:
        h = zf.layer(block, layer, x)
        before.append(h)
        x = torch.relu(h) * (h > 0.1)
    return end(x, p) + sum((h.square().mean() for h in before), torch.zeros(()))


@loss
def a_sum_that_begins_as_zeros_like_a_ghost(p: Any, ids: Tensor) -> Tensor:
    x = ids[..., None] * p["scale"]
    total = torch.zeros_like(x)

    def run(q: Any, x: Tensor, total: Tensor) -> Tensor:
        y = block(q, x)
        total.add_(y)
        return y

    for layer in p["layers"]:
        x = zf.layer(run, layer, x, total)
    return end(total, p)


@loss
def transposed_in_memory(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).view(-1, WIDTH)  # raises where the memory lies otherwise
        y = rows.view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)
        return block(q, y).transpose(0, 1).contiguous().transpose(0, 1)

    x = F.embedding(ids.T, p["embed"]).transpose(0, 1)
    for layer in p["layers"]:
        x = zf.layer(run, layer, x)
    return end(x, p)


@loss
def channels_that_come_last(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        assert x.is_contiguous(memory_format=torch.channels_last)
        return torch.tanh(F.conv2d(x, q["w"][..., None, None], q["b"]))

    x = F.embedding(ids, p["embed"]).reshape(2, 2, 2, WIDTH).permute(0, 3, 1, 2)
    for layer in p["layers"]:
        x = zf.layer(run, layer, x)
    return end(x.permute(0, 2, 3, 1).reshape(2, 4, WIDTH), p)


@loss
def hooks_on_results(p: Any, ids: Tensor) -> Tensor:
    def run(q: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g * 1.5)  # of what a layer was given: its own affair
        return block(q, x)

    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = zf.layer(run, layer, x)
        if x.requires_grad:
            x.register_hook(lambda g: g * 0.9)
    return end(x, p)


# --- what no layer is given ----------------------------------------------------------------------


@loss
def a_residual_outside_of_layers(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        x = x + zf.layer(block, layer, F.layer_norm(x, (WIDTH,)))
    return end(x, p)


@loss
def a_sum_beside_the_layers(p: Any, ids: Tensor) -> Tensor:
    """As of what balances experts."""

    def run(q: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = block(q, x)
        return x, x.softmax(-1).square().mean()

    x, total = F.embedding(ids, p["embed"]), torch.zeros(())
    for layer in p["layers"]:
        x, balance = zf.layer(run, layer, x)
        total = total + balance
    return end(x, p) + 0.1 * total


@loss
def the_first_value_at_the_end(p: Any, ids: Tensor) -> Tensor:
    x = first = F.embedding(ids, p["embed"]) * 2
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
    return end(x + first, p)


@loss
def halves_between(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    for layer in p["layers"]:
        left, right = (x * p["scale"]).chunk(2, -1)
        y = zf.layer(block, layer, torch.cat([right, left.flip(-1)], -1))
        x = torch.cat([y[..., :3] + left, y[..., 3:] - right], -1)
    return end(x, p)


@loss
def all_results_are_read_at_the_end(p: Any, ids: Tensor) -> Tensor:
    x = F.embedding(ids, p["embed"])
    seen = [torch.tanh(x)]
    for layer in p["layers"]:
        x = zf.layer(block, layer, x)
        seen.append(torch.tanh(x) * len(seen))
        x = x * 0.5
    return end(sum(seen[:-1], seen[-1]), p)
