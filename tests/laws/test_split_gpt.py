"""The GPT of ``zfunc train`` on split leaves is that on whole ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import Covering
from zfunc import kernels, optim
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig
from zfunc.language.gpt_decoding import GPTDecoder
from zfunc.trees import tree

TX = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))
EXACT = {"rtol": 1e-9, "atol": 1e-9}
STEPS = [  # tensor, data, stage, tied
    (1, 2, 3, False),
    (2, 2, 3, False),
    (3, 1, 0, True),
    (4, 1, 2, False),
    (2, 1, 1, True),
    (2, 3, 0, False),
]
if Covering.whole:
    STEPS = [
        (ways, data, stage, tied)
        for ways, data in ((1, 2), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3))
        for stage in range(4)
        for tied in (False, True)
    ]


def config(tied: bool = False) -> GPTConfig:
    """5 heads and 11 classes, so that no cut is even."""
    return GPTConfig(vocab=11, width=20, depth=2, heads=5, tied=tied)


def made(shape: GPTConfig) -> Any:
    """Parameters in float64 none of which is zero."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        return x.double() + 0.2 * torch.randn(x.shape, dtype=x.double().dtype, generator=generator)

    return zf.tree.map(moved, gpt.init(shape, zf.random.key(0)))


def batch(seed: int, rows: int = 6) -> Tensor:
    return torch.randint(11, (rows, 8), generator=torch.Generator().manual_seed(seed))


def placed(shape: GPTConfig, ways: int, stage: int | None = None) -> tuple[Any, Any]:
    """A split step, and the state that it placed."""

    def loss(params: Any, ids: Tensor) -> Tensor:
        return gpt.loss(params, ids, shape).double()

    step = zf.split(zf.train_step(loss, TX), rules=gpt.rules(shape), tensor=ways)
    step = step if stage is None else zf.shard(step, stage=stage)
    return step, step.place(zf.TrainState.create(made(shape), TX))


def trained(step: Any, state: Any) -> tuple[list[float], dict[str, Tensor]]:
    numbers = []
    for i in range(3):
        state, metrics = step(state, step.local_batch(batch(i)))
        numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return numbers, tree.flatten_names(step.unplace(state).params)


@pytest.fixture
def exact_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses in float64: the GPT takes them in fp32 whatever it computes in."""
    monkeypatch.setattr(Tensor, "float", lambda x: x)


@pytest.mark.usefixtures("exact_losses")
@pytest.mark.parametrize(("ways", "data", "stage", "tied"), STEPS)
def test_it_trains_as_one_process_does(ways: int, data: int, stage: int, tied: bool) -> None:
    shape = config(tied)

    def loss(params: Any, ids: Tensor) -> Tensor:
        return gpt.loss(params, ids, shape)

    plain = zf.train_step(loss, TX)
    numbers, params = trained(plain, zf.TrainState.create(made(shape), TX))
    ranks = zf.simulate(ways * data)(lambda: trained(*placed(shape, ways, stage)))()
    for theirs, leaves in ranks:
        assert theirs == pytest.approx(numbers, rel=1e-9)
        for name, x in params.items():
            torch.testing.assert_close(leaves[name], x, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(leaves[name], ranks[0][1][name])


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("ways", [2, 3])
def test_logits_and_scores_are_whole_on_every_rank(ways: int, stage: int | None) -> None:
    shape, ids = config(), batch(0)
    targets = ids.roll(-1, 1)
    targets[0, 3:] = -100
    want = gpt.apply(made(shape), ids, shape)
    scored = gpt.score(made(shape), ids, targets, shape)

    def on_a_rank() -> tuple[Tensor, Tensor]:
        _, state = placed(shape, ways, stage)
        apply = zf.evaluate(lambda p: gpt.apply(p, ids, shape))
        score = zf.evaluate(lambda p: gpt.score(p, ids, targets, shape))
        return apply(state.params), score(state.params)

    for logits, total in zf.simulate(ways)(on_a_rank)():
        torch.testing.assert_close(logits, want, **EXACT)
        torch.testing.assert_close(total, scored, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("ways", [1, 2, 3])
def test_it_writes_the_same_texts(ways: int, stage: int | None) -> None:
    """Greedy and drawn, with padding and a window; each rank keeps the keys of its heads."""
    shape, prompts = config(), batch(3, rows=2)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    decoder = GPTDecoder(shape, window=6)
    hows: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "key": 4},
        {"attention_mask": mask},
    ]

    def texts(params: Any) -> list[Tensor]:
        return [zf.generate(decoder, params, prompts, max_new_tokens=7, **how) for how in hows]

    want = texts(made(shape))
    for found in zf.simulate(ways)(lambda: texts(placed(shape, ways, stage)[1].params))():
        assert all(map(torch.equal, found, want))


def test_a_cache_has_the_heads_of_its_rank() -> None:
    shape, decoder = config(), GPTDecoder(config())

    def heads() -> tuple[int, ...]:
        params = placed(shape, 3)[1].params
        step = zf.evaluate(lambda p: decoder.step(p, decoder.start(2, 9, None), batch(0, 2))[1])
        return tuple(x.shape[1] for x in step(params).keys)

    assert zf.simulate(3)(heads)() == [(2, 2), (2, 2), (1, 1)]


def test_kernels_are_used_on_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of those that whole leaves have, but the loss, which ranks compute together."""
    seen: Counter[str] = Counter()

    def watch(name: str, plain: Callable[..., Any]) -> None:
        def counted(*args: Any, **how: Any) -> Any:
            seen[name] += 1
            return plain(*args, **how)

        monkeypatch.setattr(kernels, name, counted)

    for name in ("layer_norm", "bias_gelu", "rotary", "cross_entropy"):
        watch(name, getattr(kernels, name))

    def on_a_rank() -> Tensor:
        step, state = placed(config(), 2)
        with kernels.use("torch"):
            return step(state, batch(0))[1]["loss"]

    zf.simulate(2)(on_a_rank)()
    assert seen == {"layer_norm": 2 * 5, "bias_gelu": 2 * 2, "rotary": 2 * 2}


def test_a_block_sums_twice_each_way() -> None:
    def sent() -> tuple[Counter[str], int]:
        step, state = placed(config(), 2)
        with zf.comm.ledger() as led:
            step(state, batch(0))
        return led.calls_by_label, led.by_label["tensor forward"]

    for calls, forward in zf.simulate(2)(sent)():
        assert calls["tensor forward"] == 4 and calls["tensor embed"] == 1
        assert calls["tensor backward"] == 5  # the head is a column, too
        assert forward == 4 * 6 * 7 * 20 * 8


def test_more_ranks_than_heads_raise() -> None:
    def on_a_rank() -> None:
        with pytest.raises(
            zf.PlacementError, match=r"blocks\.0\.out falls into 5 blocks .* 6 ranks"
        ):
            placed(config(), 6)

    zf.simulate(6)(on_a_rank)()
