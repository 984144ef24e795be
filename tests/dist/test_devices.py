"""Which device each rank computes on, under every starter; and process groups that users made."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from tests.dist.pretended import gpus
from zfunc.errors import DesyncError, DeviceError
from zfunc.ranks import devices, world
from zfunc.ranks.axes import group
from zfunc.ranks.comm import unchecked
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.distributed import DistributedWorld
from zfunc.ranks.gloo import PointToPoint
from zfunc.ranks.launching import init, launch
from zfunc.ranks.nccl import Native

# Each case: of three ranks, the GPUs that each sees, its host and its environment; what was asked
# for; and the devices, or what the error says on all ranks.
Case = tuple[list[str], list[str], list[dict[str, str]], str | None, list[str]]
ONE_HOST, TWO_HOSTS = ["a", "a", "a"], ["a", "b", "a"]
TORCHRUN = [{"LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "3"} for r in range(3)]
SLURM = [{"SLURM_LOCALID": "0"}, {"SLURM_LOCALID": "0"}, {"SLURM_LOCALID": "1"}]
NOTHING: list[dict[str, str]] = [{}, {}, {}]

CASES: dict[str, Case] = {
    "torchrun": (["0,1,2"] * 3, ONE_HOST, TORCHRUN, None, ["cuda:0", "cuda:1", "cuda:2"]),
    "more GPUs than ranks": (
        ["0,1,2,3"] * 3,
        ONE_HOST,
        TORCHRUN,
        None,
        ["cuda:0", "cuda:1", "cuda:2"],
    ),
    "srun --gpus-per-task=1": (["0", "1", "2"], ONE_HOST, TORCHRUN, None, ["cuda:0"] * 3),
    "srun on two hosts": (["0,1"] * 3, TWO_HOSTS, SLURM, None, ["cuda:0", "cuda:0", "cuda:1"]),
    "no word of the scheduler": (
        ["0,1"] * 3,
        TWO_HOSTS,
        NOTHING,
        None,
        ["cuda:0", "cuda:0", "cuda:1"],
    ),
    "one each, no word": (["2", "0", "1"], TWO_HOSTS, NOTHING, None, ["cuda:0"] * 3),
    "no GPUs": ([""] * 3, ONE_HOST, TORCHRUN, None, ["cpu"] * 3),
    "the CPU by argument": (["0,1,2"] * 3, ONE_HOST, TORCHRUN, "cpu", ["cpu"] * 3),
    "the CPU by environment": (
        ["0,1,2"] * 3,
        ONE_HOST,
        [e | {"ZFUNC_DEVICE": "cpu"} for e in TORCHRUN],
        None,
        ["cpu"] * 3,
    ),
    "one by name": (
        ["0,1,2"] * 3,
        TWO_HOSTS,
        [{"ZFUNC_DEVICE": f"cuda:{2 - r}"} for r in range(3)],
        None,
        ["cuda:2", "cuda:1", "cuda:0"],
    ),
    "fewer GPUs than ranks": (
        ["0,1"] * 3,
        ONE_HOST,
        TORCHRUN,
        None,
        [r"rank 2 on host a: it is number 2 .* sees 2 GPUs", r"ZFUNC_DEVICE=cpu"],
    ),
    "none on one rank": (
        ["0", "", "1"],
        TWO_HOSTS,
        SLURM,
        None,
        [
            r"rank \d on host a computes on cuda:0; rank 1 on host b computes on cpu",
            "1 of 3 ranks have no GPU",
        ],
    ),
    "one for two": (
        ["0", "1", "0"],
        ONE_HOST,
        TORCHRUN,
        None,
        [r"rank [02] on host a: it shares cuda:0 with rank [02]"],
    ),
    "asked for and missing": (
        ["0", "", "1"],
        ONE_HOST,
        TORCHRUN,
        "cuda",
        [r"rank 1 on host a: cuda was asked for, and it sees no GPU"],
    ),
    "no such GPU": (
        ["0,1"] * 3,
        ONE_HOST,
        TORCHRUN,
        "cuda:5",
        ["on host a: cuda:5 was asked for, and it sees 2 GPUs"],
    ),
}


def chosen() -> dict[str, str]:
    """The device of this rank in each case, or the error."""
    here, found = world.current(), {}
    for name, (seen, hosts, environments, asked, _) in CASES.items():
        clean = dict.fromkeys((*devices.LOCAL_RANKS, "ZFUNC_DEVICE"), "")
        store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        with (
            mock.patch.dict(os.environ, clean | environments[here.rank]),
            gpus(seen[here.rank], hosts[here.rank]),
        ):
            try:
                wanted = devices.asked(asked)
                found[name] = str(devices.agree(store, here.rank, here.size, wanted))
            except DeviceError as error:
                found[name] = f"DeviceError: {error}"
    return found


def test_a_table_of_environments() -> None:
    outcomes = launch(chosen, nprocs=3, timeout=60)
    for name, (*_, expected) in CASES.items():
        found = [outcome[name] for outcome in outcomes]
        if expected[0].startswith(("cpu", "cuda:")):
            assert found == expected, name
        else:
            assert len(set(found)) == 1, (name, "ranks err alike")
            for pattern in expected:
                assert re.search(pattern, found[0]), (name, found[0])


def test_ranks_that_have_erred_alike_may_ask_again() -> None:
    store = HashStore()

    def asking(rank: int) -> str:
        with pytest.raises(DeviceError, match="cuda was asked for, and it sees no GPU"):
            devices.agree(store, rank, 2, "cuda")
        return str(devices.agree(store, rank, 2, "cpu"))

    with gpus("", "a"), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(asking, range(2))) == ["cpu", "cpu"]


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cpu:0", "gpu"])
def test_a_device_that_cannot_be_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        devices.checked(device)


def rejoined(backend: str | None, turn: int, bound: bool = False) -> None:
    """Leave the world of ``launch``, and make a process group as users do."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        dist.destroy_process_group()
    world.adopt(None)
    client = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    device = {"device_id": torch.device("cuda", 1 - rank)} if bound else {}
    dist.init_process_group(
        backend, store=PrefixStore(f"user {turn}", client), rank=rank, world_size=size, **device
    )


def foreign() -> list[Any]:
    """Under each process group that a user may have made: the device, and that we can work."""
    rank, rows = int(os.environ["RANK"]), []
    configs: list[tuple[str | None, bool, int | None, str | None]] = [
        ("nccl", False, None, None),
        ("nccl", True, None, None),
        ("nccl", False, 1 - rank, None),
        ("cpu:gloo,cuda:nccl", False, None, None),
        ("gloo", False, None, None),
        ("cuda:nccl", False, None, "cpu"),
        ("gloo", False, None, "cuda"),
    ]
    for turn, (backend, bound, current, asked) in enumerate(configs):
        with gpus("0,1", "a"), mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank)}):
            rejoined(backend, turn, bound)
            theirs, sub = dist.group.WORLD, dist.new_group([0, 1])
            if current is not None:
                torch.cuda.set_device(current)
            init(timeout=30, device=asked)
            joined = world.current()
            assert isinstance(joined, DistributedWorld)
            try:
                ranks = group(None, "data")
            except DeviceError as error:
                rows.append(str(error))
                continue
            total = ranks.all_reduce(torch.ones(3)).wait()
            assert total.tolist() == [2.0] * 3 and ranks.exchange(rank) == [0, 1]
            kind = type(ranks._transport).__name__
            rows.append((str(joined.device), kind))
            assert dist.group.WORLD is theirs and dist.get_world_size(sub) == 2
            if kind == "Native":
                assert ranks._transport._pg is not theirs  # type: ignore[attr-defined]
    return rows


def test_process_groups_that_the_user_made() -> None:
    for rank, rows in enumerate(launch(foreign, nprocs=2, timeout=60)):
        mine, other = (f"cuda:{rank}", "Native"), (f"cuda:{1 - rank}", "Native")
        cpu = ("cpu", "PointToPoint")
        assert rows[:6] == [mine, other, other, mine, cpu, cpu]
        assert "has no NCCL" in rows[6] and 'init_process_group("nccl")' in rows[6]


class OnHost(Native):
    """The transport for GPUs, on tensors that are on the CPU."""

    def _hosts(self, data: torch.Tensor) -> bool:
        return False


def communicators() -> dict[str, Any]:
    """Native collectives over communicators of our own, pretended: headers late, one aborts all."""
    joined: Any = world.current()
    members = tuple(range(joined.size))
    with gpus("", "a"):
        made = {what: joined._new_communicator(members, what) for what in ("gathers", "reductions")}
    asked: list[str] = []

    def reductions() -> Any:
        asked.append("reductions")
        return made["reductions"]

    cpu = PointToPoint(joined._place(members, "tests"), joined.timeout)
    transport = OnHost(made["gathers"], cpu, reductions, late=lambda: joined.unchecked > 0)
    ranks = ConnectedGroup("data", joined, (), lambda: transport)
    found: dict[str, Any] = {}
    full = torch.zeros(5)
    cuts = [0, 1, 5]
    low, high = cuts[ranks.rank : ranks.rank + 2]
    ranks.all_gather(full, torch.full((high - low,), ranks.rank + 1.0), cuts=cuts).wait()
    found["gathered"], found["lazy"] = full.tolist(), list(asked)
    found["sum"] = ranks.all_reduce(torch.ones(2)).wait().tolist()
    ranks.reduce_scatter(torch.ones(4)).wait()
    found["made"] = list(asked)
    # Rank 1 takes another path. Inside a step nobody looks, before it ends.
    went_on = False
    try:
        with unchecked():
            ranks.all_reduce(torch.ones(2), label=f"unit of rank {ranks.rank}").wait()
            ranks.all_reduce(torch.ones(2), label="after").wait()
            went_on = True
    except DesyncError as error:
        found["error"] = str(error)
    found["went on"] = went_on
    found["aborted"] = transport._aborted
    return found


def test_native_groups_have_two_communicators_and_check_late() -> None:
    for rank, found in enumerate(launch(communicators, nprocs=2, timeout=60)):
        assert found["gathered"] == [1.0, 2.0, 2.0, 2.0, 2.0]
        assert found["lazy"] == [] and found["made"] == ["reductions"]
        assert found["sum"] == [2.0, 2.0]
        assert found["went on"] and found["aborted"]
        assert f"'unit of rank {1 - rank}'" in found["error"].split("but rank")[1]
