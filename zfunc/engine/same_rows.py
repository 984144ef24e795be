"""Whether ranks that share the work on a part of a batch were given the same part.

Ranks along ``tensor`` and ``pipe`` compute together on the same rows. With other rows the numbers
would be nobody's, and nothing else would notice. So each call of a step begins a sum over all ranks
of two numbers for each part of the batch: with digests ``d`` of what its ``n`` ranks were given,
``d`` and ``d * d``, modulo 2**64. The ranks have the same where ``n * sum(d * d) == sum(d) ** 2``:
the difference is the sum of the squares of all differences. Every rank learns it of every part.

The first call after a state was placed, and each with tensors of other shapes, waits for the
answer. The others go on, and raise when their metrics are there; on a GPU, for which no host waits,
in a later call.

What a loss is given beside them has to be the same, too: noise that the step has drawn, say. It is
compared at once in the first call, and with the rows of the next one from then on.

Of the same rows such ranks make the same loss. A transform may note it, and the next call compares
it with the rows: roughly, since a device may add in another order each time. A penalty that takes a
split leaf for a whole one is seen there, though it counts from the thousandth step on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from zfunc.buffers.readings import Reading
from zfunc.engine.batches import described, has_rows, is_plain, leaves_of
from zfunc.errors import DesyncError, PlacementError
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Handle
from zfunc.ranks.digests import as_bytes, mixed_digest
from zfunc.ranks.meshes import SHARED, Mesh, laid_out
from zfunc.ranks.world import current, on_renewal
from zfunc.trees.kinds import FORESEEN
from zfunc.trees.tree import dotted

__all__ = ["look_anew", "note_loss", "same_arguments", "with_same_rows"]

LABEL = "rows of step.local_batch"
_ODD = 0x9E3779B97F4A7C15  # of SplitMix64: digests that change places change their sum
_MASK = (1 << 64) - 1
ROWS, LOSSES, ARGUMENTS = 1, 2, 4  # what differs
# Losses are compared as whole numbers: these are ten apart for .1 %, or near zero for 1e-5.
_SMALL, _FINE, _APART = 1e-2, 1e4, 10
Call = Callable[[Any, Any, Any], Any]


def with_same_rows(
    on: Mesh | None,
    averaged: Sequence[str],
    call: Call,
    state: Any,
    args: Any,
    kwargs: Any,
    beside: str = "",
) -> Any:
    """``call(state, args, kwargs)``, with the same arguments on all ranks that share work.

    Nothing is looked at where no rank shares its rows with another. A collective otherwise, but for
    calls within such a call.

    Args:
        averaged: axes of the mesh along which ranks may have other rows; others than ``tensor``
            and ``pipe`` they may have other rows along in any case.
        beside: what else has to be the same on all: arguments of ``pipeline``.

    Raises:
        PlacementError: the arguments differ; on all ranks.
    """
    if on is None or not [1 for x, n in on.axes if n != 1 and x in SHARED and x not in averaged]:
        return call(state, args, kwargs)
    watch = _watch(on, tuple(x for x in on.names if x not in SHARED or x in averaged))
    if watch.busy or watch.ways == 1:
        return call(state, args, kwargs)
    with watch.over(args, kwargs, beside):
        return call(state, args, kwargs)


def _watch(on: Mesh, averaged: tuple[str, ...]) -> _Watch:
    watches = current().memo.setdefault("same rows", {}).setdefault(on, {})
    if averaged not in watches:
        mesh = laid_out(on)
        watches[averaged] = _Watch(mesh, tuple(x for x in mesh.names if x in averaged))
    found: _Watch = watches[averaged]
    return found


def look_anew(on: Mesh | None) -> None:
    """A state has been placed: nothing is known of what its steps will be given."""
    current().memo.get("same rows", {}).pop(on, None)


def note_loss(on: Mesh | None, loss: Tensor) -> None:
    """What this rank made of its rows: so did those that share them, as the next call checks."""
    for watch in current().memo.get("same rows", {}).get(on, {}).values():
        watch.loss = loss


def same_arguments(given: Any) -> None:
    """What a step gives a loss: ranks that share rows give it the same.

    Raises:
        PlacementError: they do not; on all ranks.
    """
    for watches in [] if FORESEEN.get() else current().memo.get("same rows", {}).values():
        for watch in watches.values():
            if watch.busy:
                watch.compare(given)


@on_renewal.append
def _forget() -> None:
    """What was under way will not come."""
    current().memo.pop("same rows", None)


@dataclass
class _Watch:
    """What one rank knows of the arguments of its steps on one mesh.

    Attributes:
        mesh: with all its sizes.
        averaged: its axes along which ranks may have other rows.
        known: what arguments are made of, of those that were waited for.
        own: the ids of the arguments of the call that is running.
        told: a digest of what losses were given beside them since the last call was looked at.
        loss: of the last call, 0-d, if that was noted.
        bad: what differed in some call that was not looked at, 0-d on a device.
        asked: the same as it was known to the device some calls ago, on its way to the host.
        busy: whether a call is running.
    """

    mesh: Mesh
    averaged: tuple[str, ...]
    known: set[str] = field(default_factory=set)
    own: frozenset[int] = frozenset()
    told: Tensor | int = 0
    loss: Tensor | None = None
    bad: Tensor | None = None
    asked: Reading | None = None
    busy: bool = False

    @property
    def ways(self) -> int:
        """How many ranks have the same rows."""
        return self.mesh.world_size // self.parts

    @property
    def parts(self) -> int:
        """How many parts a batch has."""
        return self.mesh.size(self.averaged) if self.averaged else 1

    @contextmanager
    def over(self, args: Any, kwargs: Any, beside: str) -> Iterator[None]:
        """Around one call with these arguments."""
        self._raise_if_known()
        leaves = [*leaves_of((args, kwargs))]
        kinds, digest = _digest(leaves, beside)
        rows, self.told = digest + self.told, 0
        sums = self._summed(rows, self._whole_number(rows))
        if kinds not in self.known:
            if found := int(self._differ(sums)):
                raise self._error(found)
            self.known.add(kinds)
        self.busy, self.own = True, frozenset(id(x) for _, x in leaves)
        try:
            yield
        except DesyncError as error:  # of ranks that compute on other rows, or have raised for that
            self.told = 0
            with suppress(DesyncError):
                if found := int(self._differ(sums)):
                    raise self._error(found) from error
            raise
        except BaseException:
            self.told = 0  # others may have come less far
            raise
        finally:
            self.busy, self.own = False, frozenset()
        self._note(self._differ(sums))

    def compare(self, given: Any) -> None:
        """A loss is given this."""
        rest = [(path, x) for path, x in leaves_of(given) if id(x) not in self.own]
        if not rest:
            return
        kinds, digest = _digest(rest, "a loss")
        if kinds in self.known:
            self.told = digest + self.told * _signed(_ODD)
        elif int(self._differ(self._summed(digest, torch.zeros_like(digest)))):
            raise self._error(ARGUMENTS)
        else:
            self.known.add(kinds)

    def _summed(self, digest: Tensor, loss: Tensor) -> Handle[Tensor]:
        """``[4 * parts]`` int64: four numbers of each part."""
        own = torch.stack([digest, loss])
        row = torch.zeros(self.parts, 2, 2, dtype=torch.int64, device=digest.device)
        row[self._part()] = torch.stack([own, own * own], 1)
        return group(self.mesh, self.mesh.names).all_reduce(row.flatten(), label=LABEL)

    def _whole_number(self, like: Tensor) -> Tensor:
        """The last loss as one, where there is one on the device of the rows."""
        loss, self.loss = self.loss, None
        if loss is None or loss.device != like.device or loss.is_meta:
            return torch.zeros_like(like)
        fine = torch.asinh(loss.double() / _SMALL) * _FINE
        return fine.nan_to_num(nan=-1e9, posinf=1e9, neginf=-1e9).round().to(like.dtype)

    def _part(self) -> int:
        """Which part of a batch this rank has."""
        at, sizes = 0, self.mesh.sizes
        for name, place in self.mesh.coordinates(current().rank).items():
            at = at * sizes[name] + place if name in self.averaged else at
        return at

    def _differ(self, sums: Handle[Tensor]) -> Tensor:
        """What differs between ranks of some part, 0-d."""
        total, squares = sums.wait().view(-1, 2, 2).unbind(2)
        rows, losses = (self.ways * squares - total * total).unbind(1)  # of all differences squared
        differ = (rows != 0).any() * ROWS + (losses > _APART * _APART).any() * LOSSES
        # Nobody knows what ranks have that are not there.
        return torch.zeros_like(differ) if FORESEEN.get() else differ

    def _note(self, differ: Tensor) -> None:
        """Remember it until the host can know, which is at once where there is no device."""
        if differ.is_cuda:
            self.bad = differ if self.bad is None else self.bad | differ
            self.asked = Reading(self.bad) if self.asked is None else self.asked
        elif not FORESEEN.get() and (found := int(differ)):
            raise self._error(found)

    def _raise_if_known(self) -> None:
        if self.asked is not None and self.asked.arrived:
            found, self.asked = int(self.asked.wait()), None
            if found:
                self.bad = None
                raise self._error(found)

    def _error(self, found: int) -> PlacementError:
        names = [x for x, size in self.mesh.axes if size > 1 and x not in self.averaged]
        ranks = f"ranks along {' and '.join(map(repr, names))} of {self.mesh} work together on the "
        if found & ARGUMENTS:
            return PlacementError(
                f"{ranks}same rows of a batch, but the step gave a loss other arguments on some. "
                "Draw what is random by a key that they share: noise = zf.random.normal(zf.random."
                "fold_in(state.key, state.step), x.shape)."
            )
        if found & ROWS:
            return PlacementError(
                f"{ranks}same rows of a batch, but some were given other arguments for the step, "
                "or of pipeline, or for a loss in the call before. Give them all "
                "step.local_batch(global_batch), which cuts over data and replica alone, draw what "
                "is random by a key that they share, and wrap the step alike."
            )
        return PlacementError(
            f"{ranks}same rows of a batch, and the call before this one gave them other losses: "
            "what a rank has of its own went into the loss, such as a norm of its part of a split "
            "leaf. Compute with split leaves by zf.column, zf.row, zf.embed and "
            "zf.cross_entropy, or leave them whole (rules={...: None})."
        )


def _digest(leaves: Sequence[tuple[Any, Any]], beside: str) -> tuple[str, Tensor]:
    """What leaves, each behind its path, are made of; one digest of their values, 0-d int64."""
    kinds = [beside] if beside else []
    found: list[Tensor] = []
    whole = xxhash.xxh3_64()
    for path, x in leaves:
        if isinstance(x, Tensor):
            kinds.append(f"{dotted(*path)} {x.dtype} {list(x.shape)}")
            if x.device.type == "cpu":
                whole.update(as_bytes(x.detach().contiguous()))
            elif not x.is_meta:
                found.append(mixed_digest(x))
        elif has_rows(x):
            kinds.append(f"{dotted(*path)} {x.dtype} {list(x.shape)}")
            whole.update(x.tobytes())
        else:
            kinds.append(f"{dotted(*path)} {described(x)}")
            whole.update(repr(x).encode() if is_plain(x) else b"")
    text = "; ".join(kinds)
    whole.update(text.encode())
    number = whole.intdigest()
    if not found:
        return text, torch.tensor(_signed(number), device="cpu")
    total = found[0]
    for digest in found[1:]:
        total = total * _signed(_ODD) + digest
    return text, total + _signed(number)


def _signed(number: int) -> int:
    """A number modulo 2**64 as an int64."""
    return number - (1 << 64) if number & _MASK > _MASK >> 1 else number
