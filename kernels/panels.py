"""Products of a few rows with 8-bit and 4-bit codes on a CPU, in panels of 16 outputs.

    y[m, n] = sum_g scale[n, g] (sum_{k in g} code[n, k] x[m, k] - zero[n, g] sum_{k in g} x[m, k])

Inputs are rounded row by row to 8 bits (W8A8, W4A8) or to 16, as two rows of 8; integer sums are
exact. Codes are read once, a byte or half a byte each, in the order in which memory gives them:
that is the roofline of a few rows, ``bits / 8 * n * k`` bytes. They are stored in panels of 16
outputs, ``[panels, k / 4, 16, 4]`` (4 bits: two steps of 4 columns in a byte), made unsigned.

Where :func:`host` says that there is no such code, :mod:`zfunc.quant` takes torch's own products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from zfunc.kernels import llvm, panels_llvm, tiles_llvm
from zfunc.kernels.llvm import host
from zfunc.kernels.panels_llvm import LINE
from zfunc.kernels.tiles_llvm import EDGE

__all__ = [
    "WIDEST",
    "Panels",
    "Rounded",
    "host",
    "linear",
    "matmul",
    "panels",
    "rounded",
    "takes",
    "worth",
]

OUTPUTS = 16  # of a panel
CHUNKS = (64, 32, 16)  # columns that rows are cut into: the first that a group is a multiple of
TILED = {8: 5, 4: 32}  # rows of bytes from which tiles are faster, by the bits of the weights
ALONE = 1 << 15  # bytes of inputs up to which each thread rounds them for itself
LITTLE = 1 << 15  # bytes of weights below which a second thread costs more than it saves
WIDEST = (1 << 17) - 1  # columns of a group: one more product of 128 * 128 and int32 overflows
MOST = 64  # rows that plain vectors multiply in less time than fp32 takes with its weights to make
ROWS = {"avx512vnni": (1, 2, 3, 4, 6, 8, 12, 16), "avxvnni": (1, 2, 3, 4, 6), "avx2": (1, 2, 3, 4)}


@dataclass(frozen=True)
class Panels:
    """A matrix ``[n, k]`` of codes in panels.

    Attributes:
        data: uint8, 1-D: ``panels * groups * lines`` lines of 64 bytes.
        scale: ``[groups, 16 panels]`` fp32 or bf16.
        zero: the same, int8, or None.
        bits: 8 or 4.
        rows: ``(n, k)``.
        width: columns of a group.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    rows: tuple[int, int]
    width: int

    @functools.cached_property
    def groups(self) -> int:
        return self.scale.shape[0]

    @functools.cached_property
    def count(self) -> int:
        return self.scale.shape[1] // OUTPUTS

    @functools.cached_property
    def filled(self) -> int:
        """Columns of a group with what fills it up."""
        return _filled(self.width, self.groups)

    @functools.cached_property
    def lines(self) -> int:
        """Lines of a group in a panel."""
        return self.filled * self.bits // 32

    @functools.cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Where codes, scales and zero points (or none, 0) lie."""
        zero = 0 if self.zero is None else self.zero.data_ptr()
        return self.data.data_ptr(), self.scale.data_ptr(), zero

    @functools.cached_property
    def kind(self) -> tuple[int, bool, bool]:
        """Which code multiplies with them."""
        return self.bits, self.zero is not None, self.scale.dtype == torch.bfloat16

    def looked_up(self, where: Tensor) -> Tensor:
        """The codes of some rows ``[rows, k]`` int8, for ``where`` int64 ``[rows]``."""
        fours = self.data.view(self.count, -1, OUTPUTS, 4)[where // OUTPUTS, :, where % OUTPUTS]
        if self.bits == 4:
            fours = torch.stack([fours & 15, fours >> 4], dim=2)
        return (fours.flatten(1)[:, : self.rows[1]] - _offset(self.bits)).view(torch.int8)

    def codes(self) -> Tensor:
        """``[n, k]`` int8."""
        n, k = self.rows
        fours = self.data.view(torch.int32)
        if self.bits == 4:
            bytes_ = self.data.view(self.count, -1, 1, LINE)
            fours = torch.cat([bytes_ & 15, bytes_ >> 4], dim=2).view(torch.int32)
        flat = fours.view(self.count, -1, OUTPUTS).transpose(1, 2).contiguous().view(torch.uint8)
        wide = flat.view(self.count * OUTPUTS, self.groups * self.filled)[:n, :k]
        return (wide - _offset(self.bits)).view(torch.int8)  # modulo 256


def _offset(bits: int) -> int:
    """What makes codes of so many bits unsigned."""
    return 1 << (bits - 1)


def _filled(width: int, groups: int) -> int:
    return width if groups > 1 else -(-width // CHUNKS[0]) * CHUNKS[0]


def takes(width: int, groups: int) -> bool:
    """Whether groups of so many columns can be put in panels here, and their sums in int32."""
    fits = (groups == 1 or width % OUTPUTS == 0) and width <= WIDEST
    if fits and not host().isa:
        llvm.say_missing()
    return fits and bool(host().isa)


def worth(m: int) -> bool:
    """Whether that pays for ``m`` rows: many are for fp32 where bytes take five instructions."""
    return m <= MOST or host().isa != "avx2"


def panels(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, width: int) -> Panels:
    """Codes ``[n, k]`` int8 with scales and zero points ``[n, groups]`` in panels."""
    (n, k), groups = codes.shape, scale.shape[1]
    count, columns = -(-n // OUTPUTS), groups * _filled(width, groups)
    wide = codes.new_full((count * OUTPUTS, columns), -_offset(bits)).view(torch.uint8)
    torch.add(codes.view(torch.uint8), _offset(bits), out=wide[:n, :k])
    fours = wide.view(torch.int32).view(count, OUTPUTS, -1).transpose(1, 2).contiguous()
    data = fours.view(torch.uint8)
    if bits == 4:
        low, high = data.view(count, -1, 2, LINE).unbind(2)
        data = low | (high << 4)
    zeros = None if zero is None else _columns(zero, count)
    return Panels(data.reshape(-1), _columns(scale, count), zeros, bits, (n, k), width)


def _columns(grid: Tensor, count: int) -> Tensor:
    out = grid.new_zeros(grid.shape[1], count * OUTPUTS)
    out[:, : len(grid)] = grid.t()
    return out


@dataclass(frozen=True)
class Rounded:
    """Rows ``[m, k]`` as bytes, for panels of one layout.

    Attributes:
        codes: int8, the blocks one behind the other.
        start: int32 ``[blocks, groups, rows of bytes]``, what the sums begin with.
        sums: fp32, of each group's codes.
        scale: ``[blocks * rows]`` fp32, of each row.
        m: rows that were given.
        rows: of a block.
        halves: bytes of a number, 1 or 2.
        blocks: how many there are.
        chunk: columns of a tile, 0 where there are none.
    """

    codes: Tensor
    start: Tensor
    sums: Tensor
    scale: Tensor
    m: int
    rows: int
    halves: int
    blocks: int
    chunk: int


def rounded(x: Tensor, like: Panels, bits: int) -> Rounded:
    """``x`` fp32 ``[m, k]`` rounded to 8 or 16 ``bits``, for panels that are ``like`` these."""
    x = x.contiguous()
    (m, k), halves, groups, filled = x.shape, bits // 8, like.groups, like.filled
    chunk = next(c for c in CHUNKS if filled % c == 0)
    tiled = host().tiles and m * halves >= TILED[like.bits] and chunk > OUTPUTS
    rows = EDGE // halves if tiled else _rows(m, halves)
    blocks = -(-m // rows)
    if tiled and blocks > 1:
        blocks += blocks % 2  # they are taken by twos
    inputs = blocks * rows * halves
    codes = torch.empty(inputs * groups * filled, dtype=torch.int8)
    start = torch.empty(inputs * groups, dtype=torch.int32)
    sums, scale = torch.empty(inputs * groups), torch.empty(blocks * rows)
    panels_llvm.rounding(host().isa, halves, chunk, tiled)(
        [
            *(t.data_ptr() for t in (x, codes, start, sums, scale)),
            *(m, k, groups, filled // chunk, _offset(like.bits), rows),
        ],
        1 if m * k < 1 << 16 else 0,
    )
    return Rounded(codes, start, sums, scale, m, rows, halves, blocks, chunk if tiled else 0)


def _rows(m: int, halves: int) -> int:
    """Rows of a block: the fewest blocks, and among them the smallest."""
    sizes = [r // halves for r in ROWS[host().isa] if r % halves == 0]
    blocks = -(-m // sizes[-1])
    return next(size for size in sizes if size * blocks >= m)


def linear(x: Tensor, weight: Panels, bits: int) -> Tensor:
    """``x W^T`` ``[m, n]`` for fp32 ``x`` ``[m, k]``, which is rounded to 8 or 16 ``bits``."""
    (m, k), halves = x.shape, bits // 8
    tiled = host().tiles and m * halves >= TILED[weight.bits]
    if not 0 < m * k * halves <= ALONE or tiled or m * halves > ROWS[host().isa][-1]:
        return matmul(rounded(x, weight, bits), weight)
    x = x.contiguous()
    rows, n = _rows(m, halves), weight.rows[0]
    out = torch.empty(rows, n)
    chunk, inputs = CHUNKS[-1], rows * halves
    threads = 1 if weight.data.nbytes < LITTLE else 0
    small = 4 * weight.groups * inputs
    parts = weight.groups * weight.filled * inputs, small, small, 4 * rows
    memory, scratch = llvm.scratch(parts, threads)
    form = (rows, halves, *weight.kind, _chains(weight.lines, rows * halves))
    panels_llvm.linear(host().isa, chunk, *form)(
        [
            *(x.data_ptr(), *weight.addresses, out.data_ptr()),
            *(weight.count, weight.groups, weight.lines, n, m, k, weight.filled // chunk),
            *scratch,
        ],
        threads,
    )
    del memory  # now that nobody works in it
    return out if m == rows else out.resize_(m, n)  # no view


def matmul(x: Rounded, weight: Panels) -> Tensor:
    """``x W^T`` ``[m, n]`` fp32."""
    n, groups, count, room = weight.rows[0], weight.groups, weight.count, None
    out = torch.empty(x.blocks * x.rows, n)
    form = (host().isa, x.rows, x.halves, *weight.kind)
    arguments = [
        *(x.codes.data_ptr(), *weight.addresses),
        *(t.data_ptr() for t in (x.start, x.sums, x.scale, out)),
        *(count, x.blocks, groups, weight.lines, n),
    ]
    if x.chunk:
        wide = 2 - count % 2
        each = wide * groups * weight.filled * OUTPUTS
        if weight.bits == 4:
            room = torch.empty(torch.get_num_threads() * each + LINE, dtype=torch.uint8)
            arguments += [-(-room.data_ptr() // LINE) * LINE, each]
        else:
            arguments += [0, 0]
        tiles_llvm.tiled(*form, x.chunk, 2 - x.blocks % 2, wide)(arguments)
    else:
        panels_llvm.product(*form, _chains(weight.lines, x.rows * x.halves))(arguments)
    return out.resize_(x.m, n)  # no view, which autograd would treat as one


@functools.cache
def _chains(lines: int, inputs: int) -> int:
    """Sums for each row: so many that an instruction need not wait for the one before."""
    return next((c for c in (4, 2) if lines % c == 0 and c * inputs <= 8), 1)
