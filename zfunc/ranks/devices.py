"""Which device each rank computes on: one GPU for each rank, or the CPU for all of them.

Schedulers differ: torchrun shows every rank all GPUs of its host and numbers the ranks, ``srun
--gpus-per-task=1`` shows each rank one GPU and calls it 0. What a rank sees is its own matter, but
a world in which one rank computes on the CPU while the others wait for it under NCCL is not. So
the ranks compare what they have found before they make any group, through the store: some ten
small messages each, however many ranks there are. What is wrong with one is an error on all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from zfunc.errors import DesyncError, DeviceError

__all__ = ["CPU", "agree", "asked", "checked", "choose", "host", "local_rank"]

CPU = torch.device("cpu")
ASKED = "ZFUNC_DEVICE"
LOCAL_RANKS = (
    "LOCAL_RANK",  # torchrun
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALRANKID",  # Intel MPI, MPICH
    "MV2_COMM_WORLD_LOCAL_RANK",  # MVAPICH
    "PALS_LOCAL_RANKID",  # Cray
    "FLUX_TASK_LOCAL_ID",
)
TOLD = 4  # how many faults an error lists
ON_THE_CPU = (
    'To compute on the CPU, set ZFUNC_DEVICE=cpu or call zf.init(device="cpu") on all ranks'
)


def checked(device: str | None) -> str | None:
    """``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``None``, which leaves the choice to zfunc.

    Raises:
        ValueError: something else.
    """
    kind, colon, index = (device or "").partition(":")
    if device in (None, "cpu") or (kind == "cuda" and (index.isdecimal() or not colon)):
        return device
    raise ValueError(f"device={device!r} (or {ASKED}): expected 'cpu', 'cuda' or 'cuda:N'")


def asked(device: str | None) -> str | None:
    """What the caller asks for, else what ``ZFUNC_DEVICE`` does."""
    return checked(device if device is not None else os.environ.get(ASKED) or None)


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This rank's index on its host, as the scheduler tells it.

    >>> local_rank({"SLURM_LOCALID": "3"}), local_rank({})
    (3, None)
    """
    for name in LOCAL_RANKS:
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return None


def choose(wanted: str | None, count: int, index: int) -> torch.device | str:
    """The device of the rank with this index on its host, or what is wrong.

    Args:
        wanted: what was asked for; ``None`` is a GPU if there is one.
        count: how many GPUs this rank sees.
        index: this rank's index among the ranks of its host.

    >>> choose(None, 0, 3), choose("cuda", 0, 3)
    (device(type='cpu'), 'cuda was asked for, and it sees no GPU')
    """
    if wanted == "cpu" or (wanted is None and count == 0):
        return CPU
    if count == 0:
        return f"{wanted} was asked for, and it sees no GPU"
    if wanted not in (None, "cuda"):
        index = torch.device(str(wanted)).index
        if index >= count:
            return f"{wanted} was asked for, and it sees {count} GPUs"
    elif count == 1:
        index = 0  # the scheduler has chosen; whether it is shared is found by its identity
    if index >= count:
        return f"it is number {index} of its host, counted from 0, and sees {count} GPUs"
    if not dist.is_nccl_available():
        return "it has a GPU, but its torch was built without NCCL"
    return torch.device("cuda", index)


@dataclass
class Ballot:
    """What the ranks tell each other through a store, once."""

    store: Store
    rank: int
    size: int

    def met(self, what: str) -> bool:
        """Come to a point where all ranks come; true for the last one."""
        return bool(self.store.add(f"{what}/met", 1) == self.size)

    def get(self, key: str) -> str:
        try:
            return bytes(self.store.get(key)).decode()
        except RuntimeError as error:
            came = self.store.add("here/met", 0)
            raise DesyncError(
                f"{came} of {self.size} ranks came to agree on their devices: the others hang, "
                f"ended, or did not start ({error})"
            ) from error

    def index_on_host(self, host: str) -> int:
        """This rank's index among those on its host, in the order of ranks."""
        place = self.store.add(f"host/{host}", 1)
        self.store.set(f"host/{host}/{place}", str(self.rank))
        if self.met("here"):
            self.store.set("all here", "yes")
        self.get("all here")
        count = self.store.add(f"host/{host}", 0)
        return sorted(int(self.get(f"host/{host}/{k}")) for k in range(1, count + 1)).index(
            self.rank
        )

    def shared_with(self, gpu: str) -> int | None:
        """A rank that has named the same GPU before."""
        users = self.store.add(f"gpu/{gpu}", 1)
        self.store.set(f"gpu/{gpu}/{users}", str(self.rank))
        return None if users == 1 else int(self.get(f"gpu/{gpu}/1"))

    def verdict(self, where: str, found: torch.device | str) -> str:
        """What is wrong with the choices of all ranks: the same text on each, or nothing."""
        if isinstance(found, str):
            number = self.store.add("faults", 1)
            self.store.set(f"fault/{number}", f"{where}: {found}")
        else:
            first = self.store.add(f"on/{found.type}", 1) == 1
            if first:
                self.store.set(f"on/{found.type}/first", f"{where} computes on {found}")
        if self.met("chosen"):
            self.store.set("verdict", self._counted())
        return self.get("verdict")

    def _counted(self) -> str:
        faults = self.store.add("faults", 0)
        lines = [self.get(f"fault/{k}") for k in range(1, min(faults, TOLD) + 1)]
        if faults > TOLD:
            lines.append(f"and {faults - TOLD} more ranks")
        kinds = [kind for kind in ("cuda", "cpu") if self.store.add(f"on/{kind}", 0)]
        if len(kinds) == 2:
            lines += [self.get(f"on/{kind}/first") for kind in kinds]
            lines.append(f"{self.store.add('on/cpu', 0)} of {self.size} ranks have no GPU")
        return "; ".join(lines)


def agree(
    store: Store,
    rank: int,
    size: int,
    wanted: str | None,
    bound: torch.device | None = None,
    current: torch.device | None = None,
) -> torch.device:
    """This rank's device, once all ranks have found one of the same kind; a collective.

    Args:
        store: known to all ranks, and used for nothing else.
        rank: this rank.
        size: the number of ranks.
        wanted: what was asked for.
        bound: the device that the user's own process group is bound to.
        current: the one that is current beside such a group; taken if no two ranks have the same,
            for the first is current where nobody has chosen.

    Raises:
        DeviceError: on some rank there is no device to choose; the same error on all.
        DesyncError: a rank did not come within the store's timeout.
    """
    # Ranks that have erred alike may ask again, for the CPU say: nothing said before counts then.
    turn = store.add(f"turn of rank {rank}", 1)
    ballot, here = Ballot(PrefixStore(f"turn {turn}", store), rank, size), host()
    where = f"rank {rank} on host {socket.gethostname()}"
    given = local_rank()
    if current is not None:
        ballot.store.add(f"current/{_identity(here, current)}", 1)
    index = ballot.index_on_host(here)
    if current is not None and ballot.store.add(f"current/{_identity(here, current)}", 0) == 1:
        bound = bound or current
    if bound is not None and wanted in (None, "cuda"):
        found: torch.device | str = bound
    else:
        count = torch.cuda.device_count() if wanted != "cpu" else 0
        found = choose(wanted, count, index if given is None else given)
    if isinstance(found, torch.device) and found.type == "cuda":
        other = ballot.shared_with(_identity(here, found))
        if other is not None:
            found = f"it shares {found} with rank {other}"
    problem = ballot.verdict(where, found)
    if problem:
        raise DeviceError(
            f"each rank needs a GPU of its own, or all compute on the CPU: {problem}. Start as "
            "many ranks on a host as it has GPUs, with one GPU for each (torchrun "
            f"--nproc-per-node=gpu, srun --gpus-per-task=1). {ON_THE_CPU}"
        )
    assert isinstance(found, torch.device)
    return found


def host() -> str:
    """Tells a machine from others, whatever they are called; containers on it are one."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _identity(host: str, device: torch.device) -> str:
    """Tells a GPU from all others, whichever number it has for this rank."""
    unique = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if unique is not None:
        return str(unique)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES", ""))
    listed = [name for name in shown.split(",") if name]
    return f"{host}/{listed[device.index] if device.index < len(listed) else device.index}"
