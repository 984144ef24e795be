"""Packed text from torchdata's loader, and a resume in the middle of an epoch, on other ranks too.

Documents are packed into rows of equal length. Every rank goes through the whole stream and keeps
its own rows of each batch, so the position is that of the whole world: it is the same on all ranks,
and means the same on any number of them. `zf.save(..., extra=loader.state_dict())` puts it into the
checkpoint of the state that has seen these rows: both are on the disk, or neither is.

    python examples/data.py --ranks 2

What is read here is small. Of a large corpus tokens would be read from memory-mapped files, where
going through the rows of others costs nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import zfunc as zf
from zfunc import optim
from zfunc.language import gpt
from zfunc.language.corpus import SEPARATOR, read_corpus

LENGTH, BATCH = 32, 12  # tokens that a row predicts; rows of a batch on all ranks together
CONFIG = gpt.GPTConfig(vocab=256, width=32, depth=2, heads=2)


class Packed(IterableDataset[Tensor]):
    """This rank's rows ``[batch / ranks, length + 1]`` of one batch after the other.

    Documents come in another order in each epoch, one behind the other. Rows begin and end
    anywhere in them.
    """

    def __init__(self, documents: list[bytes], batch: int, length: int) -> None:
        self.documents, self.batch, self.length = documents, batch, length
        self.rank, self.ranks = zf.rank(), zf.world_size()  # a worker process has no world
        if batch % self.ranks:
            raise ValueError(f"{batch} rows cannot be shared equally by {self.ranks} ranks")
        self.samples = 0  # rows that all ranks together have been given
        self.document, self.offset = 0, 0  # where the next begins; earlier epochs count

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples, "document": self.document, "offset": self.offset}

    def load_state_dict(self, found: dict[str, int]) -> None:
        self.samples, self.document, self.offset = (
            found[name] for name in ("samples", "document", "offset")
        )

    def __iter__(self) -> Iterator[Tensor]:
        share = self.batch // self.ranks
        while True:
            rows = torch.stack([self._row() for _ in range(self.batch)])
            self.samples += self.batch
            yield rows[self.rank * share : (self.rank + 1) * share]

    def _row(self) -> Tensor:
        row: list[int] = []
        while len(row) <= self.length:
            text = self._text()
            part = text[self.offset : self.offset + self.length + 1 - len(row)]
            row += part
            self.offset += len(part)
            if self.offset == len(text):
                self.document, self.offset = self.document + 1, 0
        return torch.tensor(row)

    def _text(self) -> bytes:
        epoch, place = divmod(self.document, len(self.documents))
        order = torch.randperm(len(self.documents), generator=torch.Generator().manual_seed(epoch))
        return self.documents[int(order[place])] + b"\0"


def documents() -> list[bytes]:
    """The sections of Python's language reference."""
    text = bytes(read_corpus().train.tolist())
    return [part for part in text.split(SEPARATOR.encode()) if part]


def train(folder: str, steps: int, save_at: int, resume: bool) -> tuple[list[float], list[Tensor]]:
    """What every rank runs: the losses, and the rows that this rank has seen."""
    tx = optim.adamw(3e-3)
    step = zf.shard(zf.train_step(lambda params, rows: gpt.loss(params, rows, CONFIG), tx), stage=3)
    state = step.place(zf.TrainState.create(gpt.init(CONFIG, zf.random.key(0)), tx))
    loader = StatefulDataLoader(Packed(documents(), BATCH, LENGTH), batch_size=None)
    if resume:
        state = zf.restore(folder, like=state)
        loader.load_state_dict(zf.extra(folder, step=int(state.step))[0])  # on all ranks the same
    losses, seen = [], []
    batches = iter(loader)
    while int(state.step) < steps:
        rows = next(batches)
        state, metrics = step(state, rows)
        losses.append(float(metrics["loss"]))
        seen.append(rows)
        if int(state.step) == save_at and not resume:
            zf.save(folder, state, extra=loader.state_dict())
    return losses, seen


def on_ranks(ranks: int, *args: Any) -> tuple[list[float], Tensor]:
    """The losses, and the rows of all ranks, batch by batch."""
    found = zf.simulate(ranks)(train)(*args)
    parts = [rows for _, rows in found]
    return found[0][0], torch.stack([torch.cat(rows) for rows in zip(*parts, strict=True)])


def main(ranks: int, steps: int, save_at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses, rows = on_ranks(ranks, folder, steps, save_at, False)
        print(f"{ranks} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        (state, *_) = zf.extra(folder)
        where = state["dataset_state"]
        print(f"saved after {where['samples']} samples, in document {where['document']}")
        for others in (ranks, 1, 3):
            again, after = on_ranks(others, folder, steps, save_at, True)
            apart = max(abs(a - b) for a, b in zip(again, losses[save_at:], strict=True))
            same = torch.equal(after, rows[save_at:])
            print(f"resumed on {others}: the same samples {same}, losses apart by {apart:.1e}")


if __name__ == "__main__":
    # torchdata 0.11 calls a function that torch deprecates.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (%(default)s)")
    parser.add_argument("--save-at", type=int, default=5, help="when it saves (%(default)s)")
    flags = parser.parse_args()
    main(flags.ranks, flags.steps, flags.save_at)
