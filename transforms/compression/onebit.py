"""One bit an element: how 1-bit Adam and its kind put numbers on the wire.

Sources: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Tang et al., 1-bit Adam, 2021;
Li et al., 1-bit LAMB, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from zfunc.kernels.frozen import (
    adamw_frozen_,
    frozen_hyper,
    momentum_shares_,
    shares_hyper,
)
from zfunc.kernels.onebit import (
    onebit_bytes,
    onebit_mean_,
    onebit_pack_,
    onebit_unpack,
    onebit_unpack_,
)
from zfunc.transforms.compression.onebit_leaves import leafwise

if TYPE_CHECKING:
    from zfunc.transforms.compression.exchange import Codec

__all__ = ["OneBit", "rehearse"]

GROUPS = tuple(2**k for k in range(7, 14))


@dataclass(frozen=True)
class OneBit:
    """Signs, and a scale for each ``group`` of elements; what they leave out is kept as an error.

    Attributes:
        group: elements of a leaf that share a scale; ``None`` for all that travel to one rank
            together, whatever leaves these are.
        scaling: ``"mean"`` of the absolute values, which leaves the smallest error; ``"rms"``, as
            published, with which large elements wait less long in the errors; or ``"auto"``: rms
            for momentum as it is, whose large elements matter most, and else the mean.
    """

    group: int | None = 2048
    scaling: str = "auto"

    freezes: ClassVar[bool] = True  # of a sign nothing is left that second moments could learn

    def __post_init__(self) -> None:
        if self.group is not None and self.group not in GROUPS:
            raise ValueError(
                f"group={self.group!r}: expected a power of two from {GROUPS[0]} to {GROUPS[-1]}, "
                "or None for one scale for all that travels to a rank."
            )
        if self.scaling not in ("mean", "rms", "auto"):
            raise ValueError(f"scaling={self.scaling!r}: expected 'mean', 'rms' or 'auto'.")

    @property
    def taken(self) -> str:
        """``"mean"`` or ``"rms"``."""
        return "mean" if self.scaling == "auto" else self.scaling

    def of_momentum(self) -> OneBit:
        """What suits momentum as it is."""
        return self if self.scaling != "auto" else replace(self, scaling="rms")

    def over(self, leaves: Sequence[tuple[int, int, int]]) -> Codec:
        """The same for a buffer of these leaves, no group of which reaches into two.

        >>> OneBit(128).over([(0, 200, 200), (200, 210, 10), (210, 250, 40)]).blocks[0][1]
        Ragged(lengths=(128, 72, 50), scaling='mean')
        """
        if self.group is None:
            return self
        return leafwise(self, self.group, self.taken, leaves)

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of ``n`` elements whose errors are in ``dtype``."""
        return self._scales(n) * dtype.itemsize + onebit_bytes(n)

    def pack_(self, x: Tensor, error: Tensor) -> Tensor:
        """``x + error`` as bytes; ``error`` becomes what they leave out."""
        bits, scale = onebit_pack_(x, error, group=self.group, scaling=self.taken)
        return torch.cat([scale.view(torch.uint8), bits])

    def mean_(self, received: Sequence[Tensor], error: Tensor) -> Tensor:
        """The mean of what came from all ranks, plus ``error``, as bytes; likewise."""
        bits, scale = self._split(torch.stack(list(received)), len(error), error.dtype)
        how = {"group": self.group, "scaling": self.taken}
        bits, scale = onebit_mean_(bits, scale, error, **how)  # type: ignore[arg-type]
        return torch.cat([scale.view(torch.uint8), bits])

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The numbers, of ``dtype``, that bytes stand for: ``[n]``, or one row each."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        bits, scale = self._split(data, n, wide)
        return onebit_unpack(bits, scale, n, group=self.group, dtype=dtype)

    def unpack_(self, data: Tensor, out: Tensor) -> None:
        """The same into the 1-D ``out``."""
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        onebit_unpack_(*self._split(data, len(out), wide), out, group=self.group)

    def _scales(self, n: int) -> int:
        return -(-n // self.group) if self.group else 1

    def _split(self, data: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cut = self._scales(n) * dtype.itemsize
        scale = data[..., :cut].reshape(-1).clone().view(dtype)  # aligned, as a view must be
        return data[..., cut:].contiguous(), scale.view(*data.shape[:-1], self._scales(n))


def rehearse(codec: OneBit, stage: int) -> None:
    """What a compressed step of 1-bit Adam does, on one float32 of a CPU.

    Its machine code takes 0.3 s to make, as long as several steps of a small model.
    """
    x, error, mean, root = torch.zeros(4, 1, device="cpu").unbind()
    if not stage:
        momentum_shares_(x, mean, root, shares_hyper(0.9, 1.0))
    for one in (codec.over([(0, 1, 1)]), codec):  # of many leaves, and of one
        data = one.pack_(x, error)
        if stage:
            one.unpack(data[None], 1, x.dtype)
        else:
            one.unpack_(one.mean_([data], error), x)
    adamw_frozen_(x, mean, root, frozen_hyper(0.0, 1.0, 1.0, most=1.0), shares=not stage)
