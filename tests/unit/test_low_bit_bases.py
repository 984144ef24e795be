"""A frozen base in low bits with adapters that train: QLoRA, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from zfunc import optim, quant, tree

F64 = torch.float64
WIDTH, RANK, DEPTH, GROUP = 32, 2, 3, 16
TX = optim.adamw(1e-2, weight_decay=0.1)


class Adapted(nn.Module):
    """A frozen linear layer beside one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.b = nn.Parameter(torch.randn(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)


def model(dtype: torch.dtype = F64, compile: Any = False) -> tuple[zf.Functional, Any]:
    """The module, and its parameters with the frozen matrices in 4 bits."""
    torch.manual_seed(0)
    stack = nn.Sequential(*[Adapted() for _ in range(DEPTH)]).to(dtype)
    f = zf.functionalize(stack, compile=compile)
    return f, quant.quantize_tree(f.params, 4, GROUP, include=lambda p: p.endswith("base.weight"))


def batches(dtype: torch.dtype = F64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, WIDTH, generator=generator, dtype=dtype) for _ in range(3)]


def stored(params: Any) -> dict[str, Tensor]:
    flat = tree.flatten_names(params).items()
    return {n: x.to_bytes() if isinstance(x, quant.QTensor) else x for n, x in flat}


def plain(f: zf.Functional) -> Any:
    return zf.train_step(lambda p, x: (f.apply(p, x) - x.flip(1)).square().mean(), TX)


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"stage {n}": lambda step, n=n: zf.shard(step, stage=n, unit_bytes=1) for n in range(4)},
    "one unit": lambda step: zf.shard(step, stage=3),
    "remat": lambda step: zf.remat(zf.shard(step, stage=3, unit_bytes=1)),
    "donate 0": lambda step: zf.donate(zf.shard(step, stage=0, unit_bytes=1)),
    "donate 3": lambda step: zf.donate(zf.shard(step, stage=3)),
    "accumulate": lambda step: zf.accumulate(zf.shard(step, stage=2), 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_what_dequantised_weights_train(way: str) -> None:
    """In float64 their products are those of the weights that they stand for."""
    f, low = model()
    exact = quant.dequantize_tree(low)
    before = stored(low)
    state = zf.TrainState.create(exact, TX)
    for x in batches():
        state, _ = plain(f)(state, x)
    expected = stored(state.params)

    def run() -> Any:
        step = WAYS[way](plain(f))
        state = step.place(zf.TrainState.create(low, TX))
        for x in batches():
            state, _ = step(state, zf.local_batch(x))
        return step.unplace(state).params

    for params in zf.simulate(3)(run)():
        assert sum(isinstance(x, quant.QTensor) for x in tree.leaves(params)) == DEPTH
        for name, x in stored(params).items():
            if name in f.frozen:
                assert torch.equal(x, before[name])
            else:
                torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-9)


# dynamo asks every tensor that it meets for its `grad`, also where torch warns of that (2.13)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_leave_products_with_low_bits_between_graphs() -> None:
    def trained(compile: Any) -> Any:
        f, low = model(compile=compile)
        step, state = plain(f), zf.TrainState.create(low, TX)
        for x in batches():
            state, _ = step(state, x)
        return stored(state.params)

    torch._dynamo.reset()
    with pytest.raises(zf.CompositionError, match=r'compile=\{"fullgraph": False\}'):
        trained({"backend": "aot_eager"})
    eager, compiled = trained(False), trained({"backend": "aot_eager", "fullgraph": False})
    torch._dynamo.reset()
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, rtol=1e-9, atol=1e-9, msg=name)


def test_bytes_that_are_sent_and_held_are_those_that_are_stored() -> None:
    ranks, (f, low) = 2, model(torch.float32)
    adapters = DEPTH * 2 * RANK * WIDTH * 4
    bias = DEPTH * WIDTH * 4
    matrices = DEPTH * (WIDTH * WIDTH // 2 + WIDTH * WIDTH // GROUP * 2)  # codes, bf16 scales
    assert tree.size_bytes(low) == matrices + bias + adapters

    def run() -> Any:
        step = zf.shard(plain(f), stage=3)
        state = step.place(zf.TrainState.create(low, TX))
        state, _ = step(state, batches(torch.float32)[0])
        with zf.comm.ledger() as sent:
            state, _ = step(state, batches(torch.float32)[1])
        return sent.by_kind, tree.size_bytes(state.params), tree.size_bytes(state.opt_state)

    sent, params, moments = zf.simulate(ranks)(run)()[0]
    end = 64 * ranks * 4  # a flat ends at a multiple of 64 elements for each rank
    assert 0 <= sent["reduce_scatter"] * ranks - adapters < end  # adapters only
    assert 0 <= moments * ranks - 2 * adapters < 2 * end
    for found in (sent["all_gather"], params):  # as stored: codes, biases, adapters
        assert 0 <= found * ranks - (matrices + bias + adapters) < 3 * end


def test_it_is_saved_and_restored_on_other_ranks(tmp_path: Path) -> None:
    f, low = model()

    def run(save: bool) -> Any:
        step = zf.shard(plain(f), stage=3)
        state = step.place(zf.TrainState.create(low, TX))
        if save:
            state, _ = step(state, batches()[0])
            zf.save(tmp_path, state)
        else:
            state = zf.restore(tmp_path, like=state)
        return stored(step.unplace(state).params)

    saved, restored = zf.simulate(2)(run)(True)[0], zf.simulate(3)(run)(False)[0]
    assert all(torch.equal(x, restored[name]) for name, x in saved.items())


def test_its_memory_is_its_own() -> None:
    """Not that of dequantised values, which are gone, and where other tensors may lie by then."""
    _, low = model()
    for x in tree.leaves(low):
        if isinstance(x, quant.QTensor):
            assert x.untyped_storage().data_ptr() == x.scale.untyped_storage().data_ptr()


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    f, low = model()
    with pytest.raises(zf.PlacementError, match=r"0\.base\.weight is in low bits.*would train"):
        zf.TrainState.create(low, TX, trainable=lambda path: "base" in path)
    state, step = zf.TrainState.create(low, TX), zf.shard(plain(f), stage=3)
    with pytest.raises(zf.CompositionError, match=r"precision cannot place .*base\.weight"):
        zf.precision(step).place(state)
    with pytest.raises(zf.CompositionError, match=r"quantize\(step\) cannot place .*base\.weight"):
        zf.quantize(step).place(state)
    with (
        zf.offload(step, to="disk", path=tmp_path) as on_disk,
        pytest.raises(zf.CompositionError, match=r"offload\(to='disk'\) cannot place .*base"),
    ):
        on_disk.place(state)
