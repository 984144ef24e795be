"""A rank parts from a large group: those who are not its neighbours hear why, too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from zfunc.errors import DesyncError
from zfunc.ranks import adjacency
from zfunc.ranks.axes import group
from zfunc.ranks.launching import launch


def test_everybody_hears_who_parted(tmp_path: Path) -> None:
    def body() -> None:
        adjacency.DIRECT = 2  # four ranks are many, then
        ranks = group(None, "data")
        assert sum(ranks.exchange(ranks.rank)) == 6
        label = "layers.1" if ranks.rank == 1 else "layers.0"
        try:
            ranks.reduce_scatter(torch.ones(90), label=label).wait()
            ranks.barrier()
        except DesyncError as error:
            (tmp_path / str(ranks.rank)).write_text(str(error))
            # Rank 3 is told by the end of others, after which `launch` waits 3 s for it.
            deadline = time.monotonic() + 40
            while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            raise

    with pytest.raises(DesyncError):
        launch(body, nprocs=4, timeout=60)
    for rank in range(4):
        message = (tmp_path / str(rank)).read_text()
        assert "layers.1" in message and "layers.0" in message, (rank, message)
