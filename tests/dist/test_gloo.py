"""Real ranks over gloo: the results of simulated ones, and as many bytes as the kernel counts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zfunc as zf
import zfunc.ranks.world
from tests.dist.counters import kernel_bytes_sent
from zfunc.errors import DesyncError
from zfunc.ranks import control_channel, launching
from zfunc.ranks.axes import group
from zfunc.ranks.collectives import pmean, psum
from zfunc.ranks.comm import even_cuts, ledger
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.launching import init, launch
from zfunc.ranks.simulation import simulate

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
]
SIZES = [0, 1, 5, 4096, 50_001, 150_001]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order of addition, where the dtype rounds."""
    x = torch.sin(torch.arange(numel, dtype=torch.float64) * (rank + 1)) * 3.0**rank
    return x.to(dtype) if dtype.is_floating_point else (x.abs() * 2).to(dtype)


def collectives() -> tuple[list[Any], dict[str, int], int]:
    """Every collective on every dtype and many sizes, most of them under way at once."""
    ranks = group(None, "data")
    rank, size = ranks.rank, ranks.size
    results: list[Any] = []
    with ledger() as led:
        for dtype in DTYPES:
            handles: list[Any] = []
            for numel in SIZES:
                x = values(rank, numel, dtype)
                cuts = even_cuts(numel, size)
                lopsided = (0,) + (numel,) * size
                full = torch.zeros_like(x)
                shard = values(0, numel, dtype)[cuts[rank] : cuts[rank + 1]]
                handles += [
                    ranks.all_gather(full, shard, label=f"gather {numel}"),
                    ranks.reduce_scatter(x, label=f"even {numel}"),
                    ranks.reduce_scatter(x, cuts=lopsided, label=f"lopsided {numel}"),
                    ranks.all_reduce(x.clone(), label=f"sum {numel}"),
                    ranks.all_to_all([x + peer for peer in range(size)], label="transpose"),
                    ranks.broadcast(x.clone(), size - 1, label="broadcast"),
                ]
            if rank % 2:
                [handle.wait() for handle in reversed(handles)]
            results.append([handle.wait() for handle in handles])
        results.append(ranks.exchange({"rank": rank, "text": "x" * rank}))
        ranks.barrier()
    return results, dict(led.by_kind), led.calls


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(("n", "shared"), [(2, "1"), (3, "1"), (3, "0")])
def test_real_ranks_do_what_simulated_ones_do_bit_for_bit(
    n: int, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    for real, simulated in zip(
        launch(collectives, nprocs=n, timeout=60), simulate(n)(collectives)(), strict=True
    ):
        assert same(real, simulated)


def collectives_of(hosts: tuple[str, ...]) -> tuple[list[Any], dict[str, int], int]:
    """The same between ranks that are on these hosts: what is small goes another way."""
    control_channel._host = lambda: hosts[zfunc.ranks.world.rank()]
    return collectives()


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "b", "a")])
def test_ranks_of_several_hosts_do_the_same(hosts: tuple[str, ...]) -> None:
    n = len(hosts)
    found = launch(collectives_of, hosts, nprocs=n, timeout=60)
    for real, simulated in zip(found, simulate(n)(collectives)(), strict=True):
        assert same(real, simulated)


def under_way() -> float:
    """Much is issued before the other rank comes, which waits for what zfunc does not know."""
    ranks = group(None, "data")
    ranks.all_gather(torch.zeros(2**17), torch.zeros(2**16)).wait()  # the first one connects
    if ranks.rank == 1:
        dist.barrier()
    fulls = [torch.zeros(2**17) for _ in range(200)]
    half = torch.full((2**16,), float(ranks.rank))
    handles = [ranks.all_gather(full, half) for full in fulls]
    if ranks.rank == 0:
        dist.barrier()
    return float(sum(handle.wait().sum() for handle in handles))


@pytest.mark.parametrize("shared", ["1", "0"])
def test_what_is_under_way_waits_for_nobody_to_read_it(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    assert launch(under_way, nprocs=2, timeout=60) == [200.0 * 2**16] * 2


def traffic() -> dict[str, tuple[int, int]]:
    ranks = group(None, "data")
    full, shard = torch.ones(6_000_000), torch.ones(6_000_000 // ranks.size)
    calls = {
        "all_gather": lambda: ranks.all_gather(full, shard).wait(),
        "reduce_scatter": lambda: ranks.reduce_scatter(full).wait(),
        "all_reduce": lambda: ranks.all_reduce(full).wait(),
        "all_reduce of much": lambda: ranks.all_reduce(torch.ones(12_000_000)).wait(),
        "all_to_all": lambda: ranks.all_to_all([shard] * ranks.size).wait(),
        "broadcast": lambda: ranks.broadcast(full, 0).wait(),
    }
    counted = {}
    for name, call in calls.items():
        ranks.barrier()
        before = kernel_bytes_sent()
        with ledger() as led:
            call()
        counted[name] = led.total_bytes, kernel_bytes_sent() - before
        ranks.barrier()
    return counted


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP counters")
@pytest.mark.parametrize("n", [2, 3])
def test_the_ledger_agrees_with_the_kernel(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", "0")  # through which no socket is needed
    for rank, counted in enumerate(launch(traffic, nprocs=n)):
        for name, (ours, kernels) in counted.items():
            if name == "broadcast" and rank > 0:
                assert ours == 16 * (n - 1) and kernels < 10_000
            else:
                assert ours > 10_000_000, name
                assert kernels == pytest.approx(ours, rel=0.03), name


def memory() -> None:
    ranks = group(None, "data")
    full = torch.ones(1_000_000)
    handle = ranks.reduce_scatter(full)
    own = handle.wait()
    assert own.untyped_storage().nbytes() == own.nbytes == full.nbytes // ranks.size
    assert sys.getrefcount(full) == 2, "a finished reduction still holds its input"
    gathered = torch.zeros(10)
    start, end = even_cuts(10, ranks.size)[ranks.rank : ranks.rank + 2]
    shard = gathered[start:end].fill_(ranks.rank)  # in place already
    ranks.all_gather(gathered, shard).wait()
    assert gathered.sum() == sum(r * s for r, s in enumerate([5, 5]))


def axes() -> tuple[list[float], bool]:
    grid = zf.mesh(data=2, tensor=2)
    rank = float(zfunc.ranks.world.rank())
    sums = []
    for axis in ("data", "tensor", "pipe", ("data", "pipe"), ("data", "tensor")):
        sums.append(group(grid, axis).all_reduce(torch.tensor(rank)).wait().item())
    joined = zfunc.ranks.world.current()
    device_mesh = joined.device_mesh(grid.axes)  # type: ignore[attr-defined]
    shared = dist.get_process_group_ranks(device_mesh["tensor"].get_group())
    return sums, tuple(shared) == grid.members("tensor", joined.rank) and joined is init()


def test_groups_are_those_of_a_device_mesh() -> None:
    for rank, (sums, shared) in enumerate(launch(axes, nprocs=4)):
        data, tensor = divmod(rank, 2)
        over_data = float(tensor + (2 + tensor))
        assert sums == [over_data, float(4 * data + 1), float(rank), over_data, 6.0]
        assert shared


def native() -> list[Any]:
    """What runs on GPUs, on CPU tensors: torch's own collectives beside the headers."""
    from zfunc.ranks.distributed import DistributedWorld
    from zfunc.ranks.nccl import Native

    class NativeOnHost(Native):
        def _hosts(self, data: torch.Tensor) -> bool:
            return False

    joined = zfunc.ranks.world.current()
    assert isinstance(joined, DistributedWorld)
    members = tuple(range(joined.size))
    cpu = joined.transport(members)
    everyone: Any = dist.group.WORLD
    native = NativeOnHost(everyone, cpu, reductions=lambda: everyone, late=lambda: False)
    joined.memo["group", members] = ConnectedGroup("data", joined, members, lambda: native)
    ranks, results = group(None, "data"), []
    for numel in (0, 6, 601):
        x = (torch.arange(numel) * (ranks.rank + 1)).double()
        lopsided = (0,) + (numel,) * ranks.size
        start, end = even_cuts(numel, ranks.size)[ranks.rank : ranks.rank + 2]
        handles: list[Any] = [
            ranks.all_gather(torch.zeros_like(x), x[start:end]),
            ranks.reduce_scatter(x),
            ranks.reduce_scatter(x, cuts=lopsided),
            ranks.reduce_scatter(x, out=torch.empty(end - start).double()),
            ranks.all_reduce(x.clone()),
            ranks.all_to_all([x + peer for peer in range(ranks.size)]),
            ranks.broadcast(x.clone(), 1),
        ]
        results.append([handle.wait() for handle in handles])
    wrong = ranks.all_reduce(torch.ones(3), label=f"of rank {ranks.rank}")
    with pytest.raises(DesyncError, match=f"'of rank {1 - ranks.rank}'"):
        wrong.wait()
    return results


def test_native_collectives_keep_the_contract() -> None:
    def expected() -> list[Any]:
        ranks, results = group(None, "data"), []
        for numel in (0, 6, 601):
            x = (torch.arange(numel) * (ranks.rank + 1)).double()
            start, end = even_cuts(numel, 2)[ranks.rank : ranks.rank + 2]
            own = ranks.reduce_scatter(x).wait()
            results.append(
                [
                    ranks.all_gather(torch.zeros_like(x), x[start:end]).wait(),
                    own,
                    ranks.reduce_scatter(x, cuts=(0, numel, numel)).wait(),
                    own,
                    ranks.all_reduce(x.clone()).wait(),
                    ranks.all_to_all([x, x + 1]).wait(),
                    ranks.broadcast(x.clone(), 1).wait(),
                ]
            )
        return results

    assert same(launch(native, nprocs=2), simulate(2)(expected)())


def test_buffers_are_neither_copied_nor_kept_and_gradients_flow() -> None:
    def body() -> list[float]:
        if zfunc.ranks.world.world_size() == 2:
            memory()
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        weight = zfunc.ranks.world.rank() + 1.0
        return torch.autograd.grad((psum(x) + pmean(x)).sum() * weight, x)[0].tolist()

    assert launch(body, nprocs=2) == simulate(2)(body)() == [[4.5, 4.5]] * 2


@pytest.mark.usefixtures("cold")
def test_launch_takes_what_a_notebook_has_and_shares_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    offset = 10  # a closure
    results = launch(
        lambda x: (x + offset + zfunc.ranks.world.rank(), torch.get_num_threads()), 1, nprocs=2
    )
    assert results == [(11, share), (12, share)]
    with pytest.raises(ValueError, match="at least one rank"):
        launch(lambda: None, nprocs=0)
    with pytest.raises(TypeError, match=r"Write launch\(fn, \*args, nprocs=2\)"):
        launch(2)(len)  # type: ignore


@pytest.mark.usefixtures("cold")
def test_launch_reports_a_result_that_cannot_travel() -> None:
    with pytest.raises(RuntimeError, match="result could not be sent") as caught:
        launch(lambda: (step for step in ()), nprocs=1)
    assert "rank 0" in "".join(caught.value.__notes__)


def test_launch_waits_for_nothing_behind_the_last_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        rank = 0

        def done(self) -> bool:
            seen.append("look")
            return len(seen) > 3

    seen: list[str] = []
    monkeypatch.setattr(launching, "_outcome", lambda rank: (True, "a result"))
    monkeypatch.setattr(launching, "PAUSE", 0)
    monkeypatch.setattr(launching.time, "sleep", lambda _: seen.append("sleep"))
    assert launching._gather([Done()]) == {0: "a result"}  # type: ignore[list-item]
    assert seen[-1] == "look"


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    script = f"""
        import os, pathlib, time
        from zfunc.ranks.launching import launch
        def body():
            pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
            time.sleep(600)
        launch(body, nprocs=2)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    parent.kill()
    parent.wait()
    while any(_alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(rank) for rank in ranks)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
