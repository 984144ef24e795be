"""`quantize` in inference: the law, files, generation, and compositions."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from zfunc import quant, transforms
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.quant.qtensor import QTensor


class Net(nn.Module):
    """A causal model of its own kind, with a stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def net() -> zf.Functional:
    torch.manual_seed(0)
    return zf.functionalize(Net())


IDS = torch.tensor([[1, 5, 9], [0, 31, 7]])


def low(tree: Any) -> set[str]:
    return {name for name, x in zf.tree.flatten_names(tree).items() if isinstance(x, QTensor)}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("how", [{}, {"group_size": 32, "symmetric": False}, {"dynamic": True}],
                         ids=str)  # fmt: skip
def test_it_is_the_function_of_the_dequantised_tree(bits: int, how: dict[str, Any]) -> None:
    model = net()
    fn = zf.quantize(model.apply, bits=bits, **how)
    params = fn.place(model.params)
    assert low(params) == {"blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "head.weight"}
    expected = model.apply(quant.dequantize_tree(params), IDS)
    tolerance = 0.03 if how.get("dynamic") else 0.01 if bits == 4 else 1e-3
    got = fn(params, IDS)
    assert float((got - expected).norm() / expected.norm()) < tolerance
    assert not got.requires_grad
    back = fn.unplace(params)
    assert torch.equal(model.apply(back, IDS), expected)
    assert_unshared(params, model.params)


def assert_unshared(placed: Any, given: Any) -> None:
    mine, theirs = zf.tree.flatten_names(placed), zf.tree.flatten_names(given)
    for name, x in mine.items():
        assert x.data_ptr() != theirs[name].data_ptr()


def test_as_a_decorator_and_as_a_value() -> None:
    @zf.quantize(bits=4, include=["w*"])
    def fn(params: Any, x: Tensor) -> Tensor:
        return F.linear(x, params["w1"]) @ params["w2"]

    params = {"w1": torch.randn(8, 16), "w2": torch.randn(8, 4)}
    placed = fn.place(params)
    assert low(placed) == {"w1", "w2"} and "quantize(bits=4)" in repr(fn)
    expected = fn.__wrapped__(quant.dequantize_tree(placed), torch.ones(3, 16))
    torch.testing.assert_close(fn(placed, torch.ones(3, 16)), expected, rtol=1e-5, atol=1e-5)
    model = net()
    assert zf.quantize(model.apply, bits=8) == zf.quantize(bits=8)(model.apply)
    assert "int8, groups of 128" in str(zf.quantize(model.apply, bits=8).describe())


@pytest.mark.parametrize("bits", [8, 4])
def test_texts_are_those_of_the_dequantised_model(bits: int) -> None:
    model = net()
    params = zf.quantize(model.apply, bits=bits, group_size=32).place(model.params)
    got = zf.generate(model, params, IDS, max_new_tokens=6)
    assert torch.equal(got, zf.generate(model, quant.dequantize_tree(params), IDS,
                                        max_new_tokens=6))  # fmt: skip


def test_placing_from_files_holds_one_leaf_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    zf.export_safetensors(tmp_path, model.params, shard_bytes=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    fn = zf.quantize(model.apply, bits=4, group_size=32)
    expected = zf.tree.flatten_names(fn.place(model.params))
    alive: list[Any] = []
    read = SafetensorsFiles.read

    def watched(self: Any, name: str) -> Tensor:
        x = read(self, name)
        alive.append((name, weakref.ref(x.untyped_storage())))
        held = [n for n, ref in alive if ref() is not None and expected_low(n)]
        assert held in ([], [name]), held
        return x  # type: ignore[no-any-return]

    def expected_low(name: str) -> bool:
        return isinstance(expected[name], QTensor)

    monkeypatch.setattr("zfunc.files.tensorfiles.SafetensorsFiles.read", watched)
    for where in (tmp_path, str(tmp_path)):
        placed = fn.place(where)
        for name, x in zf.tree.flatten_names(placed).items():
            y = expected[name]
            if isinstance(y, QTensor):
                assert torch.equal(x.codes, y.codes) and torch.equal(x.scale, y.scale)
            else:
                assert torch.equal(x, y)
    assert len(alive) == 2 * len(expected)


def test_placing_from_a_low_bit_file(tmp_path: Path) -> None:
    model = net()
    fn = zf.quantize(model.apply, bits=4)
    placed = fn.place(model.params)
    file = quant.save(tmp_path / "low.safetensors", placed)
    assert torch.equal(fn(fn.place(file), IDS), fn(placed, IDS))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    model = net()
    fn = zf.quantize(model.apply, bits=8)
    with pytest.raises(zf.CheckpointError):
        fn.place(tmp_path)
    zf.export_safetensors(tmp_path, {"head": {"weight": torch.ones(2, 2)}})
    with pytest.raises(zf.CheckpointError, match=r"head\.weight has shape|no tensor"):
        fn.place(tmp_path)
    with pytest.raises(zf.PlacementError, match="model must be known"):
        zf.quantize(lambda p, x: x, bits=8).place(tmp_path)


MORE: dict[str, Any] = {"accumulate": {"n": 2}}


def test_training_transforms_are_told_apart() -> None:
    step = zf.train_step(lambda p, b: p["w"].sum(), zf.optim.sgd(0.1))
    training = sorted({*transforms.__all__} - {"shard", "split", "pipeline", "quantize"})
    for wrap in (functools.partial(getattr(zf, name), **MORE.get(name, {})) for name in training):
        for make in (
            lambda f, w=wrap: zf.quantize(w(f), bits=8),
            lambda f, w=wrap: w(zf.quantize(f, bits=8)),
        ):
            with pytest.raises(zf.CompositionError, match="start_bits=16"):
                make(step)
    for how in ({"bits": 3}, {"bits": 8, "group_size": 0}):
        with pytest.raises(ValueError, match=r"bits|group_size"):
            zf.quantize(step, **how)


def test_gradients_of_inputs_pass_low_bit_weights() -> None:
    model = net()
    params = quant.quantize_tree(model.params, bits=8, model=model)
    scale = torch.ones(64)

    def loss(p: Any) -> Tensor:
        return (model.apply(params, IDS) * 0).sum() + F.linear(
            p["s"], params["head"]["weight"]
        ).sum()

    _, grads = zf.value_and_grad(loss)({"s": scale})
    expected = params["head"]["weight"].dequantize().sum(dim=0)
    torch.testing.assert_close(grads["s"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sharded_parameters_travel_in_low_bits(bits: int, stage: int) -> None:
    """Whatever the stage and the world, the same numbers; what is gathered is what is stored."""
    model = net()
    fn = zf.quantize(model.apply, bits=bits, group_size=32, symmetric=False)
    placed = fn.place(model.params)
    expected = fn(placed, IDS)
    texts = zf.generate(model, placed, IDS, max_new_tokens=4)

    def body() -> Any:
        step = zf.shard(fn, stage=stage, unit_bytes=1 << 12)
        assert step == zf.quantize(
            zf.shard(model_fn(fn), stage=stage, unit_bytes=1 << 12), bits=bits, group_size=32,
            symmetric=False,
        )  # fmt: skip
        mine = step.place(model.params)
        with zf.comm.ledger() as sent:
            out = step(mine, IDS)
        text = zf.generate(model, mine, IDS, max_new_tokens=4)
        return out, text, sent.total_bytes, zf.tree.size_bytes(mine), step.unplace(mine)

    low_bytes = sum(x.nbytes for x in zf.tree.leaves(placed) if isinstance(x, QTensor))
    plain = zf.tree.size_bytes(placed) - low_bytes
    for ranks in (1, 2, 3):
        for out, text, sent, held, back in zf.simulate(ranks)(body)():
            assert torch.equal(out, expected) and torch.equal(text, texts)
            assert_equal(back, fn.unplace(placed))
            if stage == 3 and ranks > 1:
                whole = low_bytes + plain + 64 * 20  # leaves begin at multiples of 64
                slack = 4096 * ranks  # headers, and cuts at multiples of 64
                assert sent <= whole * (ranks - 1) / ranks + slack
                assert held <= whole / ranks + slack
            elif stage < 3:
                assert sent == 0


def model_fn(fn: Any) -> Any:
    """The function under a low-bit step, not yet wrapped."""
    return zf.Step(fn.fn)


def assert_equal(a: Any, b: Any) -> None:
    mine, theirs = zf.tree.flatten_names(a), zf.tree.flatten_names(b)
    assert mine.keys() == theirs.keys()
    for name, x in theirs.items():
        assert torch.equal(mine[name], x), name


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_say_everything(bits: int, symmetric: bool) -> None:
    params = quant.quantize_tree({"w": torch.randn(5, 37)}, bits, 16, symmetric)
    q = params["w"]
    data = q.to_bytes()
    assert data.dtype == torch.uint8 and len(data) == q.code.bytes
    back = q.code.read(data)
    assert torch.equal(back.dequantize(), q.dequantize()) and back.format == q.format
