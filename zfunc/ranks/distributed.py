"""The world of a process under ``torch.distributed``, whoever initialised that.

Of a process group that the user made only the ranks, the store and the device are used. What zfunc
sends goes through groups of its own, which end with the process; the user's group is never
destroyed or aborted. Finding the world takes no communication. Ranks communicate when the first
group is made, which all of them do together.
"""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from zfunc.errors import DesyncError, DeviceError
from zfunc.ranks import devices, world
from zfunc.ranks.adjacency import is_direct
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.gloo import LOOK, PATIENCE, Place, PointToPoint, unreached
from zfunc.ranks.transport import Transport, absent

__all__ = ["DistributedWorld"]

JUDGED, MISSING = "judged: ", "missing: "  # how a verdict begins


class DistributedWorld(world.World):
    """One rank of an initialised ``torch.distributed``.

    Args:
        timeout: seconds a collective waits for a silent peer.
        device: what ``init`` was asked for.
        agreed: the device that all ranks have agreed on already, as ``init`` does.
    """

    def __init__(
        self,
        timeout: float | None = None,
        device: str | None = None,
        agreed: torch.device | None = None,
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout)
        self._accelerated = "nccl" in str(dist.get_backend_config())
        self._own = agreed is not None  # whether the process group is that of ``init``
        self._device = agreed
        self._part: Store | None = None
        self._departed = False
        self._attempt = 0  # at a meeting; failed ones are not gone back to
        self.asked = device

    @property
    def device(self) -> torch.device:
        """The GPU that ``init`` or the user selected for this rank, or the CPU."""
        if self._device is not None:
            return self._device
        if self._accelerated and devices.asked(self.asked) != "cpu":
            return self._bound() or torch.device("cuda", torch.cuda.current_device())
        return devices.CPU

    def ask(self, device: str) -> None:
        """Compute on this device, as all ranks ask.

        Raises:
            ValueError: the ranks have agreed on another one already.
        """
        wanted = devices.checked(device)
        agreed = None if self._device is None else str(self._device)
        if agreed is not None and wanted not in (agreed, agreed.partition(":")[0]):
            raise ValueError(
                f"init(device={device!r}): this world computes on {agreed} already; ask at the "
                "first call of zf.init(), before anything is placed"
            )
        self.asked = wanted

    def connect(self, axis: str, members: tuple[int, ...]) -> ConnectedGroup:
        """The group of these ranks; the first one makes sure that the ranks' devices fit together.

        Raises:
            DeviceError: they do not, or the process group lacks the backend for them.
        """
        return ConnectedGroup(axis, self, members, lambda: self.transport(members))

    def transport(self, members: tuple[int, ...]) -> Transport:
        """A new one between these ranks."""
        if self._device is None:
            self._device = self._agreed()
        cpu = self._host_transport(members)
        if self._device.type == "cpu":
            return cpu
        from zfunc.ranks.nccl import Native  # nobody loads it where there is no GPU

        return Native(
            self._communicator(members, "gathers"),
            cpu,
            reductions=lambda: self._new_communicator(members, "reductions"),
            late=lambda: self.unchecked > 0,
            directions=lambda pair: self._new_communicator(
                (members[pair[0]], members[pair[1]]), f"messages in {_name_of(members)}"
            ),
        )

    def _host_transport(self, members: tuple[int, ...]) -> PointToPoint:
        place = self._place(members)
        if is_direct(len(members)):
            return PointToPoint(place, self.timeout)
        from zfunc.ranks.halving import Halving  # nobody loads it in a small world

        return Halving(place, self.timeout)

    def _agreed(self) -> torch.device:
        wanted = devices.asked(self.asked)
        if not self._accelerated:
            # Known to all ranks alike, since the process group is.
            if wanted not in (None, "cpu"):
                raise DeviceError(
                    f"device {wanted} was asked for, but the process group that was made before "
                    f"zfunc has no NCCL ({dist.get_backend_config()}): make it with "
                    'dist.init_process_group("nccl"), or leave that to zf.init()'
                )
            return devices.CPU
        store, bound, current = PrefixStore("devices", self._store()), self._bound(), None
        if bound is None and torch.cuda.device_count() > 0 and wanted != "cpu":
            current = torch.device("cuda", torch.cuda.current_device())
        device = devices.agree(store, self.rank, self.size, wanted, bound, current)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def _bound(self) -> torch.device | None:
        """The GPU that the user has bound to the process group."""
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is None or bound.type != "cuda":
            return None
        return torch.device("cuda", bound.index or 0)

    def _store(self) -> Store:
        """A part of the process group's store that no world before this one has written to."""
        if self._part is None:
            store = dist.distributed_c10d._get_default_store()
            turn = store.add(f"zfunc/worlds of rank {self.rank}", 1)
            self._part = PrefixStore(f"zfunc/world {turn}", store)
            atexit.register(self._end)
        return self._part

    def _place(self, members: tuple[int, ...], purpose: str = "host") -> Place:
        store = PrefixStore(f"{purpose} of {_name_of(members)}, epoch {self.epoch}", self._store())
        stops = partial(self._said, f"stopped in {self.epoch}")
        return Place(
            members.index(self.rank), members, store, partial(self._said, "departed"), stops
        )

    def _announce_stop(self, why: str) -> None:
        with suppress(RuntimeError, ValueError):
            self._store().set(f"stopped in {self.epoch}/{self.rank}", why)

    def meet(self, report: str, judge: world.Judge, until: float) -> str:
        try:
            verdict = self._met(report, judge, until)
        except RuntimeError as error:
            raise unreached(error) from error
        self._attempt += 1
        if verdict.startswith(MISSING):
            raise DesyncError(verdict.removeprefix(MISSING))
        return verdict.removeprefix(JUDGED)

    def _met(self, report: str, judge: world.Judge, until: float) -> str:
        """The verdict, which is reached once: by who sees all reports, or by who waits in vain."""
        began, everyone = time.monotonic(), range(self.size)
        while self._meeting().check(["verdict"]):  # the others gave it up before this rank came
            self._attempt += 1
        store = self._meeting()
        store.set(f"report/{self.rank}", report)
        pause = 0.005
        while not store.check(["verdict"]):
            missing = [rank for rank in everyone if not store.check([f"report/{rank}"])]
            reasons = {rank: self._said("departed", rank) for rank in missing}
            if not missing:
                reports = [bytes(store.get(f"report/{rank}")).decode() for rank in everyone]
                store.compare_set("verdict", "", JUDGED + judge(reports))
            elif time.monotonic() > until or any(reasons.values()):
                waited = time.monotonic() - began
                store.compare_set("verdict", "", MISSING + absent(reasons, waited))
            else:
                time.sleep(pause)
                pause = min(2 * pause, LOOK)  # one store answers all ranks
        verdict = bytes(store.get("verdict")).decode()
        store.add("read", 1)
        if self.rank == 0 and verdict != JUDGED:  # it may serve the store, and end now
            came = sum(store.check([f"report/{rank}"]) for rank in everyone)
            until = time.monotonic() + PATIENCE
            while store.add("read", 0) < came and time.monotonic() < until:
                time.sleep(LOOK)
        return verdict

    def _meeting(self) -> Store:
        return PrefixStore(f"recovery {self._attempt}", self._store())

    def depart(self, why: str) -> None:
        for group in self.groups:
            group.finish()
        self._announce_departure(why)

    def _announce_departure(self, why: str) -> None:
        if self._departed:
            return
        self._departed = True
        with suppress(RuntimeError, ValueError):  # the store is gone, or the process group
            self._store().set(f"departed/{self.rank}", why)
        for group in self.groups:
            group.hang_up()

    def _end(self) -> None:
        """At the process's end; peers of one that an exception ends hear that it is gone."""
        if getattr(sys, "last_value", None) is None:
            self._announce_departure("has ended")

    def _said(self, what: str, rank: int) -> str:
        """Why a rank has left, or stopped; an empty text if it has not."""
        with suppress(RuntimeError):  # the store is gone
            if self._store().check([f"{what}/{rank}"]):
                return bytes(self._store().get(f"{what}/{rank}")).decode()
        return ""

    def _communicator(self, members: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
        """NCCL between the members: that of the process group, if ``init`` made it for all.

        In later epochs that one has been stopped.
        """
        if self._own and self.epoch == 0 and len(members) == self.size:
            return dist.group.WORLD  # type: ignore[return-value]
        return self._new_communicator(members, purpose)

    def _new_communicator(self, members: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
        """NCCL between the members, made without the other ranks and without a collective.

        ``dist.new_group`` is called by all ranks for every group, or else tells groups apart by
        how many this rank has seen.
        """
        place, device = self._place(members, purpose), self.device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout)
        options.global_ranks_in_group = list(members)
        nccl = dist.ProcessGroupNCCL(place.store, place.rank, len(members), options)
        made = dist.ProcessGroup(place.store, place.rank, len(members))
        made._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        made._register_backend(device, dist.ProcessGroup.BackendType.NCCL, nccl)
        atexit.register(made.shutdown)  # torch ends only the groups that it made
        return made

    def device_mesh(self, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
        """A ``DeviceMesh`` with these axes, for other libraries; made once, by all ranks."""
        made: DeviceMesh | None = self.memo.get(("device_mesh", sizes))
        if made is None:
            names = tuple(name for name, _ in sizes)
            shape = tuple(size for _, size in sizes)
            made = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            self.memo["device_mesh", sizes] = made
        return made


def _name_of(members: tuple[int, ...]) -> str:
    few = len(members) < 9
    return "-".join(map(str, members)) if few else f"{len(members)} {hash(members):x}"
