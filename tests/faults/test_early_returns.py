"""A rank that returns while others go on: they are told at once, whatever they wait in."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

import zfunc as zf
from tests.faults.test_desync import start_ranks
from tests.laws.cases import regression
from tests.laws.covering import pairs
from tests.laws.models import stack, stack_loss
from zfunc import optim
from zfunc.errors import DesyncError
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.gloo import Place, PointToPoint
from zfunc.ranks.world import World

TX = optim.sgd(0.1)
LONG = 300.0  # seconds; nothing here may wait for them
SIZE = 3


@pytest.fixture(scope="module", autouse=True)
def _connections_end() -> Iterator[None]:
    """Errors hold their ranks in cycles, whose threads would wake through all tests that follow."""
    yield
    with warnings.catch_warnings(action="ignore"):  # what earlier tests left is not asked for here
        gc.collect()


def everyone() -> Group:
    return group(None, "data")


def before_anything(ranks: Group) -> None:
    """Nobody has called anybody."""


def after_a_barrier(ranks: Group) -> None:
    ranks.barrier()


def after_data(ranks: Group) -> None:
    ranks.all_reduce(torch.ones(70_000)).wait()


def after_a_broadcast(ranks: Group) -> None:
    """Ranks 1 and 2 have sent each other no data yet."""
    ranks.broadcast(torch.ones(70_000), 0).wait()


def after_what_it_never_waited_for(ranks: Group) -> None:
    """Two rounds, of which the second is in ``wait``: the others get theirs all the same."""
    handle = ranks.all_reduce(torch.ones(70_000), label="first")
    if ranks.rank != 1:
        assert handle.wait()[0] == ranks.size


def gather(ranks: Group) -> None:
    ranks.all_gather(torch.ones(60_000), torch.ones(20_000), label="late").wait()


def reduce(ranks: Group) -> None:
    ranks.all_reduce(torch.ones(3), label="late").wait()


def broadcast(ranks: Group) -> None:
    ranks.broadcast(torch.ones(3), 1, label="late").wait()


def exchange(ranks: Group) -> None:
    ranks.exchange({"rank": ranks.rank}, label="late")


def barrier(ranks: Group) -> None:
    ranks.barrier(label="late")


BEFORE = [
    before_anything,
    after_a_barrier,
    after_data,
    after_a_broadcast,
    after_what_it_never_waited_for,
]
IN = [gather, reduce, broadcast, exchange, barrier]


@pytest.mark.parametrize(("before", "then", "slow"), pairs(BEFORE, IN, (False, True)))
def test_a_rank_that_returns_early_is_noticed_in_whatever_the_others_wait(
    before: Callable[[Group], None], then: Callable[[Group], None], slow: bool
) -> None:
    """Real connections between threads; the last rank to return lets go of them."""
    store, gone, told = HashStore(), dict[int, str](), list[str]()
    over = threading.Barrier(SIZE)

    def rank(r: int) -> None:
        place = Place(r, tuple(range(SIZE)), PrefixStore("g", store), lambda k: gone.get(k, ""))
        world = World(r, SIZE, LONG)
        ranks = ConnectedGroup("data", world, (), lambda: PointToPoint(place, LONG))
        before(ranks)
        time.sleep(0.2 if slow == (r == 1) else 0.0)  # the others wait already, or come later
        if r == 1:
            ranks.finish()
            gone[r] = "has returned"
            ranks.hang_up()
        else:
            with pytest.raises(DesyncError, match="'late'") as caught:
                then(ranks)
            told.append(str(caught.value))
        over.wait()

    start = time.monotonic()
    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(rank, range(SIZE)))
    assert time.monotonic() - start < LONG / 4
    assert len(told) == SIZE - 1
    for text in told:  # or of one who was told first
        assert re.search(
            r"rank 1 has returned and will not take part|rank \d is gone|it stopped", text
        )
    assert any("rank 1 has returned" in text for text in told)


@pytest.mark.parametrize("then", IN)
def test_a_rank_that_fails_and_returns_is_known_for_its_failure(
    then: Callable[[Group], None],
) -> None:
    """As one does that catches the error, and comes to an end."""
    store, gone = HashStore(), dict[int, str]()
    left, over = threading.Barrier(SIZE), threading.Barrier(SIZE)

    def rank(r: int) -> str:
        place = Place(r, tuple(range(SIZE)), PrefixStore("g", store), lambda k: gone.get(k, ""))
        world = World(r, SIZE, LONG)
        ranks = ConnectedGroup("data", world, (), lambda: PointToPoint(place, LONG))
        ranks.barrier()
        if r == 1:
            ranks.fail(DesyncError("layer 3: too large"))
            gone[r] = "has returned"
            ranks.hang_up()
        left.wait(LONG)
        text, _ = ("", 0) if r == 1 else told(lambda: then(ranks))
        over.wait(LONG)
        return text

    with ThreadPoolExecutor(SIZE) as pool:
        first, _, other = pool.map(rank, range(SIZE))
    for text in (first, other):
        assert "layer 3: too large" in text and "has returned" not in text, text


def told(body: Callable[[], Any]) -> tuple[str, float]:
    """What this rank is told, and after how many seconds: loaded machines are slow to start it."""
    start = time.monotonic()
    try:
        body()
    except DesyncError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


def leaves_at_once() -> None:
    """Rank 1 has not even made a group."""
    if zf.rank() == 0:
        zf.psum(torch.ones(3))


def trains_less() -> None:
    """A loop whose end depends on the rank, as where data are cut unevenly."""
    step = zf.shard(zf.train_step(stack_loss, TX), stage=3, unit_bytes=1)
    state = step.place(zf.TrainState.create(stack(torch.float64), TX))
    for i in range(3 - zf.rank()):
        state, _ = step(state, zf.local_batch(regression(i, torch.float64)))


@pytest.mark.parametrize("body", [leaves_at_once, trains_less])
def test_a_launched_rank_that_returns_early_is_noticed(body: Callable[[], None]) -> None:
    (text, seconds), other = zf.launch(told, body, nprocs=2, timeout=LONG)
    assert "rank 1 has returned and will not take part" in text and other[0] == "nothing"
    assert seconds < LONG / 2


def test_launch_raises_what_the_others_are_told() -> None:
    with pytest.raises(DesyncError, match=r"psum.*rank 1 has returned"):
        zf.launch(leaves_at_once, nprocs=2, timeout=LONG)


def leaves_early_but_alone() -> list[float]:
    """Rank 2 goes while the others talk in a group of which it is no member."""
    grid = zf.mesh(data=2, tensor=2)
    everyone().barrier()
    if zf.rank() in (2, 3):
        return []
    time.sleep(0.5)
    return [float(group(grid, "tensor").all_reduce(torch.ones(1)).wait()) for _ in range(3)]


def test_who_is_not_needed_may_go() -> None:
    assert zf.launch(leaves_early_but_alone, nprocs=4) == [[2.0] * 3] * 2 + [[]] * 2


def test_a_process_of_torchrun_that_ends_early_is_noticed() -> None:
    """Rank 1 has ended when rank 0 first asks for it; rank 0 serves the store."""
    ranks = start_ranks("sys.exit(0)", LONG)
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        _, complaint = ranks[0].communicate(timeout=LONG / 2)
        assert "rank 1 has ended and will not take part" in complaint, complaint
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def exiting(code: int | None, who: tuple[int, ...] = (1,)) -> None:
    """Some ranks leave by ``sys.exit`` before the third sum."""
    for i in range(4):
        if i == 2 and zf.rank() in who:
            sys.exit(code)
        zf.psum(torch.ones(1))


@pytest.mark.parametrize("code", [None, 0, 3])
def test_sys_exit_on_one_rank_is_an_early_return(code: int | None) -> None:
    with pytest.raises(DesyncError, match=r"rank 1 has called sys\.exit"):
        zf.simulate(2, timeout=30)(lambda: exiting(code))()


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_on_one_launched_rank_does_not_end_the_program(code: int) -> None:
    with pytest.raises(DesyncError, match=r"rank 1 has called sys\.exit"):
        zf.launch(exiting, code, nprocs=2)


def test_sys_exit_on_all_ranks_is_a_return() -> None:
    assert zf.simulate(2)(lambda: exiting(0, (0, 1)))() == [None, None]
    assert zf.launch(exiting, 0, (0, 1), nprocs=2) == [None, None]
