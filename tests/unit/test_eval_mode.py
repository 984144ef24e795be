"""Who differentiates a module whose dropout is off by accident is told once."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from zfunc import optim

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Functional(nn.Module):
    """Dropout as a function, its probability written where it is called."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(4, 4), p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), self.p, self.training)


class Attending(nn.Module):
    """As Hugging Face's models call attention: the kernel is given 0 in eval mode."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.linear, self.attention_dropout = nn.Linear(4, 4), p

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[None, None]
        p = self.attention_dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, q, q, dropout_p=p)


class Alone(nn.Module):
    """Nothing but dropout: it has no parameters of its own."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


class Kernel(Alone):
    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


class InPlace(Alone):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout_(x.clone(), self.p, self.training)


class Heads(nn.Module):
    """Attention as a function, which is told its probability and whether it is on."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.into, self.out, self.p = nn.Linear(4, 12), nn.Linear(4, 4), p

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        weights = self.into.weight, self.into.bias, None, None, False
        out = self.out.weight, self.out.bias
        return F.multi_head_attention_forward(
            *(x, x, x, 4, 1), *weights, self.p, *out, training=self.training
        )[0][:, 0]


class Fixed(Functional):
    """Off on purpose, whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), self.p, training=False)


def stacked(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *parts, nn.Linear(4, 4))


def frozen_part(*parts: nn.Module) -> nn.Module:
    return stacked(stacked(*(parts or (nn.Dropout(0.5),))).eval().requires_grad_(False))


def from_pretrained_under_a_head() -> nn.Module:
    return stacked(stacked(nn.Dropout(0.5)).eval())


LOUD: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: stacked(nn.Dropout(0.1)).eval(),
    "in a layer": lambda: stacked(nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.1))).eval(),
    "functional": lambda: stacked(Functional()).eval(),
    "functional at the top": lambda: Functional().eval(),
    "attention": lambda: stacked(Attending()).eval(),
    "no parameters": lambda: stacked(Alone()).eval(),
    "no parameters at the end of a layer": lambda: stacked(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Alone()))
    ).eval(),
    "native_dropout": lambda: stacked(Kernel()).eval(),
    "dropout_": lambda: stacked(InPlace()).eval(),
    "heads": lambda: stacked(Heads()).eval(),
    "under a head": from_pretrained_under_a_head,
    "rnn": lambda: nn.GRU(4, 4, num_layers=2, dropout=0.2).eval(),
}
SILENT: dict[str, Callable[[], nn.Module]] = {
    "training": lambda: stacked(nn.Dropout(0.1), Functional(), Attending()),
    "p=0": lambda: stacked(nn.Dropout(0.0), Functional(0.0), Attending(0.0)).eval(),
    "no dropout": lambda: stacked(nn.Tanh()).eval(),
    "frozen BatchNorm": lambda: stacked(nn.BatchNorm1d(4).eval(), nn.Dropout(0.1)),
    "BatchNorm": lambda: stacked(nn.BatchNorm1d(4)).eval(),
    "frozen part": frozen_part,
    "frozen part, functional": lambda: frozen_part(Alone()),
    "no parameters, p=0": lambda: stacked(Alone(0.0), Heads(0.0)).eval(),
    "off on purpose": lambda: stacked(Fixed()),
    "one layer": lambda: nn.GRU(4, 4, num_layers=1).eval(),
}


def loss_of(f: zf.Functional, **how: Any) -> Callable[..., Tensor]:
    def loss(params: Any, x: Tensor) -> Tensor:
        out = f.apply(params, x, **how)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return loss


def said(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught]


def bare(f: zf.Functional, **how: Any) -> None:
    for _ in range(3):
        zf.value_and_grad(loss_of(f, **how))(f.params, X)


@pytest.mark.parametrize("name", LOUD)
def test_it_warns_once_and_says_what_to_write(name: str) -> None:
    f = zf.functionalize(LOUD[name]())
    (text,) = said(lambda: bare(f))
    assert "train=True" in text and "eval mode" in text and "dropout" in text
    assert len(said(lambda: bare(pickle.loads(pickle.dumps(f))))) == 1
    again = zf.functionalize(LOUD[name]())
    with pytest.warns(UserWarning, match="train=True") as caught:
        bare(again)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", SILENT)
def test_it_is_silent_where_nothing_is_off_by_accident(name: str) -> None:
    assert said(lambda: bare(zf.functionalize(SILENT[name]()))) == []


@pytest.mark.parametrize("name", LOUD)
def test_a_mode_given_explicitly_is_silent(name: str) -> None:
    for train in (False, True):
        assert said(lambda t=train: bare(zf.functionalize(LOUD[name]()), train=t)) == []
        assert said(lambda t=train: bare(zf.functionalize(LOUD[name](), train=t))) == []


@pytest.mark.parametrize("name", LOUD)
def test_who_does_not_differentiate_hears_nothing(name: str) -> None:
    teacher, student = zf.functionalize(LOUD[name]()), zf.functionalize(nn.Linear(4, 4))

    def loss(params: Any) -> Tensor:
        out = teacher.apply(teacher.params, X)
        out = out[0] if isinstance(out, tuple) else out
        return (student.apply(params, X) - out).square().mean()

    def run() -> None:
        teacher.apply(teacher.params, X)
        zf.evaluate(teacher.apply)(teacher.params, X)
        zf.value_and_grad(loss)(student.params)

    assert said(run) == []
    assert len(said(lambda: bare(teacher))) == 1  # nor has that used up the one warning


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["in a layer", "functional", "no parameters", "attention"])
def test_ranks_and_layers_that_enter_one_by_one(name: str, stage: int) -> None:
    f, tx = zf.functionalize(LOUD[name]()), optim.sgd(0.1)

    def run(**how: Any) -> None:
        step = zf.remat(zf.shard(zf.train_step(loss_of(f, **how), tx), stage=stage, unit_bytes=1))
        state = step.place(zf.TrainState.create(f.params, tx))
        zf.evaluate(f.apply)(state.params, X)
        for _ in range(2):
            state, _ = step(state, zf.local_batch(X))

    assert said(lambda: zf.simulate(2)(lambda: run(train=False))()) == []
    assert len(said(lambda: zf.simulate(2)(run)())) == 1


class Frozen(nn.Module):
    """A trained head behind a part that is not trained, whose layers enter one by one."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).requires_grad_(False)
        self.teacher, self.head = Between(body), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.teacher(x))


class Between(nn.Module):
    """Dropout outside of the layers."""

    def __init__(self, body: nn.ModuleList) -> None:
        super().__init__()
        self.body, self.alone = body, Alone()

    def forward(self, x: Tensor) -> Tensor:
        return self.body[1](self.alone(self.body[0](x)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_part_whose_layers_are_elsewhere_is_silent(stage: int) -> None:
    f, tx = zf.functionalize(Frozen().eval()), optim.sgd(0.1)

    def run() -> None:
        step = zf.shard(zf.train_step(loss_of(f), tx), stage=stage, unit_bytes=1)
        step(step.place(zf.TrainState.create(f.params, tx)), zf.local_batch(X))

    assert said(lambda: zf.simulate(2)(run)()) == []
