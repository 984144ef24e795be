"""Cases: everything that a params tree, a loss or a hand-written step may look like."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

import zfunc as zf
from tests.laws.cases import Case, Tree, numbers, regression, trained
from zfunc import optim, tree


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

    return {"root": layer(1), "blocks": zf.Layers([layer(10), layer(20)]), "empty": layer(5)["empty"]}


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
    return mean_square(out, batch["y"]), {"size": out.abs().mean(), "inner": {"x": batch["x"].mean()}}


# Hand-written steps


def head_state(tx: Any, dtype: torch.dtype) -> Any:
    params = stack(dtype)
    return {"params": params, "opt_state": tx.init(params["head"]), "note": None}


def head_step(tx: Any) -> Any:
    """Gradients and moments of a part of the tree alone."""

    def step(state: Any, batch: Tree) -> Any:
        def loss(head: Tree) -> Tensor:
            return stack_loss({**state["params"], "head": head}, batch)

        loss_value, grads = zf.value_and_grad(loss)(state["params"]["head"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"]["head"])
        head = optim.apply_updates(state["params"]["head"], updates)
        params = {**state["params"], "head": head}
        metrics = {"loss": loss_value, "norm": tree.global_norm(grads)}
        return {**state, "params": params, "opt_state": opt_state}, metrics

    return step


@dataclasses.dataclass(frozen=True)
class Averaged:
    """A state of the user's own: a dataclass with an average of the parameters."""

    params: Any
    opt_state: Any
    average: Any
    count: Tensor


tree.register(
    Averaged,
    lambda s: ((s.params, s.opt_state, s.average, s.count), None, ("params", "opt_state", "average", "count")),
    lambda _, children: Averaged(*children),
)


def average_state(tx: Any, dtype: torch.dtype) -> Any:
    params = stack(dtype)
    return Averaged(params, tx.init(params), tree.map(torch.clone, params), torch.zeros((), dtype=torch.int64))


def average_step(tx: Any) -> Any:
    """A mean teacher: its targets come from the average, once captured and once passed."""

    def step(state: Averaged, batch: Tree) -> Any:
        def loss(params: Tree, teacher: Tree, *, weight: float) -> Tensor:
            out = forward(params, batch["x"])
            captured = batch["x"] @ state.average["first"]["w"]
            return (
                mean_square(out, batch["y"])
                + weight * mean_square(out, forward(teacher, batch["x"]))
                + mean_square(captured, block(params["first"], batch["x"]))
            )

        value, grads = zf.value_and_grad(loss)(state.params, state.average, weight=0.3)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        average = tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, params)
        score = zf.pmean(zf.evaluate(forward)(average, batch["x"]).mean(), "data")
        return Averaged(params, opt_state, average, state.count + 1), {"loss": value, "score": score}

    return step


def gan_state(tx: Any, dtype: torch.dtype) -> Any:
    g, d = stack(dtype), stack(dtype, layers=2)
    g["head"], d["first"] = dense(77, dtype), dense(78, dtype)
    return {"g": g, "d": d, "g_opt": tx.init(g), "d_opt": tx.init(d)}


def gan_step(tx: Any) -> Any:
    def step(state: Any, batch: Tree) -> Any:
        def judged(d: Tree, x: Tensor) -> Tensor:
            return torch.nn.functional.softplus(-forward(d, x)).mean()

        def d_loss(d: Tree, g: Tree) -> Tensor:
            return judged(d, batch["x"]) - 0.1 * judged(d, forward(g, batch["x"]).detach())

        def g_loss(g: Tree) -> Tensor:
            return judged(state["d"], forward(g, batch["x"]))  # captured: no gradient

        d_value, d_grads = zf.value_and_grad(d_loss)(state["d"], state["g"])
        g_value, g_grads = zf.value_and_grad(g_loss)(state["g"])
        d_up, d_opt = tx.update(d_grads, state["d_opt"], state["d"])
        g_up, g_opt = tx.update(g_grads, state["g_opt"], state["g"])
        new = {
            "g": optim.apply_updates(state["g"], g_up),
            "d": optim.apply_updates(state["d"], d_up),
            "g_opt": g_opt,
            "d_opt": d_opt,
        }
        return new, {"d": d_value, "g": g_value}

    return step


GAN = {"g": "params", "d": "params", "g_opt": "opt_state", "d_opt": "opt_state"}


def joint_step(tx: Any) -> Any:
    """Both models differentiated at once, as a tuple."""

    def step(state: Any, batch: Tree) -> Any:
        def loss(both: Any) -> Tensor:
            g, d = both
            return mean_square(forward(d, forward(g, batch["x"])), batch["y"])

        value, (g_grads, d_grads) = zf.value_and_grad(loss)((state["g"], state["d"]))
        g_up, g_opt = tx.update(g_grads, state["g_opt"], state["g"])
        d_up, d_opt = tx.update(d_grads, state["d_opt"], state["d"])
        new = {
            "g": optim.apply_updates(state["g"], g_up),
            "d": optim.apply_updates(state["d"], d_up),
            "g_opt": g_opt,
            "d_opt": d_opt,
        }
        return new, {"loss": value}

    return step


def two_gradients_step(tx: Any) -> Any:
    """Sharpness-aware: the second gradient is taken at perturbed parameters."""

    def step(state: Any, batch: Tree) -> Any:
        _, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        size = 0.05 / tree.global_norm(grads)
        there = tree.map(lambda p, g: p + g * size, state.params, grads)
        value, grads = zf.value_and_grad(stack_loss)(there, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new, {"loss": value, "size": size}

    return step


def summed_gradients_step(tx: Any) -> Any:
    """Micro-batches by hand, each under its own name in the loss."""

    def step(state: Any, batch: Tree) -> Any:
        total, value = None, 0.0
        for sign in (1.0, -1.0):
            loss, grads = zf.value_and_grad(lambda p, s, **b: stack_loss(p, {**b, "x": b["x"] * s}))(
                state.params, sign, **batch
            )
            value = value + loss / 2
            total = grads if total is None else tree.map(torch.add, total, grads)
        mean = tree.map(lambda g: g / 2, total)
        updates, opt_state = tx.update(mean, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), {"loss": value}

    return step


def whole_state(tx: Any, dtype: torch.dtype) -> Any:
    return zf.TrainState.create(stack(dtype), tx, key=3, aux={"seen": torch.zeros(2), "gap": None})


CASES: dict[str, Case] = {
    "stack": trained(stack, stack_loss),
    "no layers": trained(
        lambda t: {"w": numbers((6, 1), 1, t), "b": numbers((1,), 2, t)}, flat_loss
    ),
    "single tensor": trained(lambda t: numbers((6, 1), 1, t), tensor_loss),
    "nested layers": trained(nested, nested_loss),
    "bare stack": trained(
        lambda t: zf.Layers([dense(1, t), dense(5, t)]),
        lambda p, batch: mean_square(zf.scan(block, p, batch["x"]).sum(1, keepdim=True), batch["y"]),
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
    "aux": trained(stack, aux_loss, has_aux=True),
    "part of the tree": Case(head_state, head_step, regression),
    "mean teacher": Case(average_state, average_step, regression),
    "gan": Case(gan_state, gan_step, regression, roles=GAN),
    "joint": Case(gan_state, joint_step, regression, roles=GAN),
    "two gradients": Case(whole_state, two_gradients_step, regression),
    "summed gradients": Case(whole_state, summed_gradients_step, regression),
}
