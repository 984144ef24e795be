"""Collectives are remembered by name for as long as they matter, and not for ever."""

from __future__ import annotations

import threading

import torch

import zfunc as zf
from zfunc.ranks import transport
from zfunc.ranks.axes import group


def test_new_labels_and_sizes_do_not_pile_up() -> None:
    def body() -> None:
        ranks = group(None, "data")
        for k in range(2 * transport.REMEMBERED):
            transport.announced("all_gather", f"rows {k}", (torch.float32, (0, k, 2 * k)))
        for k in range(300):  # uneven batches: a size of its own each
            ranks.all_reduce(torch.ones(k + 1), label="loss").wait()

    zf.simulate(2)(body)()
    assert len(transport._SEEN) <= transport.REMEMBERED
    newest = transport.announced("all_gather", f"rows {2 * transport.REMEMBERED - 1}", ())
    assert "rows" in transport.told(newest)


def test_a_long_list_of_cuts_is_remembered_in_short() -> None:
    digest = transport.announced("all_gather", "unit", (torch.float32, tuple(range(10**5))))
    assert len(transport.told(digest)) < 2 * transport.TOLD and "'unit'" in transport.told(digest)


def come(label: str, meet: threading.Barrier, found: list[int]) -> None:
    meet.wait()
    found.append(transport.announced("barrier", label, ()))


def test_threads_that_come_at_once_see_the_same() -> None:
    for k in range(200):
        meet = threading.Barrier(4)
        found: list[int] = []
        threads = [
            threading.Thread(target=come, args=(f"at once {k}", meet, found)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1 and f"at once {k}" in transport.told(found[0])
