"""Matrices as products of a few rows read them: of 16 bits, of int8 codes, of words of 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.kernels.operators import KernelError

__all__ = [
    "BITS",
    "BLOCK",
    "Matrix",
    "NormedProduct",
    "Packed",
    "dequantized",
    "pack_words",
    "unpack_words",
]

BLOCK = 128  # codes of a row whose words lie together
BITS = {"skinny_mm": 16, "w8_mm": 8, "w4_mm": 4, "w8a8_mm": 8}


def pack_words(codes: Tensor) -> Tensor:
    """Codes of 4 bits as words, in the order in which :func:`~zfunc.kernels.w4_mm` reads them.

    Args:
        codes: ``[N, K]`` int8, -8 to 7.

    Returns:
        ``[N, 16 * ceil(K / 128)]`` int32. Of each 128 codes, word ``r`` has at bit ``4 j + 16 h``
        the code ``32 j + 2 r + h``, plus 8; codes beyond the end are 0.

    >>> words = pack_words(torch.tensor([[1, -8, 7]], dtype=torch.int8))
    >>> words.shape, [hex(w & 0xFFFFFFFF) for w in words[0, :2].tolist()]
    (torch.Size([1, 16]), ['0x88808889', '0x8888888f'])
    """
    n, k = codes.shape
    wide = F.pad(codes.to(torch.int32) + 8, (0, -k % BLOCK), value=8)
    nibbles = wide.view(n, -1, 4, 16, 2)
    shifts = 4 * torch.arange(4, device=codes.device)[:, None, None]
    shifts = (shifts + 16 * torch.arange(2, device=codes.device)).to(torch.int32)
    words = (nibbles.long() << shifts).sum((2, 4))  # no two nibbles share a bit
    return (words - ((words >> 31) << 32)).to(torch.int32).view(n, -1)


def unpack_words(words: Tensor, length: int) -> Tensor:
    """The codes ``[N, length]`` int8 of :func:`pack_words`.

    >>> unpack_words(pack_words(torch.tensor([[1, -8, 7]], dtype=torch.int8)), 3)
    tensor([[ 1, -8,  7]], dtype=torch.int8)
    """
    n = words.shape[0]
    shifts = 4 * torch.arange(4, device=words.device)[:, None, None]
    shifts = (shifts + 16 * torch.arange(2, device=words.device)).to(torch.int32)
    nibbles = (words.view(n, -1, 1, 16, 1) >> shifts) & 15
    return (nibbles.view(n, -1)[:, :length] - 8).to(torch.int8)


@dataclass(frozen=True)
class Packed:
    """A matrix ``[N, K]`` as a product reads it.

    Attributes:
        kind: ``"skinny_mm"``, ``"w8_mm"``, ``"w4_mm"`` or ``"w8a8_mm"``.
        data: ``[N, K]`` of 16 bits or int8; words of 4-bit codes.
        length: K.
        scale: ``[N, groups]`` floating-point, for codes.
        zero: ``[N, groups]`` int8, the code that stands for 0; ``None`` where it is 0.
        group: elements of a row that share a scale; ``None``: all.
    """

    kind: str
    data: Tensor
    length: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int | None = None

    @staticmethod
    def of(weight: Tensor) -> Packed:
        """A plain matrix."""
        return Packed("skinny_mm", weight, weight.shape[1])

    def check(self, name: str) -> None:
        """Refuse parts that do not fit together.

        Raises:
            KernelError: so it is.
        """
        n, k = self.data.shape[0], self.length
        bits = BITS[self.kind]
        width = -(-k // BLOCK) * 16 if bits == 4 else k
        kinds = {4: (torch.int32,), 8: (torch.int8,), 16: ()}[bits]
        groups = -(-k // self.group) if self.group else 1
        parts = [x for x in (self.scale, self.zero) if x is not None]
        good = self.data.shape == (n, width) and (not kinds or self.data.dtype in kinds)
        good = good and (bits < 16) == bool(parts)
        if not good or any(x.shape != (n, groups) for x in parts):
            raise KernelError(
                f"kernels.{name}: weights {self.data.dtype}{list(self.data.shape)} with scales and "
                f"zeros {[tuple(x.shape) for x in parts]}; expected "
                f"{kinds[0] if kinds else 'floating-point'}{[n, width]} for rows of {k}"
                + (f" with scales {(n, groups)} (group={self.group})." if bits < 16 else ".")
            )


class Matrix(NamedTuple):
    """The parts of a :class:`Packed` as operators take them; ``group`` is 0 for a whole row."""

    w: Tensor
    scale: Tensor | None
    zero: Tensor | None
    kind: str
    group: int


class NormedProduct(NamedTuple):
    """Rows ``[M, K]``, the weight of their norm, and matrices whose rows follow each other: all of
    one kind and group, with scales and zeros for each or for none."""

    x: Tensor
    norm: Tensor
    w: list[Tensor]
    scale: list[Tensor]
    zero: list[Tensor]
    kind: str
    group: int
    eps: float

    @property
    def matrices(self) -> list[Matrix]:
        none: list[Any] = [None] * len(self.w)
        parts = zip(self.w, self.scale or none, self.zero or none, strict=True)
        return [Matrix(*part, self.kind, self.group) for part in parts]

    @property
    def how(self) -> dict[str, Any]:
        """What matters to the dispatch."""
        rows = {"rows": len(self.x), "dtype": self.x.dtype}
        return rows | {"kind": self.kind, "group": self.group}


def dequantized(weight: Matrix, length: int) -> Tensor:
    """The matrix ``[N, K]`` that codes stand for, in the wide dtype of its scales."""
    w, scale, zero, kind, group = weight
    if scale is None:
        return w
    wide = torch.promote_types(scale.dtype, torch.float32)
    codes = (unpack_words(w, length) if BITS[kind] == 4 else w).to(wide)
    if not group:
        return (codes if zero is None else codes - zero) * scale.to(wide)
    grouped = F.pad(codes, (0, -length % group)).view(len(w), -1, group)
    if zero is not None:
        grouped = grouped - zero[:, :, None]
    return (grouped * scale.to(wide)[:, :, None]).flatten(1)[:, :length]
