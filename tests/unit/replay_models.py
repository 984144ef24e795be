"""States to record, and how a replay is compared with the state itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

from zfunc.initialisation.recorder import record
from zfunc.initialisation.tape import Recording


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace="zfunc")


def replayed(recording: Recording) -> dict[int, Tensor]:
    taken: dict[int, Tensor] = {}

    def take(i: int, tensor: Tensor) -> None:
        assert i not in taken
        taken[i] = tensor

    recording.replay(take)
    return taken


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return bool(((a == b) | ((a != a) & (b != b))).all())


def check(make_state: Callable[..., Any], *args: Any) -> Recording:
    """The law, twice in a row, and from the same generator state as the plain call."""
    torch.manual_seed(1234)
    torch.rand(3)
    start = torch.get_rng_state()
    expected = make_state(*args)
    end = torch.get_rng_state()
    torch.set_rng_state(start)
    recording = record(make_state, *args)
    assert torch.equal(torch.get_rng_state(), start), "recording drew"
    for _ in range(2):
        torch.set_rng_state(start)
        taken = replayed(recording)
        assert torch.equal(torch.get_rng_state(), end), "the generator ends elsewhere"
        compare(leaves(expected), leaves(recording.tree), taken)
    return recording


def compare(expected: list[Any], shadows: list[Any], taken: dict[int, Tensor]) -> None:
    assert len(expected) == len(shadows)
    assert sorted(taken) == [i for i, leaf in enumerate(expected) if isinstance(leaf, Tensor)]
    for i, (leaf, shadow) in enumerate(zip(expected, shadows, strict=True)):
        if not isinstance(leaf, Tensor):
            assert leaf == shadow
            continue
        for other in (shadow, taken[i]):
            assert (other.dtype, other.shape, other.stride()) == (
                *(leaf.dtype, leaf.shape, leaf.stride()),
            )
            assert type(other) is type(leaf) and other.requires_grad == leaf.requires_grad
        assert shadow.is_meta
        assert same_bits(taken[i], leaf), f"leaf {i}"


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)


class GPT(nn.Module):
    """Constructors draw, and then everything is drawn again, as Hugging Face does."""

    def __init__(self, d: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, d, padding_idx=0)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, 100, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.again)

    def again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            module.weight.data[module.padding_idx].zero_()
