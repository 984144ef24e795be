"""A decoder layer of odd size for the tests of its fused blocks, and what they give in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.closeness import assert_near, distance
from tests.kernels.products import Weights, weights
from zfunc import kernels

HEADS, GROUPS, WIDTH, LENGTH = 3, 2, 32, 9
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    """Inputs ``x`` ``[m, k]``, weights, tables and positions, the last of which is too far."""

    x: Tensor
    norm: Tensor
    heads: Weights
    bias: Tensor
    halves: Weights
    angles: Tensor
    positions: Tensor

    def normed(self) -> Tensor:
        x = self.x.double()
        return x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm.double()

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the caches of keys and values."""
        y = self.normed() @ self.heads.exact.t() + self.bias.double()
        parts = y.view(len(y), HEADS + 2 * GROUPS, WIDTH)
        angles = self.angles[self.positions.clamp_max(LENGTH - 1)].double()[:, None]
        # Where a position is too far, the query is of no use: it turns by the first angle.
        angles = torch.where(
            (self.positions < LENGTH)[:, None, None], angles, self.angles[0].double()
        )
        c, s = (f(angles).float().double() for f in (torch.cos, torch.sin))
        a, b = parts[:, : HEADS + GROUPS].chunk(2, 2)
        turned = torch.cat([a * c - b * s, b * c + a * s], 2)
        keys, values = torch.zeros(2, len(y), GROUPS, LENGTH, WIDTH).double().unbind()
        for m, position in enumerate(self.positions.tolist()):
            if position < LENGTH:
                keys[m, :, position] = turned[m, HEADS:]
                values[m, :, position] = parts[m, HEADS + GROUPS :]
        return turned[:, :HEADS], keys, values

    def gate_up(self, activation: str = "silu") -> Tensor:
        gate, up = (self.normed() @ self.halves.exact.t()).chunk(2, 1)
        return activated(gate, activation) * up

    def eager(self, activation: str = "silu") -> tuple[Tensor, Tensor]:
        """Queries and the gated half as models compute them in bfloat16, rounding on the way."""
        dtype, x = self.x.dtype, self.x.float()
        normed = self.norm * (x * (x.square().mean(1, keepdim=True) + EPS).rsqrt()).to(dtype)
        y = F.linear(normed, self.heads.exact.to(dtype), self.bias)
        q = y.view(len(y), -1, WIDTH)[:, :HEADS]
        angles = torch.where(
            (self.positions < LENGTH)[:, None], self.angles[self.positions % LENGTH], self.angles[0]
        )
        c, s = (f(angles).to(dtype)[:, None].repeat(1, 1, 2) for f in (torch.cos, torch.sin))
        a, b = q.chunk(2, 2)
        gate, up = F.linear(normed, self.halves.exact.to(dtype)).chunk(2, 1)
        return q * c + torch.cat([-b, a], 2) * s, activated(gate, activation) * up


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")


def layer(kind: str, group: int | None, m: int, k: int) -> Layer:
    """A random one; of several rows the last has a position beyond the cache."""
    positions = torch.full((m,), 4)
    if m > 2:
        positions[-1] = LENGTH
    return Layer(
        torch.randn(m, k).bfloat16(),
        torch.randn(k).bfloat16(),
        weights(kind, (HEADS + 2 * GROUPS) * WIDTH, k, group=group, zeros=group == 32),
        torch.randn((HEADS + 2 * GROUPS) * WIDTH).bfloat16(),
        weights(kind, 2 * 70, k, group=group),
        torch.rand(LENGTH, WIDTH // 2) * 6,
        positions,
    )


def qkv(case: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel makes of a layer: queries, keys, values."""
    keys, values = torch.zeros(2, len(case.x), GROUPS, LENGTH, WIDTH).bfloat16().unbind()
    turn = case.angles.cos(), case.angles.sin()
    rest = (*turn, case.positions, keys, values)
    q = kernels.norm_qkv_rope(case.x, case.norm, case.heads.packed, *rest, bias=case.bias, eps=EPS)
    return q, keys, values


def gate_up(case: Layer, activation: str = "silu") -> Tensor:
    """Likewise the gated half."""
    return kernels.norm_gate_up(
        case.x, case.norm, case.halves.packed, activation=activation, eps=EPS
    )


def cut(weight: kernels.Packed, *rows: int) -> list[kernels.Packed]:
    """The same matrix as several, of so many rows each."""
    data, scale, zero = (
        (None,) * len(rows) if t is None else t.split(rows)
        for t in (weight.data, weight.scale, weight.zero)
    )
    parts = zip(data, scale, zero, strict=True)
    return [kernels.Packed(weight.kind, d, weight.length, s, z, weight.group) for d, s, z in parts]  # type: ignore[arg-type]


def in_parts(case: Layer, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and the gated half, of weights in several matrices."""
    keys, values = torch.zeros(2, len(case.x), GROUPS, LENGTH, WIDTH).bfloat16().unbind()
    heads = cut(case.heads.packed, HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH)
    rest = (case.angles.cos(), case.angles.sin(), case.positions, keys, values)
    how = {"slots": slots, "bias": case.bias, "eps": EPS}
    q = kernels.norm_qkv_rope(case.x, case.norm, heads, *rest, **how)  # type: ignore[arg-type]
    halves = cut(case.halves.packed, 70, 70)
    return q, keys, values, kernels.norm_gate_up(case.x, case.norm, halves, eps=EPS)


def assert_parts_are_one(kind: str, group: int | None) -> None:
    """Several matrices give what one does, in slots that are not the positions."""
    case = layer(kind, group, 3, 300)
    q, halves = case.eager()
    slots = torch.tensor([6, 0, LENGTH])
    found, (_, keys, values) = in_parts(case, slots), qkv(case)
    assert_near(found[0], case.qkv()[0], q)
    assert_near(found[3], case.gate_up(), halves)
    for old, new in ((keys, found[1]), (values, found[2])):
        written = torch.stack([new[0, :, 6], new[1, :, 0]])
        assert distance(written, old[:2, :, 4].double()) < 0.01
        # Of two texts and two groups; the third text has no room.
        assert int((new != 0).any(-1).sum()) == 4
