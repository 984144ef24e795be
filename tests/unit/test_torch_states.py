"""A run of torch's optimizer goes on with ours, and the numbers are those of torch alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zfunc as zf
from zfunc import optim, tree

CASES: dict[str, tuple[Any, Any]] = {
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        optim.adamw(0.01, weight_decay=0.1),
    ),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        optim.chain(optim.clip_by_global_norm(1e9), optim.sgd(0.01, momentum=0.9)),
    ),
    "rmsprop": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
        optim.rmsprop(0.01, decay=0.99, eps_in_sqrt=False, centered=True),
    ),
    "rmsprop momentum": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.8),
        optim.rmsprop(0.01, decay=0.99, eps_in_sqrt=False, momentum=0.8),
    ),
    "rmsprop momentum before the rate": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.8),
        optim.chain(
            optim.scale_by_rms(0.99, eps_in_sqrt=False),
            optim.trace(0.8),
            optim.scale_by_learning_rate(0.01),
        ),
    ),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.0),
        optim.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0),
    ),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def gradients(net: nn.Module, n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in net.named_parameters()
    }


def steps(net: nn.Module, theirs: torch.optim.Optimizer, some: range) -> None:
    for n in some:
        for (_, p), g in zip(net.named_parameters(), gradients(net, n).values(), strict=True):
            p.grad = g
        theirs.step()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stage", [None, 3])
def test_it_goes_on(name: str, named: bool, stage: int | None) -> None:
    make, tx = CASES[name]
    net = model()
    theirs = make(net.named_parameters() if named else net.parameters())
    steps(net, theirs, range(3))
    functional = zf.functionalize(net)
    params = tree.map(torch.clone, functional.params)
    names = None if named else [name for name, _ in net.named_parameters()]
    state = optim.from_torch(tx, params, theirs.state_dict(), names)
    steps(net, theirs, range(3, 6))

    def loss_fn(p: Any, grads: Any) -> torch.Tensor:
        rows = zip(tree.flatten_names(p).items(), grads, strict=True)
        return sum((x * grads[at]).sum() for at, ((_, x), _) in enumerate(rows))  # type: ignore[return-value]

    def go_on() -> Any:
        step = zf.train_step(loss_fn, tx)
        step = step if stage is None else zf.shard(step, stage=stage)
        at = step.place(replace(zf.TrainState.create(params, tx), opt_state=state))
        for n in range(3, 6):
            given = gradients(net, n)
            at, _ = step(at, [given[path] for path in tree.flatten_names(params)])
        return tree.flatten_names(tree.full(at.params))

    for found in [go_on()] if stage is None else zf.simulate(2)(go_on)():
        for path, p in net.named_parameters():
            torch.testing.assert_close(found[path], p.detach(), rtol=1e-9, atol=1e-9)


def test_states_that_do_not_fit_say_so() -> None:
    net = model()
    theirs = torch.optim.AdamW(net.parameters())
    names = [name for name, _ in net.named_parameters()]
    params = zf.functionalize(net).params
    tx = optim.adamw(0.1)
    with pytest.raises(zf.CheckpointError, match=r"no exp_avg of 0\..*before the first"):
        optim.from_torch(tx, params, theirs.state_dict(), names)
    steps(net, theirs, range(1))
    state = theirs.state_dict()
    with pytest.raises(zf.CheckpointError, match=r"names=\[name for"):
        optim.from_torch(tx, params, state)
    with pytest.raises(zf.CheckpointError, match=r"has shape \(7,\), and its exp_avg .* \(7, 5\)"):
        optim.from_torch(tx, params, state, names[1::-1] + names[2:])
    with pytest.raises(zf.CheckpointError, match="3 names were given for the 4"):
        optim.from_torch(tx, params, state, names[1:])
    with pytest.raises(zf.CheckpointError, match=r"no leaf 'body.0.weight'"):
        optim.from_torch(tx, params, state, ["body." + name for name in names])
    with pytest.raises(zf.CheckpointError, match="no momentum_buffer of"):
        optim.from_torch(optim.sgd(0.1, momentum=0.9), params, state, names)
    state["state"][1]["step"] = torch.tensor(9.0)
    with pytest.raises(zf.CheckpointError, match=r"has taken 1 steps and 0\.bias 9"):
        optim.from_torch(tx, params, state, names)


@pytest.mark.parametrize(
    ("make", "tx", "found"),
    [
        (
            lambda p: torch.optim.Adam(p, amsgrad=True),
            optim.adam(0.1),
            r"keeps max_exp_avg_sq of 0\.weight, for which .* no place",
        ),
        (
            lambda p: torch.optim.RMSprop(p, momentum=0.9),
            optim.rmsprop(0.1, eps_in_sqrt=False),
            "keeps momentum_buffer",
        ),
        (torch.optim.Adam, optim.adafactor(0.1), "FactoredState are in a form"),
    ],
)
def test_moments_are_not_dropped_in_silence(make: Any, tx: Any, found: str) -> None:
    net = model()
    theirs = make(net.parameters())
    steps(net, theirs, range(1))
    names = [name for name, _ in net.named_parameters()]
    with pytest.raises(zf.CheckpointError, match=found):
        optim.from_torch(tx, zf.functionalize(net).params, theirs.state_dict(), names)


def test_a_schedule_goes_on_from_the_count_that_is_given() -> None:
    net = model()
    theirs = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)
    steps(net, theirs, range(2))
    tx = optim.sgd(optim.linear(1.0, 0.0, 10), momentum=0.9)
    params = zf.functionalize(net).params
    assert optim.from_torch(tx, params, theirs.state_dict(), count=2).count == 2


def test_running_means_of_other_peoples_optimizers_are_read() -> None:
    """Lion and LAMB, as they are written for torch, keep ``exp_avg``."""
    net = model()
    theirs = torch.optim.Adam(net.named_parameters())
    steps(net, theirs, range(1))
    params, state = zf.functionalize(net).params, theirs.state_dict()
    lamb = optim.from_torch(optim.lamb(0.1), params, state)
    assert lamb.count == 1
    for path, x in tree.flatten_names(lamb.mu).items():
        assert x.abs().min() > 0, path
    for entry in state["state"].values():
        del entry["exp_avg_sq"]
    found = tree.flatten_names(optim.from_torch(optim.lion(0.1), params, state).mu)
    for path, p in net.named_parameters():
        assert torch.equal(found[path], theirs.state[p]["exp_avg"]), path
