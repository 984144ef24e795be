"""The GPT against the same maths written another way, and the properties it must have."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.kernels.closeness import assert_near
from zfunc import kernels
from zfunc.language import gpt, gpt_layers
from zfunc.language.gpt import GPTConfig
from zfunc.language.gpt_decoding import GPTDecoder

SMALL = GPTConfig(vocab=11, width=24, depth=3, heads=3)


def made(config: GPTConfig = SMALL, seed: int = 0, far: float = 0.3) -> dict[str, Any]:
    """Parameters in float64 in which nothing is zero or one, but so far from it."""
    params = gpt.init(config, zf.random.key(seed))
    generator = torch.Generator().manual_seed(seed)

    def moved(x: Tensor) -> Tensor:
        return x.double() + far * torch.randn(x.shape, dtype=torch.float64, generator=generator)

    return zf.tree.map(moved, params)


def ids_of(*shape: int, vocab: int = 11) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


def reference(params: dict[str, Any], ids: Tensor, config: GPTConfig) -> Tensor:
    """One sequence and one position at a time, rotary positions as complex numbers."""
    d = config.width // config.heads
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * scale

    def turned(x: Tensor, position: int) -> Tensor:
        z = torch.complex(x[: d // 2], x[d // 2 :]) * torch.exp(1j * position * rates)
        return torch.cat([z.real, z.imag])

    def attend(p: dict[str, Tensor], xs: list[Tensor], t: int) -> Tensor:
        heads = []
        for h in range(config.heads):
            part = slice(h * d, (h + 1) * d)
            wq, wk, wv = (w[part] for w in p["qkv"].chunk(3))
            q = turned(wq @ xs[t], t)
            scores = torch.stack([q @ turned(wk @ xs[s], s) for s in range(t + 1)]) / math.sqrt(d)
            weights = scores.softmax(0)
            heads.append(sum(weights[s] * (wv @ xs[s]) for s in range(t + 1)))
        return p["out"] @ torch.cat(heads)

    def one(sequence: Tensor) -> Tensor:
        xs = [params["embed"][i] for i in sequence]
        for p in params["blocks"]:
            normed = [norm(x, p["norm1"]) for x in xs]
            xs = [x + attend(p, normed, t) for t, x in enumerate(xs)]
            hidden = [p["up"] @ norm(x, p["norm2"]) for x in xs]
            xs = [
                x + p["down"] @ F.gelu(h, approximate="tanh")
                for x, h in zip(xs, hidden, strict=True)
            ]
        head = params["embed"] if config.tied else params["head"]
        return torch.stack([head @ norm(x, params["norm"]) for x in xs])

    return torch.stack([one(sequence) for sequence in ids])


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_reference(tied: bool) -> None:
    config = GPTConfig(vocab=11, width=24, depth=2, heads=3, tied=tied)
    params, ids = made(config), ids_of(2, 7)
    # The angles are fp32 on purpose, which is the only difference.
    torch.testing.assert_close(
        gpt.apply(params, ids, config), reference(params, ids, config), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_kernels_are_as_near_as_the_rule_says(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for name in ("layer_norm", "bias_gelu", "rotary", "cross_entropy"):
        plain = getattr(kernels, name)

        def counted(*args: Any, name: str = name, plain: Any = plain, **how: Any) -> Any:
            seen[name] += 1
            return plain(*args, **how)

        monkeypatch.setattr(kernels, name, counted)
    batches, found = ids_of(6, 8, 33), []  # the errors of a single one are a lottery
    for kind, route in ((torch.float64, None), (dtype, None), (dtype, "torch")):
        assert not seen  # on a CPU none is used unless it is asked for
        params = zf.tree.map(lambda x, kind=kind: x.to(kind), made(far=0.05))
        step = zf.value_and_grad(lambda p, ids: gpt.loss(p, ids, SMALL))
        with kernels.use(route):
            outs = [step(params, ids) for ids in batches]
        flat = [torch.cat([x.flatten() for x in zf.tree.leaves(grads)]) for _, grads in outs]
        found.append((torch.stack([loss for loss, _ in outs]).to(kind), torch.cat(flat)))
    for exact, plain, fused in zip(*found, strict=True):
        assert_near(fused, exact, plain)
    assert seen == {"layer_norm": 6 * 7, "bias_gelu": 18, "rotary": 18, "cross_entropy": 6}


def test_a_prediction_sees_no_later_token() -> None:
    params, ids = made(), ids_of(1, 9)
    other = ids.clone()
    other[0, 5:] = (ids[0, 5:] + 1) % 11
    before, after = (gpt.apply(params, x, SMALL) for x in (ids, other))
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5], after[0, 5])


def test_attention_sees_distances_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).double()
    cos, sin = gpt.rotations(40, 16, q)

    def score(i: int, j: int) -> float:
        turns = [(cos[[p]], sin[[p]]) for p in (i, j)]
        return float((gpt_layers.rotate(q, turns[0]) * gpt_layers.rotate(k, turns[1])).sum())

    assert score(7, 3) == pytest.approx(score(39, 35), rel=1e-5)
    assert abs(score(7, 3) - score(20, 3)) > 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_count_counts(tied: bool) -> None:
    config = GPTConfig(vocab=11, width=24, depth=3, heads=3, tied=tied)
    params = gpt.init(config, zf.random.key(0))
    assert sum(leaf.numel() for leaf in zf.tree.leaves(params)) == gpt.count(config)
    assert isinstance(params["blocks"], zf.Layers) and ("head" in params) is not tied


def test_a_key_decides_the_parameters() -> None:
    one, same, other = (gpt.init(SMALL, zf.random.key(seed)) for seed in (3, 3, 4))
    pairs = list(zip(zf.tree.leaves(one), zf.tree.leaves(same), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one["blocks"][0]["qkv"], other["blocks"][0]["qkv"])
    assert not torch.equal(one["blocks"][0]["qkv"], one["blocks"][1]["qkv"])


def test_it_begins_by_knowing_nothing() -> None:
    params = gpt.init(GPTConfig(), zf.random.key(0))
    batch = ids_of(4, 33, vocab=256)
    assert float(gpt.loss(params, batch, GPTConfig())) == pytest.approx(math.log(256), abs=0.1)


def test_it_learns_a_sentence_by_heart() -> None:
    sentence = b"a step is a pure function of a state and a batch. "
    config = GPTConfig(width=32, depth=2, heads=2)
    params = gpt.init(config, zf.random.key(0))
    batch = torch.tensor([list(sentence)])
    leaves = [leaf.requires_grad_() for leaf in zf.tree.leaves(params)]
    opt = torch.optim.AdamW(leaves, lr=1e-2)
    for _ in range(60):
        opt.zero_grad()
        gpt.loss(params, batch, config).backward()
        opt.step()
    said = zf.generate(GPTDecoder(config), params, batch[0, :8], max_new_tokens=len(sentence) - 8)
    assert bytes(said.tolist()) == sentence


def test_a_sample_follows_the_distribution() -> None:
    config = GPTConfig(vocab=3, width=2, depth=0, heads=1)
    # With no blocks the logits depend on the last token alone, here not even on that.
    head = torch.tensor([[1.0, -1.0], [0.0, 0.0], [-1.0, 1.0]])
    params = {
        "embed": torch.tensor([[1.0, -1.0]] * 3),
        "blocks": zf.Layers([]),
        "norm": torch.tensor([0.5, 0.5]),
        "head": head,
    }
    expected = gpt.apply(params, torch.zeros(1, 1, dtype=torch.long), config)[0, 0].softmax(-1)
    decoder, prompt = GPTDecoder(config, window=1), torch.zeros(1, dtype=torch.long)

    def drawn(count: int) -> Tensor:
        return zf.generate(decoder, params, prompt, max_new_tokens=count, temperature=1.0, key=5)

    shares = torch.bincount(drawn(1500)[1:], minlength=3) / 1500
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.04)
    assert torch.equal(drawn(20), drawn(20))


def test_a_width_that_does_not_split_says_so() -> None:
    with pytest.raises(ValueError, match="width 20 with 3 heads: expected a width divisible by 6"):
        GPTConfig(width=20, heads=3)
