"""One bit an element, leaf by leaf: no scale is shared by a matrix and a bias."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_same, numbers
from zfunc import kernels, optim, tree
from zfunc.layout.cutting import make_layout
from zfunc.layout.dense import dense_of
from zfunc.transforms.compression.exchange import codecs_of
from zfunc.transforms.compression.onebit import OneBit
from zfunc.transforms.compression.onebit_leaves import LONG, SMALL

F64 = torch.float64
Leaves = tuple[tuple[int, int, int], ...]


def groups(leaves: Leaves, group: int) -> list[list[int]]:
    """By the book: the elements of each group, of a part of a buffer in which these leaves lie."""
    out: list[list[int]] = []
    last: list[int] = []
    pooled = False
    for a, b, elements in leaves:
        if b - a >= LONG:
            out += [list(range(i, min(i + group, b))) for i in range(a, b, group)]
            pooled = False
            continue
        if elements < SMALL and pooled and len(last) + b - a <= group:
            last += range(a, b)
        else:
            out += [list(range(i, min(i + group, b))) for i in range(a, b, group)]
            last = out[-1]
        pooled = elements < SMALL
    return out


def sent(c: Tensor, leaves: Leaves, group: int, scaling: str) -> Tensor:
    out = torch.empty_like(c)
    for mine in groups(leaves, group):
        run = c[mine]
        size = run.square().mean().sqrt() if scaling == "rms" else run.abs().mean()
        out[mine] = size * torch.where(run >= 0, 1.0, -1.0).to(c.dtype)
    return out


SIZES = st.lists(st.sampled_from([1, 3, 8, 63, 64, 100, 128, 300, 8192, 9000, 16384]), max_size=8)


@given(
    sizes=SIZES.filter(len),
    world=st.integers(1, 4),
    scaling=st.sampled_from(["mean", "rms"]),
    dtype=st.sampled_from([torch.float32, F64]),
)
@settings(max_examples=25, deadline=None)
def test_a_group_is_of_one_leaf(
    sizes: list[int], world: int, scaling: str, dtype: torch.dtype
) -> None:
    params = {f"p{i}": torch.zeros(n, dtype=dtype) for i, n in enumerate(sizes)}
    layout = make_layout(params, world=world)
    for flat in range(len(layout.flats)):
        dense = dense_of(layout, flat)
        codecs = codecs_of(OneBit(128, scaling), layout, flat)
        for rank, (low, high) in enumerate(pairwise(dense.cuts)):
            check(codecs[rank], dense.leaves_of(rank), high - low, scaling, dtype)


def check(codec: Any, leaves: Leaves, n: int, scaling: str, dtype: torch.dtype) -> None:
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0, "atol": 1e-12}
    payloads, total = [], torch.zeros(n, dtype=dtype)
    for sender in range(3):
        x, error = numbers((n,), sender, dtype), numbers((n,), 10 + sender, dtype)
        c = x + error
        payloads.append(codec.pack_(x, error))
        want = sent(c, leaves, 128, scaling)
        assert len(payloads[-1]) == codec.nbytes(n, dtype)
        torch.testing.assert_close(codec.unpack(payloads[-1], n, dtype), want, **close)
        torch.testing.assert_close(error, c - want, **close)
        total += want
    error, out = numbers((n,), 20, dtype), torch.empty(n, dtype=dtype)
    c = total / 3 + error
    rows = codec.unpack(torch.stack(payloads), n, dtype)
    torch.testing.assert_close(rows.mean(0), total / 3, **close)
    codec.unpack_(codec.mean_(payloads, error), out)
    if dtype == F64:  # in float32 one on the verge may fall to the other side
        torch.testing.assert_close(out, sent(c, leaves, 128, scaling), **close)
    torch.testing.assert_close(out + error, c, **close)


@given(
    sizes=st.lists(
        st.sampled_from([1, 3, 7, 63, 64, 65, 500, 2047, 2049, 8191, 8192, 20000]), min_size=1
    ),
    group=st.sampled_from([128, 2048, 8192]),
    scaling=st.sampled_from(["mean", "rms"]),
    given_as=st.sampled_from([torch.float32, torch.bfloat16]),
    taken_as=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=40, deadline=None)
def test_machine_code_has_the_bits_of_torch(
    sizes: list[int], group: int, scaling: str, given_as: torch.dtype, taken_as: torch.dtype
) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    codec = OneBit(group, scaling).over(
        tuple((b - n, b, n) for b, n in zip(ends, sizes, strict=True))
    )
    n = ends[-1]
    payloads, seen = [], []
    for route in ("torch", None):
        with kernels.use(route):
            found = []
            for sender in range(3):
                error = numbers((n,), 10 + sender, torch.float32)
                x = numbers((n,), sender, torch.float32).to(given_as)
                payloads.append(codec.pack_(x, error))
                found += [payloads[-1], error]
            error, out = numbers((n,), 20, torch.float32), torch.empty(n, dtype=taken_as)
            mean = codec.mean_(payloads[-3:], error)
            codec.unpack_(mean, out)
            seen.append([*found, mean, error, out, codec.unpack(mean, n, taken_as)])
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", [(0, None), (1, None), (2, "onebit"), (3, None)], ids=str)
@pytest.mark.parametrize("small", [8, 100])
def test_a_leaf_is_as_exact_as_its_own_scale(small: int, how: tuple[int, Any]) -> None:
    """Beside one whose gradient is ten thousand times as large."""
    params = {
        "a": torch.zeros(100, dtype=F64),
        "b": torch.zeros(small, dtype=F64),
        "c": torch.zeros(100, dtype=F64),
    }
    stage, gather = how

    def loss(p: Any, sign: Tensor) -> Tensor:
        large = p["a"].sum() + p["c"].sum()
        return (1e4 * large + p["b"].sum()) * sign.mean()

    def body() -> Any:
        tx = optim.sgd(1.0)
        step = zf.shard(zf.train_step(loss, tx), stage=stage)
        step = zf.compress_grads(step, freeze_step=0, gather=gather)
        state = step.place(zf.TrainState.create(params, tx))
        state, _ = step(state, zf.local_batch(torch.ones(4, dtype=F64)))
        return zf.full(state.params)

    for found in zf.simulate(2)(body)():
        for name, size in {"a": 1e4, "b": 1.0, "c": 1e4}.items():
            torch.testing.assert_close(found[name], torch.full_like(found[name], -size))


@pytest.mark.parametrize("stage", [0, 2])
def test_errors_of_other_groups_go_on_bitwise(stage: int, tmp_path: Path) -> None:
    """As those of a state from before groups began anew with each leaf: errors are by leaf."""
    params = {"b": numbers((24,), 1), "head": numbers((24, 2), 2), "w": numbers((6, 24), 3)}

    def loss(p: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["w"] + p["b"]) @ p["head"] - x[:, :2]).square().mean()

    def placed(group: int | None) -> Any:
        tx = optim.sgd(0.02, 0.9)
        step = zf.shard(zf.train_step(loss, tx), stage=stage)
        step = zf.compress_grads(step, freeze_step=2, group=group)
        return step, step.place(zf.TrainState.create(params, tx))

    def save() -> Any:
        step, state = placed(None)
        for i in range(5):
            state, _ = step(state, zf.local_batch(numbers((8, 6), 50 + i)))
        zf.save(tmp_path, state, step=5)
        return step.unplace(state)

    def restore() -> Any:
        step, state = placed(2048)
        state = zf.restore(tmp_path, state)
        again, _ = step(state, zf.local_batch(numbers((8, 6), 60)))
        assert int(again.aux["compress_grads"]["skipped"]) == 0
        return step.unplace(state)

    full = zf.simulate(2)(save)()[0]
    assert any(bool(x.abs().sum() > 0) for x in tree.leaves(full.aux["compress_grads"]["worker"]))
    for found in zf.simulate(2)(restore)():
        assert_same(found, full)
