"""Cases of the ready-made step: everything that a params tree or a loss may look like."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from tests.laws.cases import Case, Tree, numbers, regression, trained
from zfunc import tree


def block(p: Tree, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"]) + x


def dense(seed: int, dtype: torch.dtype, rows: int = 6, columns: int = 6) -> Tree:
    return {
        "w": numbers((rows, columns), seed, dtype),
        "b": numbers((columns,), seed + 1, dtype, 0.1),
    }


def stack(dtype: torch.dtype, layers: int = 3) -> Tree:
    return {
        "first": dense(1, dtype),
        "blocks": zf.Layers([dense(10 * (i + 1), dtype) for i in range(layers)]),
        "head": dense(2, dtype, columns=1),
    }


def mean_square(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def forward(params: Tree, x: Tensor) -> Tensor:
    x = zf.scan(block, params["blocks"], block(params["first"], x))
    return x @ params["head"]["w"] + params["head"]["b"]


def stack_loss(params: Tree, batch: Tree) -> Tensor:
    return mean_square(forward(params, batch["x"]), batch["y"])


# Params of other shapes


def flat_loss(params: Tree, batch: Tree) -> Tensor:
    return mean_square(batch["x"] @ params["w"] + params["b"], batch["y"])


def tensor_loss(w: Tensor, batch: Tree) -> Tensor:
    return mean_square(batch["x"] @ w, batch["y"])


def nested(dtype: torch.dtype) -> Tree:
    """Layers within layers belong to the outer layer; two stacks, one of them empty."""

    def expert(i: int) -> Tree:
        return {**dense(10 * i, dtype), "parts": zf.Layers([dense(10 * i + 5, dtype)])}

    return {
        "encoder": zf.Layers([expert(1), expert(2)]),
        "decoder": zf.Layers([dense(50, dtype, columns=1)]),
        "nothing": zf.Layers(),
    }


def nested_loss(params: Tree, batch: Tree) -> Tensor:
    def expert(p: Tree, x: Tensor) -> Tensor:
        return zf.scan(block, p["parts"], block(p, x))

    x = zf.scan(expert, params["encoder"], batch["x"])
    x = zf.scan(lambda p, x: x @ p["w"] + p["b"], params["decoder"], x)
    return mean_square(x, batch["y"])


def tiny(dtype: torch.dtype) -> Tree:
    """Leaves of fewer elements than ranks: 0-d ones, ones of one element, empty ones."""

    def layer(i: int) -> Tree:
        return {
            "gain": numbers((), i, dtype) + 1,
            "one": numbers((1,), i + 1, dtype),
            "three": numbers((3, 1), i + 2, dtype),
            "empty": numbers((0, 6), i + 3, dtype),
        }

    return {
        "root": layer(1),
        "blocks": zf.Layers([layer(10), layer(20)]),
        "empty": layer(5)["empty"],
    }


def tiny_loss(params: Tree, batch: Tree) -> Tensor:
    def one(p: Tree, x: Tensor) -> Tensor:
        return x * p["gain"] + p["one"] + p["three"].sum() + p["empty"].sum()

    x = zf.scan(one, params["blocks"], one(params["root"], batch["x"]))
    return mean_square(x.sum(1, keepdim=True), batch["y"])


def mixed(dtype: torch.dtype) -> Tree:
    return {
        "wide": numbers((6, 6), 1, torch.float64),
        "blocks": zf.Layers(
            [
                {**dense(10 * i, torch.float32), "norm": numbers((6,), i, torch.float64) + 1}
                for i in (1, 2)
            ]
        ),
        "head": numbers((6, 1), 3, torch.bfloat16),
    }


def mixed_loss(params: Tree, batch: Tree) -> Tensor:
    def one(p: Tree, x: Tensor) -> Tensor:
        return block(p, x.float()).double() * p["norm"]

    x = zf.scan(one, params["blocks"], batch["x"].double() @ params["wide"])
    return mean_square(x @ params["head"].double(), batch["y"].double())


def strided(dtype: torch.dtype) -> Tree:
    """Leaves that are transposed, expanded, views of one buffer, or require gradients."""
    p = stack(dtype)
    buffer = numbers((100,), 9, dtype)
    p["first"] = {"w": p["first"]["w"].t(), "b": buffer[3:9]}
    p["head"]["b"] = numbers((), 4, dtype).expand(1)
    p["blocks"][0]["b"] = buffer[50:56]
    p["blocks"][1]["w"] = torch.nn.Parameter(p["blocks"][1]["w"])
    p["blocks"][2]["w"].requires_grad_()
    return p


def keys_of_all_kinds(dtype: torch.dtype) -> Tree:
    """Dots and numbers in keys, an ordered dict, places without a value."""
    return {
        "a.b": numbers((6, 6), 1, dtype),
        "a": {"b": numbers((6,), 5, dtype), "none": None},
        "z": collections.OrderedDict(z=numbers((6, 6), 2, dtype), a=numbers((6, 1), 3, dtype)),
        "blocks": zf.Layers([{10: numbers((6, 6), 3, dtype), 2: None}]),
    }


def keys_loss(p: Tree, batch: Tree) -> Tensor:
    assert p["a"]["none"] is None
    x = batch["x"] @ p["a.b"] + p["a"]["b"]
    x = zf.scan(lambda q, x: torch.tanh(x @ q[10]) if q[2] is None else q[2], p["blocks"], x)
    first, last = p["z"].values()
    return mean_square(x @ first @ last, batch["y"])


class Pair(NamedTuple):
    body: Any
    head: Any


def tuples(dtype: torch.dtype) -> Tree:
    return Pair(body=(dense(1, dtype), [dense(10, dtype)]), head=numbers((6, 1), 2, dtype))


def tuples_loss(params: Pair, batch: Tree) -> Tensor:
    (first, (second,)), head = params.body, params.head
    return mean_square(block(second, block(first, batch["x"])) @ head, batch["y"])


# Losses that use their params in other ways


def direct_loss(params: Tree, batch: Tree) -> Tensor:
    x = block(params["first"], batch["x"])
    for p in params["blocks"]:
        x = block(p, x)
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def kept_layer_loss(params: Tree, batch: Tree) -> Tensor:
    """One layer is read after others have run, another one beside its own call."""
    blocks = params["blocks"]
    weight = blocks[0]["w"]
    x = zf.scan(block, blocks, batch["x"]) @ weight
    return mean_square((x * blocks[2]["b"]).sum(1, keepdim=True), batch["y"])


def twice_loss(params: Tree, batch: Tree) -> Tensor:
    x = batch["x"]
    for i in (0, 1, 0, 2):
        x = zf.layer(block, params["blocks"][i], x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def albert_loss(params: Tree, batch: Tree) -> Tensor:
    x = batch["x"]
    for _ in range(5):
        x = zf.layer(block, params["blocks"][0], x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def siamese_loss(params: Tree, batch: Tree) -> Tensor:
    a, b, c = (forward(params, batch["x"] * f) for f in (1.0, -1.0, 0.5))
    return mean_square(a, batch["y"]) + mean_square(b, c)


def unused_loss(params: Tree, batch: Tree) -> Tensor:
    """Neither ``first`` nor the middle layer, nor one leaf of the last layer."""
    x = zf.layer(block, params["blocks"][0], batch["x"])
    x = zf.layer(lambda p, x: x @ p["w"], params["blocks"][2], x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def only_root_loss(params: Tree, batch: Tree) -> Tensor:
    return mean_square(block(params["first"], batch["x"]) @ params["head"]["w"], batch["y"])


def decayed_loss(params: Tree, batch: Tree) -> Tensor:
    decay = sum(p.square().sum() for p in tree.leaves(params))
    return stack_loss(params, batch) + 0.01 * decay


def torch_decayed_loss(params: Tree, batch: Tree) -> Tensor:
    decay = sum(p.square().sum() for p in torch_pytree.tree_leaves(params))
    return stack_loss(params, batch) + 0.01 * decay


def recut_loss(params: Tree, batch: Tree) -> Tensor:
    """The params, rebuilt by a tree function inside the loss."""
    halved = optree.tree_map(lambda p: p * 0.5, params, namespace=tree.NAMESPACE)
    return stack_loss(halved, batch)


def uneven_loss(params: Tree, batch: Tree) -> zf.Mean:
    kept = batch["x"][:, :1] > -0.3  # masked tokens: another number on every rank
    error = (forward(params, batch["x"]) - batch["y"]).square()
    return zf.Mean((error * kept).sum(), kept.sum())


def aux_loss(params: Tree, batch: Tree) -> Any:
    out = forward(params, batch["x"])
    return mean_square(out, batch["y"]), {
        "size": out.abs().mean(),
        "inner": {"x": batch["x"].mean()},
    }


def gradient_penalty_loss(params: Tree, batch: Tree) -> Tensor:
    """A second derivative, through the inputs."""
    x = batch["x"].detach().requires_grad_()
    out = forward(params, x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return mean_square(out, batch["y"]) + (slope.norm(dim=1) - 1).square().mean()


def checkpointed_loss(params: Tree, batch: Tree) -> Tensor:
    """torch's own recomputation around layers."""
    x = block(params["first"], batch["x"])
    for p in params["blocks"]:
        x = checkpoint(lambda x, p=p: zf.layer(block, p, x), x, use_reentrant=False)
    return mean_square(x @ params["head"]["w"], batch["y"])


def scans_loss(params: Tree, batch: Tree) -> Tensor:
    """The stack forward, backward, and a slice of it."""
    blocks = params["blocks"]
    x = zf.scan(block, blocks, batch["x"])
    x = zf.scan(block, zf.Layers(reversed(blocks)), x)
    return mean_square(zf.scan(block, blocks[1:], x) @ params["head"]["w"], batch["y"])


def untracked_loss(params: Tree, batch: Tree) -> Tensor:
    """What is looked at without gradients first still gets its gradient afterwards."""
    with torch.no_grad():
        target = forward(params, batch["x"] * 0.5)
        size = sum(p.square().sum() for p in params["blocks"][1].values())
    target = target + zf.evaluate(forward)(params, batch["x"] * 0.25)
    return mean_square(forward(params, batch["x"]), target + batch["y"]) + 0.01 * size


def in_place_loss(params: Tree, batch: Tree) -> Tensor:
    def one(p: Tree, x: Tensor) -> Tensor:
        return (x @ p["w"]).add_(p["b"]).tanh_()

    return mean_square(zf.scan(one, params["blocks"], batch["x"]) @ params["head"]["w"], batch["y"])


def leaking_loss(params: Tree, batch: Tree) -> Tensor:
    """Layers that return their own weights."""
    x, weights = batch["x"], []
    for p in params["blocks"]:
        x, w = zf.layer(lambda p, x: (block(p, x), p["w"]), p, x)
        weights.append(w)
    decay = sum(w.square().sum() for w in weights)
    return mean_square(x @ params["head"]["w"], batch["y"]) + 0.01 * decay


def per_sample_loss(params: Tree, batch: Tree) -> Tensor:
    """torch.func in the loss, on parameters that have entered before."""
    params = tree.map(lambda p: p, params)
    slopes = torch.func.vmap(torch.func.grad(lambda x: forward(params, x[None]).sum()))(batch["x"])
    return mean_square(forward(params, batch["x"]), batch["y"]) + slopes.square().mean()


def by_path_loss(params: Tree, batch: Tree) -> Tensor:
    """Decay chosen by the leaf's path, as seen inside the loss."""
    decayed = tree.select(params, lambda path: path in ("blocks.1.w", "head.w"))
    return stack_loss(params, batch) + 0.1 * tree.global_norm(decayed).square()


CASES: dict[str, Case] = {
    "stack": trained(stack, stack_loss),
    "no layers": trained(
        lambda t: {"w": numbers((6, 1), 1, t), "b": numbers((1,), 2, t)}, flat_loss
    ),
    "single tensor": trained(lambda t: numbers((6, 1), 1, t), tensor_loss),
    "nested layers": trained(nested, nested_loss),
    "bare stack": trained(
        lambda t: zf.Layers([dense(1, t), dense(5, t)]),
        lambda p, batch: mean_square(
            zf.scan(block, p, batch["x"]).sum(1, keepdim=True), batch["y"]
        ),
    ),
    "tensors as layers": trained(
        lambda t: {"ws": zf.Layers([numbers((6, 6), i, t) for i in range(3)])},
        lambda p, batch: mean_square(
            zf.scan(lambda w, x: torch.tanh(x @ w), p["ws"], batch["x"]).sum(1, keepdim=True),
            batch["y"],
        ),
    ),
    "tiny leaves": trained(tiny, tiny_loss),
    "mixed dtypes": trained(mixed, mixed_loss, tolerance=0.03),
    "tuples": trained(tuples, tuples_loss),
    "frozen": trained(
        stack, stack_loss, trainable=lambda path: path != "head.b" and "blocks.1" not in path
    ),
    "one leaf trained": trained(stack, stack_loss, trainable=lambda path: path == "blocks.2.b"),
    "layers read directly": trained(stack, direct_loss),
    "a layer's weight kept": trained(stack, kept_layer_loss),
    "a layer twice": trained(stack, twice_loss),
    "albert": trained(lambda t: stack(t, layers=1), albert_loss),
    "model thrice": trained(stack, siamese_loss),
    "unused": trained(stack, unused_loss),
    "no layer used": trained(stack, only_root_loss),
    "regulariser": trained(stack, decayed_loss),
    "torch's regulariser": trained(stack, torch_decayed_loss),
    "rebuilt params": trained(stack, recut_loss),
    "uneven batch": trained(stack, uneven_loss, batch=lambda i, t: regression(i, t, rows=7)),
    "strided": trained(strided, stack_loss),
    "keys of all kinds": trained(keys_of_all_kinds, keys_loss),
    "gradient penalty": trained(stack, gradient_penalty_loss),
    "checkpoint": trained(stack, checkpointed_loss),
    "several scans": trained(stack, scans_loss),
    "untracked first": trained(stack, untracked_loss),
    "in place": trained(stack, in_place_loss),
    "layers return weights": trained(stack, leaking_loss),
    "torch.func": trained(stack, per_sample_loss),
    "by path": trained(stack, by_path_loss),
    "aux": trained(stack, aux_loss, has_aux=True),
}
