"""Text to train on: the prose that every Python ships, or a file of the user's.

The built-in corpus is the language reference as ``pydoc`` carries it
(``pydoc_data.topics``) and, on demand, the docstrings of the standard library:
real technical English, there on every machine, read in a fixed order, nothing
downloaded and nothing cached. Its exact size depends on the Python version, so
what a model should beat is computed here and never quoted.

Tokens are bytes. The last part of the text is held out, and paragraphs that occur
twice (some topics quote whole pages of others) are kept once, before the cut, so
that nothing of the held-out part has been seen in training.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Corpus",
    "Entropies",
    "batch_at",
    "divided",
    "entropies",
    "read_corpus",
    "read_source",
    "windows",
]

SEPARATOR = "\n\n\n"
SOURCES = ("topics", "stdlib")
# Not prose about Python: tests, programs, and what pip put beside the library.
SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}
SKIPPED |= {"site-packages", "dist-packages", "ensurepip", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """A text cut in two: ``train`` and ``heldout`` are 1-D, uint8 for bytes, int64 for tokens."""

    name: str
    train: Tensor
    heldout: Tensor


@dataclass(frozen=True)
class Entropies:
    """Nats per byte of a text: of its bytes, and of a byte given the one before it."""

    unigram: float
    bigram: float


def read_corpus(source: str | Path = "topics", heldout: float = 0.1, context: int = 1) -> Corpus:
    """Read a corpus and hold out its last part.

    Args:
        source: ``"topics"`` (the language reference), ``"stdlib"`` (the reference and
            the docstrings of the standard library), or the path of a file, whose bytes
            are taken as they are.
        heldout: fraction of the bytes that is held out.
        context: each part must hold at least one window of ``context + 1`` bytes.

    Returns:
        The corpus; its parts share no memory with anything else.

    Raises:
        ValueError: the text is too short for one window in each part.
        OSError: the file cannot be read.
    """
    name, text = read_source(source)
    data = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[: len(text)]
    return divided(name, data, heldout, context, "bytes")


def divided(name: str, ids: Tensor, heldout: float, context: int, units: str) -> Corpus:
    """A text's ids, 1-D, its last part held out; ``units`` says what they are.

    Raises:
        ValueError: a part is shorter than one window.
    """
    cut = len(ids) - int(len(ids) * heldout)
    for part, size in (("training", cut), ("held-out", len(ids) - cut)):
        if size < context + 1:
            raise ValueError(
                f"{name}: its {part} part has {size} {units}, expected at least {context + 1} "
                f"(one window of context {context}); give a longer text or a shorter context"
            )
    return Corpus(name, ids[:cut].clone(), ids[cut:].clone())


def read_source(source: str | Path) -> tuple[str, bytes]:
    """The name of a text and its bytes; ``source`` as for :func:`read_corpus`.

    Raises:
        OSError: the file cannot be read.
    """
    if source == "topics":
        return "Python's language reference", _join(_topics())
    if source == "stdlib":
        return "Python's reference and docstrings", _join([*_topics(), *_docstrings()])
    return str(source), Path(source).read_bytes()


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _docstrings() -> Iterator[str]:
    """One document per module: its docstrings, in the order of the files' names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            found = list(_docstrings_of(path.read_bytes()))
            if found:
                yield "\n\n".join(found)


def _docstrings_of(code: bytes) -> Iterator[str]:
    """Read from the source, so that ``python -OO`` sees the same text."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):  # templates and deliberately broken sources
        return
    for node in nodes:
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def _join(documents: Iterable[str]) -> bytes:
    seen: set[str] = set()
    kept = ("\n\n".join(_unseen(text.split("\n\n"), seen)) for text in documents)
    return SEPARATOR.join(text for text in kept if text.strip()).encode()


def _unseen(paragraphs: Iterable[str], seen: set[str], shortest: int = 60) -> Iterator[str]:
    """Drop paragraphs met before; short ones ("Example:") may repeat, as in any prose."""
    for paragraph in paragraphs:
        key = paragraph.strip()
        if len(key) < shortest or key not in seen:
            seen.add(key)
            yield paragraph


def entropies(text: Tensor) -> Entropies:
    """Empirical entropies of a text under itself, in nats per byte.

    ``unigram`` is :math:`H(x_t)` and ``bigram`` is :math:`H(x_t | x_{t-1})`, from the
    counts in this very text. No table of byte frequencies, or of frequencies given the
    previous byte, reaches a lower cross-entropy on it, wherever the table was fitted
    (Gibbs' inequality): the bar for a model that claims to have learnt more than that.

    Args:
        text: 1-D uint8, at least two bytes.

    Returns:
        The two entropies.

    >>> entropies(torch.tensor([0, 1, 0, 1, 0, 1, 0], dtype=torch.uint8)).bigram
    0.0
    """
    if len(text) < 2:
        raise ValueError(f"entropies of {len(text)} bytes: expected at least 2")
    codes = text.numpy().astype(np.int64)
    pairs = np.bincount(codes[:-1] * 256 + codes[1:], minlength=65536).reshape(256, 256)
    joint = _entropy(pairs.ravel())
    return Entropies(_entropy(np.bincount(codes)), max(0.0, joint - _entropy(pairs.sum(axis=1))))


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum()) + 0.0  # never -0.0


def batch_at(step: int, text: Tensor, batch: int, context: int, seed: int) -> Tensor:
    """The whole world's batch of one step: a function of its arguments and nothing else.

    So a resumed run, or one on another number of ranks, sees the same data.

    Args:
        step: number of the step.
        text: 1-D uint8, more than ``context`` bytes.
        batch: windows in the batch.
        context: predicted bytes per window.
        seed: the run's seed.

    Returns:
        ``[batch, context + 1]`` int64, windows drawn uniformly from the text.
    """
    drawn = np.random.default_rng([seed, step]).integers(len(text) - context, size=batch)
    offsets = torch.from_numpy(drawn)[:, None] + torch.arange(context + 1)
    return text[offsets].long()


def windows(text: Tensor, context: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Cut a text into windows that predict every byte but the first exactly once.

    Args:
        text: 1-D uint8 of n >= 2 bytes.
        context: predicted bytes per window.
        multiple: the number of windows is rounded up to a multiple of this.

    Returns:
        ``(ids, targets)``, both ``[windows, context]`` int64; beyond the end of the text
        targets are -100, which ``cross_entropy`` ignores.

    >>> windows(torch.tensor([5, 6, 7, 8], dtype=torch.uint8), 2)
    (tensor([[5, 6],
            [7, 0]]), tensor([[   6,    7],
            [   8, -100]]))
    """
    rows = -(-(len(text) - 1) // (context * multiple)) * multiple
    ids = torch.zeros(rows * context, dtype=torch.long)
    targets = torch.full((rows * context,), -100)
    ids[: len(text) - 1] = text[:-1].long()
    targets[: len(text) - 1] = text[1:].long()
    return ids.view(rows, context), targets.view(rows, context)
