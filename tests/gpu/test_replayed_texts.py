"""Single tokens as CUDA graphs on the pretended device: the same texts, token for token."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zfunc as zf
from tests.gpu.cuda import Cuda
from tests.gpu.record import HOST_WAITS, Report
from tests.unit.test_generation import SMALL, causal, decoding, ids_of, own
from zfunc import kernels, quant
from zfunc.errors import PlacementError
from zfunc.language import decoding_graph, gpt
from zfunc.language.decoding import BoundStep, bound, decoder_of
from zfunc.language.decoding_graph import GraphedStep, NoHostReads
from zfunc.language.gpt_decoding import GPTDecoder

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """The device, with lengths that short texts outgrow."""
    monkeypatch.setattr(decoding_graph, "SMALLEST", 8)
    causal("llama")  # transformers annotates by torch.cuda.Stream, which is to be a type by then
    with Cuda() as cuda:
        yield cuda


def recorded(report: Report) -> tuple[int, int]:
    """How many graphs were recorded and replayed; nothing raced, nobody waited between replays."""
    assert report.faults() == []
    graphs, replays, waited = 0, 0, []
    for row in report.rows:
        if row.kind in HOST_WAITS:
            waited.append(str(row))
        elif row.kind == "capture" and row.what == "replay":
            assert not (waited and replays), waited
            replays, waited = replays + 1, []
        elif row.kind == "capture" and row.what == "begins":  # it is compared with the eager step
            graphs, waited = graphs + 1, []
    return graphs, replays


def up(params: Any) -> Any:
    return zf.tree.map(lambda x: x.cuda(), params)


def on_gpu(model: nn.Module) -> Any:
    """Moved as users move it: the whole module, with its buffers."""
    return zf.functionalize(model.cuda())


def padded(rows: int) -> tuple[Tensor, Tensor]:
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [7], [2]])[:rows]).long()
    return ids_of(rows, 9) * mask, mask


def moved(params: Any) -> Any:
    """Away from where they start: our GPT's blocks add nothing there."""
    random = torch.Generator().manual_seed(2)
    return zf.tree.map(lambda x: x + 0.2 * torch.randn(x.shape, generator=random), params)


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("llama", 4), ("gpt2", 4), ("qwen2", 1)])
def test_what_is_recorded_once_continues_texts_alike(name: str, rows: int, cuda: Cuda) -> None:
    model, (ids, mask) = causal(name), padded(rows)
    expected = own(model, ids, mask, 12)
    functional = on_gpu(model)
    run = partial(zf.generate, functional, functional.params, ids.cuda())
    run = partial(run, attention_mask=mask.cuda(), max_new_tokens=12)
    cuda.take()
    out = run(capture=True)
    assert out.tolist() == expected.tolist()
    # 9 tokens of prompt: 16 positions are read until the text has 17, and then the whole cache.
    assert recorded(cuda.take()) == (2, 11)
    if name == "llama" and rows == 4:
        drawn: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "key": 3}
        assert run(**drawn, capture=True).tolist() == run(**drawn, capture=False).tolist()
        assert cuda.take().count("capture") == 2 * 2 + 11


@pytest.mark.parametrize(("rows", "window"), [(1, 5), (4, None)])
def test_our_gpt_is_recorded(rows: int, window: int | None, cuda: Cuda) -> None:
    decoder, params = GPTDecoder(SMALL, window=window), moved(gpt.init(SMALL, zf.random.key(0)))
    ids, mask = padded(rows)
    ids = ids % SMALL.vocab
    for more in ({}, {"temperature": 1.0, "key": 5}):
        how: dict[str, Any] = {"max_new_tokens": 12, **more}
        host = zf.generate(decoder, params, ids, attention_mask=mask, **how)
        there = decoder, up(params), ids.cuda()
        found = zf.generate(*there, attention_mask=mask.cuda(), capture=True, **how)
        assert found.tolist() == host.tolist()
        assert cuda.take().count("capture") == 2 * 2 + 11


def test_blocks_and_eight_bits_are_inside() -> None:
    """By their twins, which take the slot from the same tensor as the kernel.

    The pretended device has no low-bit tensors. A trace of one position serves the others as well:
    what a call takes from Python is frozen in it, as it is in a graph.
    """
    functional, (ids, mask) = zf.functionalize(causal("llama")), padded(3)
    params = quant.quantize_tree(functional.params, 8, 16, model=functional)
    decoder, whole = decoder_of(functional), torch.cat([mask, torch.ones(3, 5)], 1).bool()
    with kernels.use("torch"), torch.no_grad(), bound(decoder, params) as step:
        assert isinstance(step, BoundStep) and step.single is not None
        _, cache = step(decoder.start(3, 14, whole), ids)
        inputs = ids[:, :1].clone(), torch.tensor([9])
        run = make_fx(step.single(cache, 14), tracing_mode="real")(*inputs)
        assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & {
            str(node.target) for node in run.graph.nodes
        }
        _, other = step(decoder.start(3, 14, whole), ids)
        for i in range(9, 14):
            inputs[0].copy_(ids[:, i - 9 : i - 8])
            inputs[1].fill_(i)
            expected, other = step(other, inputs[0])
            torch.testing.assert_close(run(*inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("llama", 1), ("llama", 4), ("gpt2", 1), ("gpt2", 4), ("qwen2", 4), ("qwen3", 1), ("gpt", 4)],
)
def test_a_replay_has_the_logits_of_the_step_that_the_text_is_at(
    name: str, rows: int, cuda: Cuda
) -> None:
    """Nearer than greedy tokens can tell; with padding where there are several texts."""
    if name == "gpt":
        decoder, params = GPTDecoder(SMALL, window=5), up(moved(decoding(name)[1]))
    else:
        params = up(moved(zf.functionalize(causal(name)).params))
        decoder = decoder_of(on_gpu(causal(name)))
    ids = ids_of(rows, 20, vocab=11).cuda()
    mask = torch.ones(rows, 20, dtype=torch.bool, device="cuda") if rows > 1 else None
    if mask is not None:
        mask[:, :9] = padded(rows)[1].bool().cuda()
    with torch.no_grad(), bound(decoder, params) as step:
        assert isinstance(step, BoundStep)
        single = GraphedStep(step, ids.device)
        _, cache = step(decoder.start(rows, 20, mask), ids[:, :9])
        _, other = step(decoder.start(rows, 20, mask), ids[:, :9])
        cuda.take()
        for i in range(9, 18):
            found, cache = single(cache, ids[:, i : i + 1])
            expected, other = step(other, ids[:, i : i + 1])
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)
        report = cuda.take()  # over 16 positions, and over 20
        assert [row.what for row in report.of("capture")].count("begins") == 2
        assert cache.used == 18 and report.faults() == []
        for i in range(18, 20):  # the cache that replays leave serves eager steps
            found, cache = step(cache, ids[:, i : i + 1])
            expected, other = step(other, ids[:, i : i + 1])
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="the cache is full"):
            single(cache, ids[:, :1])


class Reading(nn.Module):
    """Asks for a value, or copies one, or does neither."""

    def forward(self, x: Tensor, how: str) -> Any:
        return {
            "item": lambda: x.sum().item(),
            "if": lambda: bool(x.any()),
            "nonzero": lambda: x.nonzero(),
            "mask": lambda: x[x > 0],
            "range": lambda: torch.arange(x[0]),
            "copy": lambda: x.to("meta"),
            "index": lambda: x[x.long()],
            "where": lambda: torch.where(x > 0, x, 0),
        }[how]()


@pytest.mark.parametrize("how", ["item", "if", "nonzero", "mask", "range", "copy"])
def test_what_waits_for_a_value_is_refused(how: str) -> None:
    with NoHostReads(CPU), pytest.raises(PlacementError, match="aten"):
        Reading()(torch.ones(2), how)


@pytest.mark.parametrize("how", ["index", "where"])
def test_indices_and_masks_are_not(how: str) -> None:
    with NoHostReads(CPU):
        out = Reading()(torch.ones(2), how)
    assert torch.equal(out, torch.ones(2))
    with NoHostReads(torch.device("meta")):  # values of another device's tensors are at hand
        assert Reading()(torch.ones(2), "item") == 2


def test_what_cannot_be_recorded_runs_eagerly_or_says_why(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = causal("mistral sliding"), ids_of(2, 9)  # a window of 8: its cache is no prefix
    expected = own(model, ids, torch.ones_like(ids), 18)
    functional = on_gpu(model)
    run = partial(zf.generate, functional, functional.params, ids.cuda(), max_new_tokens=18)
    with caplog.at_level(logging.INFO, logger="zfunc"):
        out = run()
    assert out.tolist() == expected.tolist() and not cuda.take().count("capture")
    assert len(caplog.records) == 1 and "StaticSlidingWindowLayer" in caplog.text
    with pytest.raises(PlacementError, match=r"capture=True: .* since .*StaticSlidingWindowLayer"):
        run(capture=True)
    count = zf.functionalize(nn.Embedding(4, 4).cuda())
    one = torch.tensor([[1]]).cuda()
    with pytest.raises(PlacementError, match="no step of tensors only"):
        zf.generate(count, count.params, one, max_new_tokens=3, capture=True)


def test_placed_parameters_are_not_recorded(cuda: Cuda) -> None:
    functional, ids = on_gpu(causal("llama")), ids_of(1, 5).cuda()
    placed = zf.shard(lambda *a: a, stage=3).place({"params": functional.params})["params"]
    with pytest.raises(PlacementError, match="parameters are placed"):
        zf.generate(functional, placed, ids, max_new_tokens=3, capture=True)
    zf.generate(functional, placed, ids, max_new_tokens=20)
    assert not cuda.take().count("capture")


def test_a_buffer_on_the_host_is_not_recorded(cuda: Cuda) -> None:
    """Of a model whose parameters alone were moved: each step would copy it, and wait."""
    functional, ids = zf.functionalize(causal("llama")), ids_of(1, 5).cuda()
    run = partial(zf.generate, functional, up(functional.params), ids, max_new_tokens=20)
    with pytest.raises(PlacementError, match="a blocking copy up"):
        run(capture=True)
    assert run().shape == (1, 25)  # the capture that failed leaves the device usable


def test_a_model_that_reads_its_position_is_not_recorded(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that takes the length that is read for that of the text."""
    model = causal("llama")
    plain = type(model).forward

    @wraps(plain)
    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        int(kwargs["past_key_values"].get_seq_length())
        return plain(self, *args, **kwargs)

    @wraps(plain)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        count = kwargs["attention_mask"]
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * (1 if count is None else count.shape[1])
        return out

    ids, mask = (x.cuda() for x in padded(2))
    for forward, why in ((reading, "_local_scalar_dense"), (counting, "gives other logits")):
        monkeypatch.setattr(type(model), "forward", forward)
        functional = on_gpu(model)
        run = partial(zf.generate, functional, functional.params, ids, attention_mask=mask)
        assert run(max_new_tokens=20).shape == (2, 29) and not cuda.take().count("capture")
        with pytest.raises(PlacementError, match=why):
            run(max_new_tokens=20, capture=True)


def test_few_tokens_are_not_worth_it(cuda: Cuda) -> None:
    functional, ids = on_gpu(causal("llama")), ids_of(1, 5).cuda()
    for count, graphs in (
        (decoding_graph.FEWEST, 0),
        (decoding_graph.FEWEST + 1, 3),
    ):  # lengths of 8, 16, 22
        cuda.take()
        zf.generate(functional, functional.params, ids, max_new_tokens=count)
        assert recorded(cuda.take())[0] == graphs


def test_without_a_gpu_nothing_is_recorded() -> None:
    functional, ids = zf.functionalize(causal("llama")), ids_of(1, 5)
    with pytest.raises(PlacementError, match="tokens are on cpu"):
        zf.generate(functional, functional.params, ids, max_new_tokens=3, capture=True)


def test_graphs_are_recorded_as_torch_asks(cuda: Cuda) -> None:
    """Warm on the stream that records; a pool that the graph before still holds."""
    functional, ids = on_gpu(causal("llama")), ids_of(1, 5).cuda()
    cuda.take()
    zf.generate(functional, functional.params, ids, max_new_tokens=6, capture=True)
    rows = cuda.take().rows
    begins = [i for i, row in enumerate(rows) if (row.kind, row.what) == ("capture", "begins")]
    ends = [i for i, row in enumerate(rows) if (row.kind, row.what) == ("capture", "ends")]
    assert len(begins) == 2
    for start, end in zip(begins, ends, strict=True):
        (side,) = {row.stream for row in rows[start + 1 : end] if row.kind == "launch"}
        inside = [row.what for row in rows[start:end] if row.kind == "launch"]
        before = [row.what for row in rows[:start] if row.kind == "launch" and row.stream == side]
        assert before[-2 * len(inside) :] == 2 * inside
