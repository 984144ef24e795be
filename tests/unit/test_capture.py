"""Steps that are traced once and replayed: the same texts, token for token.

There is no GPU in these tests. ``Traced`` records the operations of one call; whatever that call
took from Python (a position, a shape) is frozen in them, as it is in a CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zfunc as zf
from tests.unit.test_generation import SMALL, causal, decoding, ids_of, own
from zfunc import kernels, quant
from zfunc.errors import PlacementError
from zfunc.language import capture, gpt
from zfunc.language.decoding import Held, held
from zfunc.language.gpt_decoding import GPTDecoder
from zfunc.language.recording import CudaGraphs, OnDevice, recorder

CPU = torch.device("cpu")


class Traced:
    """Records operations of torch."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.replays = 0

    def __call__(
        self, run: Callable[..., Tensor], inputs: tuple[Tensor, ...]
    ) -> Callable[[], Tensor]:
        graph = make_fx(run, tracing_mode="real")(*inputs)
        self.graphs.append(graph)

        def replay() -> Tensor:
            self.replays += 1
            out: Tensor = graph(*inputs)
            return out

        return replay

    def calls(self) -> set[str]:
        return {str(n.target) for graph in self.graphs for n in graph.graph.nodes}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Records where a GPU would, with extents that short texts outgrow."""
    record = Traced()
    monkeypatch.setattr(capture, "recorder", lambda device: record)
    monkeypatch.setattr(capture, "Captured", partial(capture.Captured, smallest=8))
    return record


def padded(rows: int) -> tuple[Tensor, Tensor]:
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [7], [2]])[:rows]).long()
    return ids_of(rows, 9) * mask, mask


def moved(params: Any) -> Any:
    """Away from where they start: our GPT's blocks add nothing there."""
    random = torch.Generator().manual_seed(2)
    return zf.tree.map(lambda x: x + 0.2 * torch.randn(x.shape, generator=random), params)


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("llama", 4), ("gpt2", 4), ("qwen2", 1)])
def test_what_is_traced_once_continues_texts_alike(name: str, rows: int, traced: Traced) -> None:
    model = causal(name)
    functional, (ids, mask) = zf.functionalize(model), padded(rows)
    run = partial(zf.generate, functional, functional.params, ids, attention_mask=mask)
    out = run(max_new_tokens=12, capture=True)
    assert torch.equal(out, own(model, ids, mask, 12))
    # 9 tokens of prompt: the extent is 16 until the text has 17, and then the cache.
    assert (len(traced.graphs), traced.replays) == (2, 11)
    if name == "llama" and rows == 4:
        drawn: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 20, "key": 3}
        assert torch.equal(run(**drawn, capture=True), run(**drawn, capture=False))
        assert len(traced.graphs) == 4
    waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
    assert not [x for x in traced.calls() if any(f"aten.{name}." in f"{x}." for name in waits)]


@pytest.mark.parametrize(("rows", "window"), [(1, 5), (4, None)])
def test_our_gpt_is_captured(rows: int, window: int | None, traced: Traced) -> None:
    decoder, params = GPTDecoder(SMALL, window=window), moved(gpt.init(SMALL, zf.random.key(0)))
    ids, mask = padded(rows)
    how: dict[str, Any] = {"max_new_tokens": 12, "attention_mask": mask}
    for more in ({}, {"temperature": 1.0, "key": 5}):
        run = partial(zf.generate, decoder, params, ids % SMALL.vocab, **how, **more)
        assert torch.equal(run(capture=True), run(capture=False))
    assert (len(traced.graphs), traced.replays) == (4, 22)


def test_blocks_and_eight_bits_are_inside(traced: Traced) -> None:
    """By their twins, which take the slot from the same tensor as the kernel."""
    functional, (ids, mask) = zf.functionalize(causal("llama")), padded(3)
    params = quant.quantize_tree(functional.params, 8, 16, model=functional)
    run = partial(zf.generate, functional, params, ids, attention_mask=mask)
    with kernels.use("torch"):
        out = run(max_new_tokens=12, capture=True)
    assert torch.equal(out, run(max_new_tokens=12, capture=False))
    assert traced.replays == 11


@pytest.mark.parametrize(
    ("name", "rows"),
    [("llama", 1), ("llama", 4), ("gpt2", 1), ("gpt2", 4), ("qwen2", 4), ("qwen3", 1), ("gpt", 4)],
)
def test_a_replay_has_the_logits_of_the_step_that_the_text_is_at(name: str, rows: int) -> None:
    """Nearer than greedy tokens can tell; with padding where there are several texts."""
    (decoder, params), record = decoding(name), Traced()
    params = moved(params)
    if name == "gpt":
        decoder = GPTDecoder(SMALL, window=5)
    ids = ids_of(rows, 20, vocab=11)
    mask = torch.ones(rows, 20, dtype=torch.bool) if rows > 1 else None
    if mask is not None:
        mask[:, :9] = padded(rows)[1].bool()
    with torch.no_grad(), held(decoder, params) as step:
        assert isinstance(step, Held)
        single = capture.Captured(step, record, smallest=8)
        _, cache = step(decoder.start(rows, 20, mask), ids[:, :9])
        _, other = step(decoder.start(rows, 20, mask), ids[:, :9])
        for i in range(9, 18):
            found, cache = single(cache, ids[:, i : i + 1])
            expected, other = step(other, ids[:, i : i + 1])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert len(record.graphs) == 2 and cache.used == 18  # an extent of 16, and one of 20
        for i in range(18, 20):  # the cache that replays leave serves eager steps
            found, cache = step(cache, ids[:, i : i + 1])
            expected, other = step(other, ids[:, i : i + 1])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
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
    with OnDevice(CPU), pytest.raises(PlacementError, match="aten"):
        Reading()(torch.ones(2), how)


@pytest.mark.parametrize("how", ["index", "where"])
def test_indices_and_masks_are_not(how: str) -> None:
    with OnDevice(CPU):
        out = Reading()(torch.ones(2), how)
    assert torch.equal(out, torch.ones(2))
    with OnDevice(torch.device("meta")):  # values of another device's tensors are at hand
        assert Reading()(torch.ones(2), "item") == 2


def test_what_cannot_be_captured_runs_eagerly_or_says_why(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    model = causal("mistral sliding")  # a window of 8 that slides: its cache is no prefix
    functional, ids = zf.functionalize(model), ids_of(2, 9)
    run = partial(zf.generate, functional, functional.params, ids, max_new_tokens=18)
    with caplog.at_level(logging.INFO, logger="zfunc"):
        out = run()
    assert torch.equal(out, own(model, ids, torch.ones_like(ids), 18)) and not traced.graphs
    assert len(caplog.records) == 1 and "StaticSlidingWindowLayer" in caplog.text
    with pytest.raises(PlacementError, match=r"capture=True: .* since .*StaticSlidingWindowLayer"):
        run(capture=True)
    count = zf.functionalize(nn.Embedding(4, 4))
    with pytest.raises(PlacementError, match="no step of tensors only"):
        zf.generate(count, count.params, torch.tensor([[1]]), max_new_tokens=3, capture=True)


def test_placed_parameters_are_not_captured(traced: Traced) -> None:
    functional, ids = zf.functionalize(causal("llama")), ids_of(1, 5)
    placed = zf.shard(lambda *a: a, stage=3).place({"params": functional.params})["params"]
    with pytest.raises(PlacementError, match="parameters are placed"):
        zf.generate(functional, placed, ids, max_new_tokens=3, capture=True)
    zf.generate(functional, placed, ids, max_new_tokens=20)
    assert not traced.graphs


def test_a_model_that_reads_its_position_is_not_captured(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that takes an extent for a length."""
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

    for forward, why in ((reading, "_local_scalar_dense"), (counting, "gives other logits")):
        monkeypatch.setattr(type(model), "forward", forward)
        functional, (ids, mask) = zf.functionalize(model), padded(2)
        run = partial(zf.generate, functional, functional.params, ids, attention_mask=mask)
        assert run(max_new_tokens=20).shape == (2, 29) and not traced.graphs
        with pytest.raises(PlacementError, match=why):
            run(max_new_tokens=20, capture=True)


def test_without_a_gpu_nothing_is_captured() -> None:
    functional, ids = zf.functionalize(causal("llama")), ids_of(1, 5)
    assert recorder(CPU) is None
    with pytest.raises(PlacementError, match="tokens are on cpu"):
        zf.generate(functional, functional.params, ids, max_new_tokens=3, capture=True)


class Fake:
    """What ``CudaGraphs`` asks of ``torch.cuda``, in the order in which it does."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.live = log, 0

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake, log = self, self.log

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = "now" if device is None else "side"

            def wait_stream(self, other: Any) -> None:
                log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def __init__(self) -> None:
                fake.live += 1

            def __del__(self) -> None:
                fake.live -= 1

            def pool(self) -> str:
                return "pool"

            def replay(self) -> None:
                log.append("replay")

        @contextmanager
        def on(stream: Any) -> Iterator[None]:
            yield

        @contextmanager
        def graph(graph: Graph, pool: Any, stream: Stream, capture_error_mode: str) -> Any:
            log.append(f"record on {stream.name} with {pool}, {fake.live} alive")
            yield

        replaced = {"Stream": Stream, "CUDAGraph": Graph, "stream": on, "device": on}
        for name, value in {**replaced, "graph": graph, "current_stream": Stream}.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_cuda_graphs_are_recorded_as_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm on the stream that records; a pool that the graph before still holds."""
    log: list[Any] = []
    Fake(log).patch(monkeypatch)
    record = CudaGraphs(CPU)
    warm = ["side waits for now", "run", "run", "now waits for side"]

    def run(x: Tensor) -> Tensor:
        log.append("run")
        return x + 1

    replay = record(run, (torch.zeros(1),))
    assert log == [*warm, "record on side with None, 1 alive", "run"]
    assert replay() == 1 and log[-1] == "replay"
    log.clear()
    record(run, (torch.ones(1),))
    assert log == [*warm, "record on side with pool, 2 alive", "run"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_graphs_continue_texts_alike_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "Captured", partial(capture.Captured, smallest=8))
    functional = zf.functionalize(causal(name).cuda())
    ids, mask = (x.cuda() for x in padded(4))
    run = partial(zf.generate, functional, functional.params, ids, attention_mask=mask)
    assert torch.equal(run(max_new_tokens=30, capture=True), run(max_new_tokens=30, capture=False))
