"""The corpus: real, the same every time, honestly split, honestly measured."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zfunc.language import corpus


def text_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.fixture(scope="module")
def topics() -> corpus.Corpus:
    return corpus.read_corpus("topics")


def test_the_reference_is_real_and_reads_the_same_twice(topics: corpus.Corpus) -> None:
    again = corpus.read_corpus("topics")
    assert torch.equal(topics.train, again.train) and torch.equal(topics.heldout, again.heldout)
    assert len(topics.train) > 250_000
    assert len(topics.heldout) == pytest.approx(len(topics.train) / 9, rel=1e-3)
    assert b"assert_stmt ::=" in bytes(topics.train.tolist())


def test_no_held_out_paragraph_was_seen_in_training(topics: corpus.Corpus) -> None:
    train = {p.strip() for p in bytes(topics.train.tolist()).decode().split("\n\n")}
    heldout = bytes(topics.heldout.tolist()).decode(errors="replace").split("\n\n")
    long = [p.strip() for p in heldout if len(p.strip()) >= 60]
    assert len(long) > 50
    assert not train.intersection(long)


def test_docstrings_come_from_the_source() -> None:
    code = b'"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
    assert list(corpus._docstrings_of(code)) == ["Module.", "Class.", "Method."]
    assert list(corpus._docstrings_of(b"def broken(:")) == []


def test_a_file_is_taken_byte_for_byte(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4
    (tmp_path / "x.bin").write_bytes(data)
    read = corpus.read_corpus(tmp_path / "x.bin", heldout=0.25, context=8)
    assert bytes(torch.cat([read.train, read.heldout]).tolist()) == data
    assert len(read.heldout) == 256


def test_a_text_too_short_says_so(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"a" * 100)
    with pytest.raises(ValueError, match=r"held-out part has 10 bytes, expected at least 33"):
        corpus.read_corpus(tmp_path / "short.txt", context=32)


@given(st.binary(min_size=2, max_size=400))
def test_entropies_are_what_counting_says(data: bytes) -> None:
    pairs = list(itertools.pairwise(data))
    previous = [a for a, _ in pairs]
    bigram = sum(-math.log(pairs.count(p) / previous.count(p[0])) for p in pairs) / len(pairs)
    unigram = sum(-math.log(data.count(b) / len(data)) for b in data) / len(data)
    found = corpus.entropies(text_of(data))
    assert found.unigram == pytest.approx(unigram, abs=1e-9)
    assert found.bigram == pytest.approx(bigram, abs=1e-9)


def test_entropy_of_fair_bytes_is_log_256() -> None:
    found = corpus.entropies(text_of(bytes(range(256))))
    assert found.unigram == pytest.approx(math.log(256))
    assert found.bigram == 0.0


def test_no_bigram_table_beats_the_bigram_entropy(topics: corpus.Corpus) -> None:
    counts = torch.ones(256, 256, dtype=torch.float64)  # fitted elsewhere, smoothed by one
    train, heldout = topics.train.long(), topics.heldout.long()
    counts.view(-1).index_add_(
        0, train[:-1] * 256 + train[1:], torch.ones(len(train) - 1, dtype=torch.float64)
    )
    table = (counts / counts.sum(1, keepdim=True)).log()
    fitted = -table[heldout[:-1], heldout[1:]].mean().item()
    own = corpus.entropies(topics.heldout)
    assert own.bigram < fitted < own.unigram


def test_a_batch_is_a_function_of_seed_and_step(topics: corpus.Corpus) -> None:
    def draw(step: int, seed: int) -> torch.Tensor:
        return corpus.batch_at(step, topics.train, batch=6, context=16, seed=seed)

    assert draw(3, 0).shape == (6, 17) and draw(3, 0).dtype == torch.long
    assert torch.equal(draw(3, 0), draw(3, 0))
    assert not torch.equal(draw(3, 0), draw(4, 0))
    assert not torch.equal(draw(3, 0), draw(3, 1))


def test_batches_reach_the_first_and_the_last_byte() -> None:
    text = text_of(bytes(range(10)))
    drawn = torch.cat([corpus.batch_at(s, text, 4, 7, seed=0) for s in range(20)])
    assert drawn.min() == 0 and drawn.max() == 9
    assert torch.equal(drawn, drawn[:, :1] + torch.arange(8))


@given(st.binary(min_size=2, max_size=60), st.integers(1, 9), st.integers(1, 4))
def test_windows_predict_each_byte_once(data: bytes, context: int, multiple: int) -> None:
    ids, targets = corpus.windows(text_of(data), context, multiple)
    assert ids.shape == targets.shape
    assert ids.shape[1] == context and len(ids) % multiple == 0
    kept = targets != -100
    assert targets[kept].tolist() == list(data[1:])
    assert ids[kept].tolist() == list(data[:-1])
