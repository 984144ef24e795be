"""Backward in two parts is one backward: random graphs, torch's modules, models of Hugging Face.

Gradients to 1e-12 in float64, and products counted: none is computed twice, and none of weights in
the first part.
"""

from __future__ import annotations

import sys
import unittest
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as trees

from tests.laws.covering import Covering
from tests.unit.split_backwards import Handed, Piece, check, largest_difference, split, whole

D = torch.float64
N = 3  # rows and columns of what random graphs compute with


class Both(torch.autograd.Function):
    """``x @ y`` and ``x + y``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x @ y, x + y

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g @ y.T + h, x.T @ g + h


def _written(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[1:].mul_(y[1:])
    z[:, 0] = y[0] @ x
    return z


def _again(x: Tensor, y: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
        lambda a, b: torch.tanh(a @ b) * a, x, y, use_reentrant=False
    )


def _hooked(x: Tensor, y: Tensor) -> Tensor:
    z = x * y
    if z.requires_grad:
        z.register_hook(lambda g: g * 0.5)
    return z


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor | Sequence[Tensor]]] = {
    "product": lambda x, y: x @ y / N,
    "with addend": lambda x, y: torch.addmm(x, x, y, alpha=0.3),
    "batched": lambda x, y: torch.bmm(x[None], y[None])[0] / N,
    "sum": lambda x, y: x + y,
    "scaled": lambda x, y: x * y[0],
    "divided": lambda x, y: x / (2 + y * y),
    "normed": lambda x, y: nn.functional.layer_norm(x, (N,), y[0], y[1]),
    "root": lambda x, y: nn.functional.rms_norm(x, (N,), y[0]),
    "softmax": lambda x, y: torch.softmax(x - y, -1),
    "alone": lambda x, y: torch.tanh(x),
    "transposed": lambda x, y: x.t(),
    "parts": lambda x, y: torch.cat([x, y], -1).split(N, -1),
    "chunks": lambda x, y: torch.cat([x, y]).mul(0.5).chunk(2),
    "function": lambda x, y: Both.apply(x / N, y),  # type: ignore[no-untyped-call]
    "written": _written,
    "same": lambda x, y: x,
    "hooked": _hooked,
}


@st.composite
def programs(
    draw: st.DrawFn, names: Sequence[str], come: list[Any] | None = None
) -> Callable[[], Piece]:
    """Random operations on inputs, weights and what has come of them; anything is an output.

    Args:
        come: where units of one or two weights hand over their gradients, behind one empty end.
    """
    inputs, weights = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    count = draw(st.integers(1, 12))
    pick = st.integers(0, 10**6)
    steps = [(draw(st.sampled_from(names)), draw(pick), draw(pick)) for _ in range(count)]
    picked = draw(st.lists(pick, min_size=1, max_size=4))
    also = draw(st.lists(pick, max_size=1)) if come is None else []
    cut = draw(st.integers(0, weights))

    def make() -> Piece:
        torch.manual_seed(0)
        leaves = [torch.randn(N, N, dtype=D).requires_grad_() for _ in range(inputs + weights)]
        end = torch.zeros(0, requires_grad=True)
        if come is not None:
            for name, unit in (
                ("a", slice(inputs, inputs + cut)),
                ("b", slice(inputs + cut, None)),
            ):
                if leaves[unit]:
                    found = Handed.apply(end, name, come, *(x.detach() for x in leaves[unit]))  # type: ignore[no-untyped-call]
                    leaves[unit] = [found] if isinstance(found, Tensor) else [*found]
        values = [*leaves]
        for name, a, b in steps:
            # What has just been computed is drawn more often: deep graphs.
            x, y = (values[-1 - k % min(4, len(values))] for k in (a, b))
            x = values[a % len(values)] if a % 3 == 0 else x
            y = values[b % len(values)] if b % 2 == 0 else y
            found = OPERATIONS[name](x, y)
            values += [found] if isinstance(found, Tensor) else [*found]
        outs = [values[-1 - k % len(values)] for k in picked]
        ends = (
            [*leaves[inputs:], *(values[k % len(values)] for k in also)] if come is None else [end]
        )
        return outs, leaves[:inputs], ends

    return make


PLAIN = [name for name in OPERATIONS if name not in ("function", "hooked")]


@settings(max_examples=250 if Covering.whole else 80)
@given(programs(PLAIN))
def test_random_graphs(make: Callable[[], Piece]) -> None:
    check(make)


@settings(max_examples=250 if Covering.whole else 80)
@given(programs([*OPERATIONS]))
def test_random_graphs_with_functions_and_hooks(make: Callable[[], Piece]) -> None:
    check(make, parts=False)


@settings(max_examples=60 if Covering.whole else 30)
@given(programs(["product", "sum", "normed", "scaled", "again"]))
def test_random_graphs_with_checkpoints(make: Callable[[], Piece]) -> None:
    expected, got = whole(make), split(make)
    assert largest_difference(got.inputs, expected.inputs) <= 1e-12
    assert largest_difference(got.ends, expected.ends) <= 1e-12
    assert got.first + got.second == expected.first  # the forward of what is computed again, too


UNITS: list[Any] = []


@settings(max_examples=150 if Covering.whole else 50)
@given(programs([*OPERATIONS, "again"], UNITS))
def test_random_graphs_of_units(make: Callable[[], Piece]) -> None:
    """Each unit is handed its gradients once, and the whole of them."""
    UNITS.clear()
    expected = whole(make)
    before = sorted(UNITS, key=lambda unit: str(unit[0]))
    UNITS.clear()
    got = split(make)
    after = sorted(UNITS, key=lambda unit: str(unit[0]))
    assert [name for name, _ in after] == [name for name, _ in before]
    assert len({name for name, _ in after}) == len(after)
    for (_, row), (_, other) in zip(after, before, strict=True):
        assert largest_difference(row, other) <= 1e-12
    assert largest_difference(got.inputs, expected.inputs) <= 1e-12
    assert got.first + got.second == expected.first


OPERATIONS["again"] = _again


def modules() -> list[Any]:
    """torch's table, which also wants a package that only its own tests need."""
    stub: Any = ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    with mock.patch.dict(sys.modules):
        sys.modules.setdefault("expecttest", stub)
        from torch.testing._internal.common_modules import module_db
    return [*module_db]


def piece_of(info: Any, given: Any) -> Piece:
    """A module of torch's own tests on one of the inputs that they have for it."""
    torch.manual_seed(1)
    made, to = given.constructor_input, given.forward_input
    module = info.module_cls(*made.args, **made.kwargs).to(D)
    copy = trees.tree_map_only(
        Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), (to.args, to.kwargs)
    )
    torch.manual_seed(2)  # dropout
    out = module(*copy[0], **copy[1])

    def tracked(tree: Any) -> list[Tensor]:
        return [x for x in trees.tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]

    return tracked(out), tracked(copy), [*module.parameters()]


def test_the_modules_of_torch() -> None:
    """All that torch tests itself with, the first and the last input of each."""
    checked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in modules():
            rows = info.module_inputs_func(
                info, device="cpu", dtype=D, requires_grad=True, training=True
            )
            for given_ in (rows[0], rows[-1]):
                check(lambda info=info, given_=given_: piece_of(info, given_))  # type: ignore[misc]
                checked += 1
    assert checked > 200


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "Bert": {"num_attention_heads": 4},
    "Qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "Gemma2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "T5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_hugging_face(name: str, attention: str) -> None:
    """Unmodified, with a padding mask: bitwise."""
    if (name, attention) == ("Gemma2", "sdpa"):
        attention = "eager"  # it has no other
    import transformers

    sizes = {} if name in ("GPT2", "T5") else SIZES
    config = getattr(transformers, f"{name}Config")(vocab_size=50, **sizes, **CONFIGS[name])
    config._attn_implementation = attention
    module = getattr(transformers, f"{name}Model")(config).to(D).train()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0

    def make() -> Piece:
        torch.manual_seed(5)
        x, y = (torch.randn(2, n, 32, dtype=D).requires_grad_() for n in (9, 5))
        kw: dict[str, Any] = {} if name == "Bert" else {"use_cache": False}
        if name == "T5":
            kw["decoder_inputs_embeds"] = y
        out = module(inputs_embeds=x, attention_mask=mask, **kw)
        outs = [out.last_hidden_state]
        outs += [out.encoder_last_hidden_state] if name == "T5" else []
        return outs, [x, y], [*module.parameters()]

    got, expected = check(make), whole(make)
    for a, b in zip([*got.inputs, *got.ends], [*expected.inputs, *expected.ends], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
