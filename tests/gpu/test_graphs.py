"""CUDA graphs that are not there: a capture leaves memory as it was, a replay repeats it."""

from __future__ import annotations

import pytest
import torch

import zfunc as zf
from tests.gpu.cuda import Cuda
from zfunc.language import gpt


def test_a_replay_repeats_what_was_captured() -> None:
    with Cuda() as cuda:
        x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2 + 1).view(3)
            total += y
        assert total.tolist() == [0.0] * 3
        x.fill_(2.0)
        cuda.take()
        graph.replay()
        graph.replay()
        assert cuda.take().count("capture") == 2
        assert y.tolist() == [5.0] * 3 and total.tolist() == [10.0] * 3


def test_a_capture_does_not_wait() -> None:
    with Cuda():
        x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph)
        with pytest.raises(RuntimeError, match="capturing"), capture:
            x.sum().item()
        assert x.sum().item() == 3.0


@pytest.mark.parametrize("capture", [False, True])
def test_generate_gives_the_hosts_texts(capture: bool) -> None:
    config = gpt.GPTConfig(vocab=48, width=16, depth=2, heads=2)
    from zfunc.language.gpt_decoding import GPTDecoder

    decoder = GPTDecoder(config)
    params = gpt.init(config, zf.random.key(0))
    ids = zf.random.randint(zf.random.key(1), 0, 48, (2, 4))
    plain = zf.generate(decoder, params, ids, max_new_tokens=6)
    with Cuda() as cuda:
        there = zf.tree.map(lambda x: x.cuda(), params)
        found = zf.generate(decoder, there, ids.cuda(), max_new_tokens=6, capture=capture)
        assert found.is_cuda and found.tolist() == plain.tolist()
        report = cuda.take()
        assert not report.faults()
        assert (report.count("capture") > 2) == capture
