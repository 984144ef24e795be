"""Cases of hand-written steps: parts of a tree, several models, states of the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import Case, Tree, numbers, regression
from tests.laws.models import block, dense, forward, mean_square, stack, stack_loss
from zfunc import optim, tree


def part(
    get: Callable[[Tree], Tree],
    put: Callable[[Tree, Tree], Tree],
    loss: Any = stack_loss,
    params: Callable[[torch.dtype], Tree] = stack,
) -> Case:
    """Gradients and moments of a part of the tree alone, in a state that is a dict."""

    def state(tx: Any, dtype: torch.dtype) -> Any:
        full = params(dtype)
        return {"params": full, "opt_state": tx.init(get(full)), "note": None}

    def make(tx: Any) -> Any:
        def step(state: Any, batch: Tree) -> Any:
            mine = get(state["params"])

            def part_loss(mine: Tree) -> Tensor:
                return loss(put(state["params"], mine), batch)

            value, grads = zf.value_and_grad(part_loss)(mine)
            updates, opt_state = tx.update(grads, state["opt_state"], mine)
            new = put(state["params"], optim.apply_updates(mine, updates))
            metrics = {"loss": value, "norm": tree.global_norm(grads)}
            return {**state, "params": new, "opt_state": opt_state}, metrics

        return step

    return Case(state, make, regression)


def with_layer(params: Tree, i: int, new: Tree) -> Tree:
    blocks = [new if k == i else params["blocks"][k] for k in range(len(params["blocks"]))]
    return {**params, "blocks": zf.Layers(blocks)}


def alike(dtype: torch.dtype) -> Tree:
    """Two parts of the same structure and shapes."""
    return {"a": dense(1, dtype), "b": dense(4, dtype)}


def alike_loss(params: Tree, batch: Tree) -> Tensor:
    out = block(params["b"], block(params["a"], batch["x"]))
    return mean_square(out.sum(1, keepdim=True), batch["y"])


@dataclasses.dataclass(frozen=True)
class Averaged:
    """A state of the user's own: a dataclass with an average of the parameters."""

    params: Any
    opt_state: Any
    average: Any
    count: Tensor


tree.register(
    Averaged,
    lambda s: (
        (s.params, s.opt_state, s.average, s.count),
        None,
        ("params", "opt_state", "average", "count"),
    ),
    lambda _, children: Averaged(*children),
)


def average_state(tx: Any, dtype: torch.dtype) -> Any:
    params = stack(dtype)
    return Averaged(
        params, tx.init(params), tree.map(torch.clone, params), torch.zeros((), dtype=torch.int64)
    )


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
        score = zf.pmean(zf.evaluate(forward)(average, batch["x"]).mean())
        return Averaged(params, opt_state, average, state.count + 1), {
            "loss": value,
            "score": score,
        }

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
            loss, grads = zf.value_and_grad(
                lambda p, s, **b: stack_loss(p, {**b, "x": b["x"] * s})
            )(state.params, sign, **batch)
            value = value + loss / 2
            total = grads if total is None else tree.map(torch.add, total, grads)
        mean = tree.map(lambda g: g / 2, total)
        updates, opt_state = tx.update(mean, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), {
            "loss": value
        }

    return step


def whole_state(tx: Any, dtype: torch.dtype) -> Any:
    return zf.TrainState.create(stack(dtype), tx, key=3, aux={"seen": torch.zeros(2), "gap": None})


def wide_state(tx: Any, dtype: torch.dtype) -> Any:
    """With a leaf so long that its gradient is reduced in two rounds."""
    return zf.TrainState.create({**stack(dtype), "wide": numbers((17000,), 5, dtype)}, tx)


class Named(NamedTuple):
    """A named tuple as a state."""

    params: Any
    opt_state: Any


def named_state(tx: Any, dtype: torch.dtype) -> Any:
    params = stack(dtype)
    return Named(params, tx.init(params))


def named_step(tx: Any) -> Any:
    def step(state: Named, batch: Tree) -> Any:
        value, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return Named(optim.apply_updates(state.params, updates), opt_state), {"loss": value}

    return step


def half_by_path_step(tx: Any) -> Any:
    """Gradients changed leaf by leaf, by path, and whole leaves at a time."""

    def step(state: Any, batch: Tree) -> Any:
        value, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        grads = tree.map_leaves(lambda path, g: g * 0.5 if path.endswith("b") else g, grads)
        grads = tree.whole(lambda g: g - g.mean(), grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new, {"loss": value, "norms": tree.leaf_norms(grads)}

    return step


CASES: dict[str, Case] = {
    "the head": part(lambda p: p["head"], lambda p, new: {**p, "head": new}),
    "the layers": part(lambda p: p["blocks"], lambda p, new: {**p, "blocks": new}),
    "one layer": part(lambda p: p["blocks"][1], lambda p, new: with_layer(p, 1, new)),
    "one leaf": part(
        lambda p: p["head"]["w"], lambda p, new: {**p, "head": {**p["head"], "w": new}}
    ),
    "one of two alike": part(lambda p: p["a"], lambda p, new: {**p, "a": new}, alike_loss, alike),
    "a dict of parts": part(
        lambda p: {"h": p["head"], "f": p["first"]},
        lambda p, new: {**p, "head": new["h"], "first": new["f"]},
    ),
    "a list of parts": part(
        lambda p: [p["head"], p["blocks"][2]],
        lambda p, new: with_layer({**p, "head": new[0]}, 2, new[1]),
    ),
    "mean teacher": Case(average_state, average_step, regression),
    "gan": Case(gan_state, gan_step, regression, roles=GAN),
    "joint": Case(gan_state, joint_step, regression, roles=GAN),
    "two gradients": Case(whole_state, two_gradients_step, regression),
    "two wide gradients": Case(wide_state, two_gradients_step, regression),
    "summed gradients": Case(whole_state, summed_gradients_step, regression),
    "named tuple": Case(named_state, named_step, regression),
    "by path": Case(whole_state, half_by_path_step, regression),
}
