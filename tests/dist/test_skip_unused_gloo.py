"""``train_step(skip_unused=True)`` on two real gloo ranks: the judge of the laws is theirs, too."""

from __future__ import annotations

import zfunc as zf
from tests.laws.test_skip_unused import compare, run_of


def on_real_ranks() -> None:
    compare(run_of("clipped", 3, [zf.transforms.donate()]), "clipped")


def test_real_ranks() -> None:
    zf.launch(on_real_ranks, nprocs=2, timeout=120)
