"""State on disk under faults: killed processes, damaged files, full and forbidden devices."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import re
import signal
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests import warm
from tests.laws.cases import ADAMW, assert_same, regression, train
from tests.laws.models import CASES
from zfunc import optim, tree
from zfunc.ranks.world import World, entered
from zfunc.transforms.offloading.blocks import Files
from zfunc.transforms.offloading.disk_state import DiskState
from zfunc.transforms.offloading.disk_trees import trees_on_disk

F64 = torch.float64
STACK = CASES["stack"]
TX = optim.chain(optim.clip_by_global_norm(0.5), ADAMW)


def make(path: Path, **how: Any) -> Any:
    step = zf.offload(STACK.step(TX), to="disk", path=path, **how)
    return zf.shard(step, stage=3, unit_bytes=600)


def begun(path: Path, steps: int = 0) -> tuple[Any, Any]:
    step = make(path)
    state = step.place(STACK.state(TX, F64))
    return step, train(step, state, STACK, steps)[1] if steps else state


def expected(steps: int) -> Any:
    """The state after so many steps in memory."""
    step = zf.shard(STACK.step(TX), stage=3, unit_bytes=600)
    return step.unplace(train(step, step.place(STACK.state(TX, F64)), STACK, steps)[1])


def unit_files(path: Path) -> list[Path]:
    return sorted(path.glob("rank-*/place-*/*.bin"))


# Killed


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs behind it."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[list[int]]:
    """Every write, sync and rename behind the first ``after`` does not happen."""
    calls = [0]

    def limited(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kw: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise Killed
            return real(*args, **kw)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Files, "write", limited(Files.write))
        patch.setattr(Files, "sync", limited(Files.sync))
        patch.setattr(os, "replace", limited(os.replace))
        yield calls


def test_a_process_killed_at_any_write_leaves_one_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short behind every single write, sync and rename of the third step."""
    states = [expected(2), expected(3)]
    after, whole = 0, False
    seen = set()
    while not whole:
        path = tmp_path / str(after)
        with entered(World()):
            step, state = begun(path, 2)
            with dying(monkeypatch, after) as calls:
                try:
                    step(state, zf.local_batch(STACK.batch(2, F64)))
                    whole = True
                except Killed:
                    assert calls[0] > after
            step.close()
        del step, state
        with entered(World()):
            again = make(path)
            found = zf.recover(again, STACK.state(TX, F64))
            full = again.unplace(found)
            seen.add(int(full.step))
            assert_same(full, states[int(full.step) - 2], f"killed behind write {after}")
            new, _ = again(found, zf.local_batch(STACK.batch(int(full.step), F64)))
            assert_same(again.unplace(new), expected(int(full.step) + 1))
            again.close()
        after += 7  # prime to the number of writes of a unit
    assert seen == {2, 3}


CHILD = """
    import sys, torch
    torch.set_num_threads(1)
    from pathlib import Path
    import zfunc as zf
    from tests.faults.test_disk_faults import F64, STACK, begun
    step, state = begun(Path(sys.argv[1]))
    for i in range(10_000):
        state, _ = step(state, zf.local_batch(STACK.batch(i % 8, F64)))
        print(i + 1, flush=True)
"""


def test_sigkill(tmp_path: Path) -> None:
    """Whatever the last step was that the killed process told of, it or the next one is there."""
    draw = random.Random(0)
    reference = zf.shard(STACK.step(TX), stage=3, unit_bytes=600)
    known = reference.place(STACK.state(TX, F64))
    history = [reference.unplace(known)]
    for trial in range(3):
        path = tmp_path / str(trial)
        child = warm.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(path)], stdout=warm.PIPE
        )
        assert child.stdout is not None
        told = int(child.stdout.readline())
        time.sleep(draw.uniform(0.0, 0.3))
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.stdout.close()
        child.wait()
        told = int(rest[-1]) if rest else told
        step = make(path)
        state = zf.recover(step, STACK.state(TX, F64))
        at = int(state.step)
        assert told <= at <= told + 1
        while len(history) <= at:
            batch = STACK.batch((len(history) - 1) % 8, F64)
            known, _ = reference(known, zf.local_batch(batch))
            history.append(reference.unplace(known))
        assert_same(step.unplace(state), history[at], f"after {at} steps")
        step.close()


def test_ranks_killed_a_step_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has committed the step, the other has not: both open the one before."""
    real = DiskState.commit

    def commit(self: Any, slots: Any, plain: Any) -> int:
        if zf.rank() == 1 and int(plain["step"]) == 3:
            raise Killed
        return real(self, slots, plain)

    def body() -> None:
        step, state = begun(tmp_path, 2)
        with suppress(Killed):
            step(state, zf.local_batch(STACK.batch(2, F64)))
        step.close()

    with monkeypatch.context() as patched:
        patched.setattr(DiskState, "commit", commit)
        zf.simulate(2)(body)()

    def again() -> Any:
        step = make(tmp_path)
        return step.unplace(zf.recover(step, STACK.state(TX, F64)))

    def reference() -> Any:
        step = zf.shard(STACK.step(TX), stage=3, unit_bytes=600)
        return step.unplace(train(step, step.place(STACK.state(TX, F64)), STACK, 2)[1])

    for found, wanted in zip(zf.simulate(2)(again)(), zf.simulate(2)(reference)(), strict=True):
        assert_same(found, wanted)


def test_recovery_says_what_is_wrong(tmp_path: Path) -> None:
    step = make(tmp_path)
    with pytest.raises(zf.CheckpointError, match="holds no state"):
        zf.recover(step, STACK.state(TX, F64))
    step.close()
    begun(tmp_path, 1)[0].close()
    other = STACK.state(optim.lion(0.1), F64)
    with pytest.raises(zf.CheckpointError, match=r"opt_state"):
        zf.recover(make(tmp_path), other)
    index = next(tmp_path.glob("rank-00000/place-*/index.json"))
    index.write_bytes(index.read_bytes().replace(b"slots", b"slotz"))
    with pytest.raises(zf.CheckpointError, match=r"index.json is damaged"):
        zf.recover(make(tmp_path), STACK.state(TX, F64))
    with pytest.raises(zf.CheckpointError, match="keeps nothing on disk"):
        zf.recover(zf.shard(STACK.step(TX)), STACK.state(TX, F64))


# Damaged


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_found(seed: int, tmp_path: Path) -> None:
    """In any file of a unit, wherever data of the state lie; the error names unit and file."""
    draw = random.Random(seed)
    step, state = begun(tmp_path, 1)
    node = draw.choice([state.params, state.opt_state[1].mu, state.opt_state[1].nu])
    unit = draw.randrange(len(node.layout.units))
    region = node.storage.regions[node.slot][unit]
    file = tmp_path / "rank-00000" / region.name
    at = region.offset + draw.randrange(region.nbytes)
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    with pytest.raises(zf.CheckpointError) as caught:
        step(state, zf.local_batch(STACK.batch(1, F64)))
    text = str(caught.value)
    assert file.name in text and node.layout.units[unit].name in text and "checksum" in text
    assert node.layout.by_flat[node.layout.units[unit].flats[0]][0].path in text
    step.close()


@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_a_lost_file_is_named(fault: str, tmp_path: Path) -> None:
    step, state = begun(tmp_path, 1)
    file = unit_files(tmp_path)[1]
    if fault == "truncated":
        os.truncate(file, 100)
    else:
        file.unlink()
    with pytest.raises(zf.CheckpointError, match=re.escape(file.name)) as caught:
        step.unplace(state)
    assert fault[:5] in str(caught.value) or "cannot be read" in str(caught.value)
    step.close()


# Full, forbidden, shared


def test_a_device_that_is_too_small_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            zf.PlacementError, match=r"full \(\d+ bytes wanted, \d+ free\)"
        ) as error:
            make(tmp_path).place(STACK.state(TX, F64))
        assert str(tmp_path) in str(error.value)
    begun(tmp_path)[0].close()  # nothing is left that is in the way


def test_a_device_that_fills_up_during_a_step(tmp_path: Path) -> None:
    """A real refusal by the kernel (RLIMIT_FSIZE); the state from before is whole."""
    code = """
        import resource, signal, sys, torch
        from pathlib import Path
        import zfunc as zf
        from tests.faults.test_disk_faults import F64, STACK, begun, expected
        from tests.laws.cases import assert_same
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        step, state = begun(Path(sys.argv[1]), 2)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            step(state, zf.local_batch(STACK.batch(2, F64)))
            raise SystemExit("no error")
        except zf.PlacementError as error:
            assert "full" in str(error) and "as it was" in str(error), error
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert_same(step.unplace(state), expected(2))
        new, _ = step(state, zf.local_batch(STACK.batch(2, F64)))
        assert_same(step.unplace(new), expected(3))
    """
    warm.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True)


def test_steps_that_fail_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither their gradients' files and memory, nor an error that the next step would meet."""
    step, state = begun(tmp_path, 1)
    store = weakref.ref(next(iter(trees_on_disk(state).values())).storage.disk)
    batch, real = zf.local_batch(STACK.batch(1, F64)), os.pwritev

    def failing(after: int) -> Callable[..., int]:
        calls = itertools.count()

        def call(*args: Any) -> int:
            if next(calls) < after:
                return real(*args)
            raise OSError(errno.ENOSPC, "No space left on device")

        return call

    for after in (0, 3, 9, 20) * 3:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing(after))
            with pytest.raises(zf.PlacementError, match="the device is full"):
                step(state, batch)
        gc.collect()
    assert_same(step.unplace(step(state, batch)[0]), expected(2))
    assert len(list(tmp_path.glob("rank-*/spill-*"))) == 1
    step.close()
    del step, state
    gc.collect()
    assert store() is None


def test_a_path_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kw: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", forbidden)  # root may write anywhere
        with pytest.raises(zf.PlacementError, match="may not write"):
            make(tmp_path / "x").place(STACK.state(TX, F64))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(zf.PlacementError, match=r"cannot make .*file"):
        make(file).place(STACK.state(TX, F64))


def test_one_path_belongs_to_one_step(tmp_path: Path) -> None:
    step, state = begun(tmp_path)
    other = zf.offload(STACK.step(TX), to="disk", path=tmp_path)
    with pytest.raises(zf.PlacementError, match="in use by another step of this process"):
        other.place(STACK.state(TX, F64))
    code = """
        import sys
        from pathlib import Path
        import zfunc as zf
        from tests.faults.test_disk_faults import begun
        try:
            begun(Path(sys.argv[1]))
        except zf.PlacementError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    said = warm.run(command, check=True, capture_output=True, text=True).stdout
    assert f"in use by process {os.getpid()} on " in said
    train(step, state, STACK, 1)
    step.close()
    other.place(STACK.state(TX, F64))
    other.close()


def test_a_rank_that_cannot_keep_its_part_fails_all(tmp_path: Path) -> None:
    """They are told, instead of waiting for it."""
    (tmp_path / "rank-00001").write_text("in the way")

    def body() -> str:
        with pytest.raises(zf.PlacementError) as caught:
            make(tmp_path).place(STACK.state(TX, F64))
        return str(caught.value)

    mine, other = zf.simulate(2)(body)()
    assert "rank 1 cannot keep its part" in mine and "rank-00001" in other


# Old states


def test_a_state_that_was_overwritten_says_so(tmp_path: Path) -> None:
    step, first = begun(tmp_path)
    batches = [zf.local_batch(regression(i, F64)) for i in range(3)]
    second, _ = step(first, batches[0])
    assert_same(step.unplace(first), STACK.state(TX, F64))  # still whole
    third, _ = step(second, batches[1])
    uses: list[Callable[[], Any]] = [
        lambda: step(first, batches[0]),
        lambda: step.unplace(first),
        lambda: zf.full(first.params),
        lambda: tree.map(lambda x: x * 2, first.params),
        lambda: tree.global_norm(first.params),
        lambda: zf.evaluate(lambda p: p["head"]["b"] + 1)(first.params),
    ]
    for use in uses:
        with pytest.raises(zf.DonatedStateError, match=r"params of this state was on disk"):
            use()
    again, _ = step(second, batches[1])  # the same step once more takes the place of `third`
    with pytest.raises(zf.DonatedStateError):
        step.unplace(third)
    assert json.dumps(int(again.step)) == "2"
    step.close()


def test_files_of_states_that_are_gone_are_reclaimed(tmp_path: Path) -> None:
    step, state = begun(tmp_path, 1)
    kept = step.place(STACK.state(TX, F64))
    assert len(list(tmp_path.glob("rank-00000/place-*"))) == 2
    assert_same(step.unplace(kept), STACK.state(TX, F64))
    assert_same(step.unplace(state), expected(1))  # two placed states do not meet
    del state, kept
    gc.collect()
    step.place(STACK.state(TX, F64))
    assert len(list(tmp_path.glob("rank-00000/place-*"))) == 1
    step.close()


# Worlds that come and go


class Slow:
    """Garbage of which it takes long to be rid; the lock of the interpreter is free meanwhile."""

    def __init__(self) -> None:
        self.knot = self

    def __del__(self) -> None:
        time.sleep(0.02)


def twice(path: Path, shared: bool, ranks: int = 3) -> None:
    """One path in two simulated worlds, one after the other, with one step object or two."""
    step = make(path)
    start = STACK.state(TX, F64)
    reached = []
    for _ in range(2):

        def body() -> Any:
            mine = step if shared else make(path)
            return mine.unplace(train(mine, mine.place(start), STACK, 2)[1])

        reached.append(zf.simulate(ranks)(body)()[0])
    assert_same(*reached)


@pytest.mark.parametrize("shared", [True, False])
def test_one_path_serves_simulated_worlds_one_after_the_other(shared: bool, tmp_path: Path) -> None:
    """While another thread collects most of the time, when a collection of one's own is none."""
    over = threading.Event()

    def litter() -> None:
        while not over.wait(0.005):
            Slow()
            gc.collect(0)

    other = threading.Thread(target=litter)
    other.start()
    try:
        for k in range(3):
            twice(tmp_path / str(k), shared)
    finally:
        over.set()
        other.join()


def test_a_state_of_a_world_that_has_ended_stays_whole(tmp_path: Path) -> None:
    step = make(tmp_path)
    start = STACK.state(TX, F64)
    placed = zf.simulate(2)(lambda: train(step, step.place(start), STACK, 1)[1])()
    again = zf.simulate(2)(lambda: step.unplace(train(step, step.place(start), STACK, 2)[1]))()

    def go_on() -> Any:
        return step.unplace(step(placed[zf.rank()], zf.local_batch(STACK.batch(1, F64)))[0])

    assert_same(zf.simulate(2)(go_on)()[0], again[0])


def test_a_world_that_failed_does_not_keep_its_path(tmp_path: Path) -> None:
    step = make(tmp_path)
    start = STACK.state(TX, F64)

    def failing() -> None:
        state = step.place(start)
        if zf.rank() == 1:
            raise ZeroDivisionError("on purpose")
        step(state, zf.local_batch(STACK.batch(0, F64)))

    with pytest.raises(ZeroDivisionError) as kept:  # and with its frames the states
        zf.simulate(2)(failing)()
    zf.simulate(2)(lambda: train(step, step.place(start), STACK, 1))()
    assert kept.value.__traceback__ is not None


def test_two_worlds_at_once_do_not_share_a_path(tmp_path: Path) -> None:
    step = make(tmp_path)
    start = STACK.state(TX, F64)
    meet = threading.Barrier(2)
    told: list[str] = []

    def world(first: bool) -> None:
        def body() -> None:
            if not first:
                meet.wait()
            try:
                state = step.place(start)
            except zf.PlacementError as error:
                told.append(str(error))
            else:
                if first:
                    meet.wait()
                    meet.wait()
                    step(state, zf.local_batch(STACK.batch(0, F64)))
            if not first:
                meet.wait()

        zf.simulate(1)(body)()

    threads = [threading.Thread(target=world, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(told) == 1 and "in use by another step of this process" in told[0]
